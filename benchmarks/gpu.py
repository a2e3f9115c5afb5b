"""The 12B's true shape with random weights: equality with transformers, memory and time, as ratios; every head ablated.

    python benchmarks/gpu.py [--small] [--device cuda] [--dtype bfloat16] [--rounds 7] [-o FILE]

One transformers model is built on the device and its storage shared, so both run the same weights and
24 GB hold both. Exit code 1 when any logit differs. `--small` runs the same on a small model, on any device.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import TEXT_SMALL, calm, randomise, ratios
from torch import Tensor

from lens_gemma4 import HookedModel, ablate, logit_difference
from lens_gemma4 import model as network

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
    "use_bidirectional_attention": "vision",
}
VISION_12B = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "output_proj_dims": 3840,
}
VISION_SMALL = VISION_12B | {
    "patch_size": 2,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
    "output_proj_dims": 32,
}
MEDIA_SMALL = {"image_token_id": 290, "audio_token_id": 291, "video_token_id": 292}


class Row(NamedTuple):
    """One comparison of logits on real tokens."""

    prompt: str
    attention: str
    difference: float
    finite: bool
    control: bool  # whether a layer scalar left out is seen: a comparison that cannot fail proves nothing

    @property
    def holds(self) -> bool:
        return self.difference == 0 and self.finite and self.control

    def __str__(self) -> str:
        verdict = "ok" if self.holds else "FAILS"
        return (
            f"{self.prompt:9} {self.attention:6} largest difference {self.difference:g}, finite: {self.finite}, "
            f"control differs: {self.control}  {verdict}"
        )


# -- building -----------------------------------------------------------------------------------------


@torch.no_grad()
def build(small: bool, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """transformers' wrapper with vision and audio, random weights made where they stay."""
    import transformers
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    text = transformers.Gemma4UnifiedTextConfig(
        **(TEXT_SMALL | {"use_bidirectional_attention": "vision"} if small else TEXT_12B)
    )
    vision = VISION_SMALL if small else VISION_12B
    media = MEDIA_SMALL if small else {}
    config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config={}, **media)
    with torch.device(device):
        model = Gemma4UnifiedForConditionalGeneration._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.eval().requires_grad_(False)
    randomise(model)
    _rotary_from_cpu(model.model.language_model.rotary_emb)
    return model


def _rotary_from_cpu(rotary: Any) -> None:
    """Frequencies as transformers' loader makes them, on the CPU: powers on a card round unlike."""
    made = dict(type(rotary)(rotary.config).named_buffers())
    for name, value in rotary.named_buffers():
        value.copy_(made[name])


def prompts(cfg: Any, device: str) -> dict[str, dict[str, Tensor]]:
    """Text of one token and of two windows, a left-padded batch, and an image inside text."""
    generator = torch.Generator().manual_seed(1)
    top = min(cfg.d_vocab, 250_000) - 20  # below the media tokens
    text = torch.randint(5, top, (1, 2 * cfg.window_size + 5), generator=generator)
    batch = torch.randint(5, top, (2, cfg.window_size + 30), generator=generator)
    mask = torch.ones_like(batch)
    mask[0, :11], batch[0, :11] = 0, 0
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(5)).flip(-1)[
        None
    ]  # [image patch axis]
    pixels = torch.rand(1, grid.shape[1], cfg.vision.d_patch, generator=generator)
    image = torch.cat(
        [text[:, :7], torch.full((1, grid.shape[1]), cfg.image_token_id), text[:, 7:20]], dim=1
    )
    media = {
        "pixel_values": pixels,
        "image_position_ids": grid,
        "mm_token_type_ids": (image == cfg.image_token_id).long(),
    }
    given = {
        "one token": {"input_ids": text[:, :1]},
        "text": {"input_ids": text},
        "padded": {"input_ids": batch, "attention_mask": mask},
        "image": {"input_ids": image, **media},
    }
    return {
        name: {key: value.to(device) for key, value in inputs.items()}
        for name, inputs in given.items()
    }


# -- comparing ----------------------------------------------------------------------------------------


@torch.no_grad()
def compare(
    hf_model: Any, model: HookedModel, prompt: str, inputs: dict[str, Tensor], attention: str
) -> Row:
    """Both models on one input; rows of padding are left out."""
    hf_model.set_attn_implementation(attention)
    model.set_attn_implementation(attention)
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    theirs, ours = hf_model(**inputs).logits[real], model(**inputs)[real]
    difference = largest_difference(theirs, ours)
    del theirs
    return Row(
        prompt,
        attention,
        difference,
        bool(ours.isfinite().all()),
        _control(model, inputs, ours, real),
    )


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Row by row: float32 copies of a whole prompt's logits over 262,144 words would fill gigabytes."""
    if torch.equal(a, b):
        return 0.0
    return max((x.float() - y.float()).abs().max().item() for x, y in zip(a, b, strict=True))


def _control(model: HookedModel, inputs: dict[str, Tensor], ours: Tensor, real: Tensor) -> bool:
    scalar = model.blocks[-1].layer_scalar
    kept = scalar.clone()
    scalar.fill_(1.0)
    try:
        return not torch.equal(model(**inputs)[real], ours)
    finally:
        scalar.copy_(kept)


# -- what it costs ------------------------------------------------------------------------------------


def on_card(device: str) -> bool:
    return torch.device(device).type == "cuda"


