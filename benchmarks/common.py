"""Random checkpoints of a given shape in transformers, ours beside them, and interleaved timing."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(
    0, str(Path(__file__).parent.parent)
)  # runs from a checkout that is not installed, too

from lens_gemma4 import HookedModel

# 12 blocks, 512 wide, 32,000 words: the size at which peers were measured.
TEXT_MID: dict[str, Any] = {
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
TEXT_SMALL: dict[str, Any] = TEXT_MID | {
    "hidden_size": 60,
    "num_hidden_layers": 6,
    "vocab_size": 300,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
}


class Spread(NamedTuple):
    """Quartiles of per-round ratios."""

    low: float
    median: float
    high: float


def calm() -> None:
    """No progress bars and no advice from transformers between the lines of a table."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


# Of glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def hold_memory() -> str:
    """What is freed stays with this process from now on, and what a call needs is at hand; says whether (glibc).

    By itself glibc gives much that is freed at once back to the system, or does not, by how the heap happens to lie: a call
    that ends so pays for every page anew, a few hundred nanoseconds to 1.4 microseconds each, and the one beside it for none.
    """
    libc = _libc()
    if libc is None or not (libc.mallopt(M_TRIM_THRESHOLD, -1) and libc.mallopt(M_MMAP_MAX, 0)):
        return "memory as the system hands it out"
    return "memory at hand"


def give_memory_back() -> None:
    """Everything that is free goes back to the system (glibc): what comes next pays for all that it needs."""
    gc.collect()
    if libc := _libc():
        libc.malloc_trim(0)


def _libc() -> Any:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


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
    calls: dict[str, Callable[[], Any]],
    base: str,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Spread]:
    """Each call's time over `base`'s in the same round."""
    times = in_turns({name: stopwatch(call, clock) for name, call in calls.items()}, rounds)
    return {name: spread(times[name], times[base]) for name in calls}


def stopwatch(
    call: Callable[[], Any],
    clock: Callable[[], float] = time.perf_counter,
    warm: bool = True,
    fresh: bool = False,
) -> Callable[[], float]:
    """A function that makes the call and returns its seconds.

    A `warm` one makes it once untimed just before: what it needs of memory may have gone back to the system in other calls'
    turns, and bringing it back says nothing of the call (on a virtual machine it cost up to 0.3 of a forward at 1,024
    tokens, to whichever large call came first). A `fresh` one gives all memory back before, so that every call pays alike.
    """

    def run() -> float:
        if warm:
            call()
        if fresh:
            give_memory_back()
        begin = clock()
        kept = call()
        seconds = clock() - begin
        del kept
        return seconds

    return run


def in_turns(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, round by round.

    They take turns within a round, each round beginning with another, so that a slow moment of the machine hits all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timers[name]())
    return times


def spread(times: list[float], base: list[float]) -> Spread:
    """Quartiles of the ratios, round by round."""
    each = [a / b for a, b in zip(times, base, strict=True)]
    return Spread(*statistics.quantiles(each, n=4)) if len(each) > 1 else Spread(*each * 3)


def machine() -> str:
    """What ran: versions and processor."""
    import transformers

    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, {_processor()}, "
        f"load {_load():.1f}"
    )


def _load() -> float:
    """Processes that wanted a core in the last minute: above the number of cores, times mean little."""
    return os.getloadavg()[0]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
