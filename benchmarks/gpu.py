"""The 12B's true shape with random weights: equality with transformers, memory and time, as ratios.

    python benchmarks/gpu.py [--small] [--device cuda] [--rounds 7] [-o FILE]

One transformers model is built on the device and its storage shared, so both run the same weights. Exit code 1
when any logit differs. `--small` runs the same script on a small model, on any device.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import randomise, ratios

from lens_gemma4 import HookedModel

TEXT_12B: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 3840,
    "intermediate_size": 15_360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}
VISION_12B = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "output_proj_dims": 3840,
}
TEXT_SMALL = TEXT_12B | {
    "vocab_size": 1000,
    "hidden_size": 60,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
}
VISION_SMALL = VISION_12B | {
    "patch_size": 2,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
    "output_proj_dims": 32,
}
TOKENS = {"image_token_id": 990, "audio_token_id": 991, "video_token_id": 992}


def build(small: bool, device: str) -> Any:
    """The wrapper with vision and audio, random bfloat16 weights, straight on the device."""
    from transformers import (
        Gemma4UnifiedConfig,
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedTextConfig,
    )

    text = Gemma4UnifiedTextConfig(**(TEXT_SMALL if small else TEXT_12B))
    vision = VISION_SMALL if small else VISION_12B
    config = Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config={}, **(TOKENS if small else {})
    )
    with torch.device(device):
        model = Gemma4UnifiedForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.eval().requires_grad_(False)
    randomise(model)
    return model


def prompts(cfg: Any, device: str) -> dict[str, dict[str, torch.Tensor]]:
    """Text longer than two windows, a left-padded batch, and a prompt with an image."""
    generator = torch.Generator().manual_seed(1)
    length = 2 * cfg.window_size + 5
    top = min(cfg.d_vocab, 900 if cfg.d_vocab <= 1000 else 250_000)
    text = torch.randint(5, top, (1, length), generator=generator)
    batch = torch.randint(5, top, (2, 48), generator=generator)
    mask = torch.ones_like(batch)
    mask[0, :11], batch[0, :11] = 0, 0
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(5)).flip(-1)[
        None
    ]  # [image patch axis]
    pixels = torch.rand(1, grid.shape[1], cfg.vision.d_patch, generator=generator)
    image = torch.cat(
        [text[:, :7], torch.full((1, grid.shape[1]), cfg.image_token_id), text[:, 7:20]], dim=1
    )
    given = {
        "text": {"input_ids": text},
        "padded": {"input_ids": batch, "attention_mask": mask},
        "image": {
            "input_ids": image,
            "pixel_values": pixels,
            "image_position_ids": grid,
            "mm_token_type_ids": (image == cfg.image_token_id).long(),
        },
    }
    return {
        name: {key: value.to(device) for key, value in inputs.items()}
        for name, inputs in given.items()
    }


def rules() -> str:
    """Which mask rules and which spelling of sdpa the installed transformers has."""
    from transformers.integrations import sdpa_attention
    from transformers.models.gemma4_unified import modeling_gemma4_unified as modeling

    source = inspect.getsource(sdpa_attention)
    return (
        f"windowed image masks in generate: {hasattr(modeling, 'create_masks_for_vision_model')}; "
        f"sdpa repeats heads over 256: {'<= 256' in source}; regroups a single query: {'pack_gqa' in source}"
    )


def peak(call: Callable[[], Any], device: str) -> float:
    """Peak memory of a call above what is held, in MB; 0 without a card."""
    if not device.startswith("cuda"):
        call()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def synced(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    def run() -> Any:
        out = call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return out

    return run


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if not args.small and not args.device.startswith("cuda"):
        print(
            "the full 12B needs a CUDA card; --small runs the same checks on a small model here",
            file=sys.stderr,
        )
        return 2
    card = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    version = importlib.metadata.version("transformers")
    lines = [
        f"{datetime.date.today()}  {card}, torch {torch.__version__}, transformers {version}",
        rules(),
    ]
    print("\n".join(lines), flush=True)
    begin = time.perf_counter()
    hf_model = build(args.small, args.device)
    model = HookedModel.from_pretrained(hf_model=hf_model)
    lines.append(
        f"built in {time.perf_counter() - begin:.1f} s, {model.n_params_total / 1e9:.2f} billion weights"
    )
    wrong = 0
    for name, inputs in prompts(model.cfg, args.device).items():
        for attention in ("sdpa", "eager"):
            hf_model.set_attn_implementation(attention)
            model.set_attn_implementation(attention)
            theirs, ours = hf_model(**inputs).logits, model(**inputs)
            real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            difference = (theirs.float() - ours.float()).abs()[real].max().item()
            equal = torch.equal(theirs[real], ours[real])
            moved = _control(model, inputs, ours, real)
            wrong += not (equal and moved)
            lines.append(
                f"{name:7} {attention:6} largest difference {difference:g} {'' if equal else 'DIFFERS'} control moves: {moved}"
            )
            print(lines[-1], flush=True)
            del theirs, ours
        lines += _costs(hf_model, model, name, inputs, args.device, args.rounds)
        print(lines[-1], flush=True)
    lines.append("equal to the last bit" if not wrong else f"{wrong} comparisons failed")
    print(lines[-1])
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return int(wrong > 0)


def _control(model: HookedModel, inputs: Any, ours: torch.Tensor, real: torch.Tensor) -> bool:
    """Whether leaving one layer scalar out is seen: a comparison that cannot fail proves nothing."""
    scalar = model.blocks[-1].layer_scalar
    kept = scalar.clone()
    scalar.fill_(1.0)
    moved = not torch.equal(model(**inputs)[real], ours[real])
    scalar.copy_(kept)
    return moved


def _costs(
    hf_model: Any, model: HookedModel, name: str, inputs: Any, device: str, rounds: int
) -> list[str]:
    hf_model.set_attn_implementation("sdpa")
    model.set_attn_implementation("sdpa")
    calls = {
        "transformers": synced(lambda: hf_model(**inputs).logits, device),
        "forward": synced(lambda: model(**inputs), device),
        "stream cached": synced(
            lambda: model.run_with_cache(**inputs, names_filter="blocks.*.hook_resid_post"), device
        ),
    }
    base = peak(calls["transformers"], device)
    lines = []
    for call, (low, middle, high) in ratios(calls, "transformers", rounds).items():
        memory = peak(calls[call], device)
        times = f"time {middle:.3f} ({low:.3f} to {high:.3f})"
        lines.append(
            f"{name:7} {call:14} {times}, peak memory {memory:.0f} MB ({memory / base if base else 1:.2f})"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