def peak(call: Callable[[], Any], device: str) -> float | None:
    """Peak memory of a call above what is held, in MB; None without a card."""
    if not on_card(device):
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def synced(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The call together with the work it left on the card."""

    def run() -> Any:
        out = call()
        if on_card(device):
            torch.cuda.synchronize()
        return out

    return run


@torch.no_grad()
def costs(
    hf_model: Any, model: HookedModel, inputs: dict[str, Tensor], device: str, rounds: int
) -> list[str]:
    """Time and peak memory of ours over transformers', sdpa."""
    hf_model.set_attn_implementation("sdpa")
    model.set_attn_implementation("sdpa")
    stream = "blocks.*.hook_resid_post"
    calls = {
        "transformers": synced(lambda: hf_model(**inputs).logits, device),
        "forward": synced(lambda: model(**inputs), device),
        "stream cached": synced(
            lambda: model.run_with_cache(**inputs, names_filter=stream), device
        ),
    }
    base = peak(calls["transformers"], device)
    lines = []
    for call, (low, middle, high) in ratios(calls, "transformers", rounds).items():
        line = f"{call:14} time {middle:.3f} ({low:.3f} to {high:.3f})"
        if (memory := peak(calls[call], device)) is not None and base:
            line += f", peak above the weights {memory:.0f} MB ({memory / base:.2f})"
        lines.append(line)
    return lines


# -- every head ablated ----------------------------------------------------------------------------------


def heads_ablated(hf_model: Any, model: HookedModel, device: str, tokens: int = 32) -> list[str]:
    """A map of every head zeroed in turn, by the engine and by a loop of hooks over transformers: seconds of each.

    The two round differently, and low precision makes much of it: how far they agree is said by how far a map is from that of
    the neighbouring heads.
    """
    hf_model.set_attn_implementation("sdpa")
    ids = prompts(model.cfg, device)["text"]["input_ids"][:, :tokens]
    answer, versus = 7, 9

    def engine() -> Tensor:
        return ablate(model, ids, logit_difference(answer, versus)).values[:, 0].cpu()

    def loop() -> Tensor:
        return torch.stack(list(_one_by_one(hf_model, model, ids, answer, versus))).cpu()

    engine(), _one_by_one(hf_model, model, ids, answer, versus).__next__()  # kernels are chosen
    seconds, maps = {}, {}
    for name, call in {"engine": engine, "loop": loop}.items():
        begin = time.perf_counter()
        maps[name] = call()
        seconds[name] = time.perf_counter() - begin
    off = (maps["engine"] - maps["loop"]).abs().mean()
    apart = (maps["loop"] - maps["loop"].roll(1)).abs().mean()
    memory = peak(engine, device)
    return [
        f"{len(maps['loop'])} heads zeroed, {ids.shape[1]} tokens: engine {seconds['engine']:.2f} s, loop of hooks over transformers "
        f"{seconds['loop']:.2f} s, {seconds['loop'] / seconds['engine']:.1f} times",
        f"mean difference of the maps {off:.3g}, of neighbouring heads {apart:.3g}"
        + ("" if memory is None else f"; engine's peak above the weights {memory:.0f} MB"),
    ]


@torch.no_grad()
def _one_by_one(
    hf_model: Any, model: HookedModel, ids: Tensor, answer: int, versus: int
) -> Iterator[Tensor]:
    """A run of transformers without each head: its part of what o_proj reads is zeroed."""
    for i, layer in enumerate(hf_model.model.language_model.layers):
        width = model.cfg.layer(i).d_head
        for head in range(model.cfg.n_heads):

            def zero(
                module: Any, args: Any, at: slice = slice(head * width, (head + 1) * width)
            ) -> Any:
                z = args[0].clone()
                z[..., at] = 0
                return (z, *args[1:])

            handle = layer.self_attn.o_proj.register_forward_pre_hook(zero)
            try:
                logits = hf_model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
            finally:
                handle.remove()
            yield logits[answer] - logits[versus]


# -- the report ---------------------------------------------------------------------------------------


def rules() -> str:
    """What the installed transformers brings that its older releases do not, and what ours makes of it."""
    from transformers.models.gemma4_unified import modeling_gemma4_unified as modeling

    return (
        f"windowed image masks in generate: {hasattr(modeling, 'create_masks_for_vision_model')}; heads over 256 "
        f"repeated: {network.WIDE_HEADS_REPEATED}; single query regrouped: {network.SINGLE_QUERY_REGROUPED}"
    )


def machine(device: str) -> str:
    card = torch.cuda.get_device_name(device) if on_card(device) else "CPU"
    version = importlib.metadata.version("transformers")
    return f"{datetime.date.today()}  {card}, torch {torch.__version__}, transformers {version}"


def report(args: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Run everything; whether every comparison holds."""
    begin = time.perf_counter()
    hf_model = build(args.small, args.device, getattr(torch, args.dtype))
    model = HookedModel.from_pretrained(hf_model=hf_model)
    weights = sum(value.numel() for _, value in model.named_weights())
    say(
        f"{weights / 1e9:.2f} billion weights, {args.dtype}, built in {time.perf_counter() - begin:.0f} s"
    )
    rows = []
    for prompt, inputs in prompts(model.cfg, args.device).items():
        for attention in ("sdpa", "eager"):
            rows.append(compare(hf_model, model, prompt, inputs, attention))
            say(str(rows[-1]))
        for line in costs(hf_model, model, inputs, args.device, args.rounds):
            say(f"{prompt:9} {line}")
    for line in heads_ablated(hf_model, model, args.device):
        say(line)
    if on_card(args.device):
        say(f"peak memory in all {torch.cuda.max_memory_allocated() / 2**30:.1f} GB")
    failed = sum(not row.holds for row in rows)
    say(f"{failed} of {len(rows)} comparisons fail" if failed else "equal to the last bit")
    say(f"{time.perf_counter() - begin:.0f} s in all")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if not args.small and not on_card(args.device):
        print(
            "the full 12B needs a CUDA card; --small runs the same on a small model here",
            file=sys.stderr,
        )
        return 2
    calm()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    say(machine(args.device))
    say(rules())
    held = report(args, say)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
