"""Random checkpoints of a given shape in transformers, ours beside them, and interleaved timing."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lens_gemma4 import HookedModel

# 12 blocks, 512 wide, 32,000 words: the size at which peers were measured.
MID: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "vocab_size": 32_000,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 256,
    "final_logit_softcapping": 30.0,
}
# 6 blocks, 60 wide: overhead is all.
SMALL: dict[str, Any] = MID | {
    "hidden_size": 60,
    "num_hidden_layers": 6,
    "vocab_size": 300,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 4,
}


@torch.no_grad()
def randomise(hf_model: Any, seed: int = 0) -> None:
    """Fill every weight: matrices that keep the stream's size, norm gains and layer scalars away from 1."""
    generator = torch.Generator(device=next(hf_model.parameters()).device).manual_seed(seed)
    for name, value in [*hf_model.named_parameters(), *hf_model.named_buffers()]:
        if not value.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
            continue
        noise = torch.empty_like(value).normal_(generator=generator)
        if name.endswith("layer_scalar"):
            value.copy_(0.6 + 0.1 * noise.clamp(-2, 2))
        elif value.ndim == 1:
            value.copy_(noise.mul_(0.3).add_(0.0 if name.endswith("bias") else 1.0))
        else:
            value.copy_(noise.mul_(value.shape[-1] ** -0.5))


def text_pair(shape: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, HookedModel]:
    """A transformers model and ours on the same storage."""
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    config = Gemma4UnifiedTextConfig(**shape)
    hf_model = Gemma4UnifiedForCausalLM._from_config(
        config, dtype=dtype, attn_implementation="sdpa"
    )
    hf_model.eval().requires_grad_(False)
    randomise(hf_model)
    return hf_model, HookedModel.from_pretrained(hf_model=hf_model)


def ratios(
    calls: dict[str, Callable[[], Any]], base: str, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Lower quartile, median and upper quartile of each call's time over `base`'s in the same round.

    Calls take turns within a round, in turning order, so that a slow moment of the machine hits all alike.
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            kept = calls[name]()
            times[name].append(time.perf_counter() - begin)
            del kept
    found = {}
    for name in names:
        each = [a / b for a, b in zip(times[name], times[base], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4) if rounds > 1 else (each[0],) * 3
        found[name] = (low, middle, high)
    return found


def machine() -> str:
    """What ran: versions and processor."""
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, {processor()}"


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123
            return next(
                line.split(":")[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor()
