"""Long prompts with attn_implementation="local": memory and time on this machine, and what the longest needs on a GPU.

    python benchmarks/long.py [--tokens 16384 32768 65536] [--attn local] [-o FILE]
    python benchmarks/long.py --plan [--config FILE] [--plan-tokens 262144] [--dtype bfloat16] [-o FILE]

The first measures and then plans, the second only plans.

Measured is a forward of a 6-block model, 64 wide, up to the last position's logits, each length in a process of its own:
how far the resident size rose, and how long it took. A line is fitted to the memory; exit code 1 when a length is
further than 5 % from it, for then something grows faster than the prompt.

The plan is arithmetic on a config, the 12B's by default: weights are counted in the network itself, built without memory;
keys and values, logits and products from sizes; and what a forward holds at once is counted, tensor by tensor, in a
run of the same network 64 times narrower.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import machine
from gpu import TEXT_12B
from lens import rise_mb
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lens_gemma4 import HookedConfig, HookedModel
from lens_gemma4.config import LayerConfig
from lens_gemma4.kv_cache import slots_of
from lens_gemma4.local import FULL_BLOCK, Prompt, block_size, parts_of
from lens_gemma4.masks import Rule

TOKENS = (16_384, 32_768, 65_536)
ALLOWED_OFF_LINE = 0.05
SHAPE: dict[str, Any] = {
    "model_type": "gemma4_unified_text",
    "hidden_size": 64,
    "num_hidden_layers": 6,  # five sliding, one full
    "vocab_size": 1000,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 256,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262_144,
}
NARROWER = 64  # the model in which the plan counts what lives at once
GPUS = {"80 GiB": 80 * 2**30, "139 GiB": 139 * 2**30}
CHUNK = 16_384  # tokens of a chunk, where the plan runs the prompt in chunks


@torch.no_grad()
def build(
    shape: dict[str, Any], dtype: torch.dtype = torch.float32, attn: str = "local"
) -> HookedModel:
    """A network of random weights that keep the stream's size."""
    model = HookedModel(HookedConfig.from_hf({"model_type": "gemma4_unified_text"} | shape), attn)
    generator = torch.Generator().manual_seed(0)
    for _, weight in model.named_weights():
        drawn = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.2 * drawn if weight.ndim == 1 else drawn * weight.shape[-1] ** -0.5)
    return model.to(dtype).requires_grad_(False)  # type: ignore[return-value]


def prompt(model: HookedModel, tokens: int) -> Tensor:
    return torch.randint(
        3, model.cfg.d_vocab, (1, tokens), generator=torch.Generator().manual_seed(tokens)
    )


# -- measured here --------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """One length: processor seconds of the sliding blocks alone and of all, and MB above where it began."""

    tokens: int
    sliding: float
    whole: float
    memory: float


@torch.no_grad()
def measure(tokens: int, attn: str) -> Measured:
    """In this process, which should be a fresh one: memory that was used before is not asked for again."""
    torch.set_num_threads(1)
    model = build(SHAPE, attn=attn)
    ids = prompt(model, tokens)
    model(ids[:, :300])  # what is made once
    begin = time.process_time()
    _, memory = rise_mb(lambda: model(ids, logits_to_keep=1))
    whole = time.process_time() - begin
    begin = time.process_time()
    model(ids, stop_at_layer=first_full(model.cfg))
    return Measured(tokens, time.process_time() - begin, whole, memory)


def shape_in_words() -> str:
    return f"{SHAPE['num_hidden_layers']} blocks, {SHAPE['hidden_size']} wide, window {SHAPE['sliding_window']}"


def first_full(cfg: HookedConfig) -> int:
    return next(layer.index for layer in cfg.layers if layer.kind == "full")


def in_a_process(tokens: int, attn: str) -> Measured:
    command = [sys.executable, __file__, "--measure", str(tokens), "--attn", attn]
    # Freed memory goes back at once, so that the resident size is that of what lives.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise RuntimeError(f"{tokens} tokens: {ran.stderr}")
    return Measured(*json.loads(ran.stdout))


class Line(NamedTuple):
    """`start + slope * tokens`, and the largest distance of a point from it as a share of the largest value."""

    start: float
    slope: float
    off: float


def fitted(tokens: list[int], values: list[float]) -> Line:
    """By least squares."""
    x = torch.tensor(tokens, dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    start = y.mean() - slope * x.mean()
    off = (start + slope * x - y).abs().max() / y.max()
    return Line(start.item(), slope.item(), off.item())


def table(found: list[Measured], counted: float) -> tuple[list[str], bool]:
    """A line for each length, and the memory's line with what the count of tensors says of its slope."""
    lines = [f"{'tokens':>8} {'memory':>10} {'5 sliding blocks':>18} {'all, to the logits':>20}"]
    for one in found:
        lines.append(
            f"{one.tokens:8,} {one.memory:7.0f} MB {one.sliding:16.1f} s {one.whole:18.1f} s"
        )
    memory = fitted([one.tokens for one in found], [one.memory for one in found])
    seconds = fitted([one.tokens for one in found], [one.sliding for one in found])
    held = memory.off <= ALLOWED_OFF_LINE
    lines += [
        f"memory: {memory.start:.0f} MB + {memory.slope * 2**20:.0f} bytes a token, off by {memory.off:.1%} at most; bound "
        f"{ALLOWED_OFF_LINE:.0%}: {'ok' if held else 'ABOVE'}; tensors that live at once: {counted:.0f} bytes a token",
        f"sliding blocks: {seconds.slope * 1e6:.0f} microseconds a token, off a line by {seconds.off:.1%}",
    ]
    return lines, held


# -- counted in a run -------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Bytes of the tensors made in the meantime that live at once, at the most; views of `old` ones do not count."""

    def __init__(self, old: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._old = {tensor.untyped_storage().data_ptr() for tensor in old}
        self._known: set[int] = set()  # tensors
        self._readers: dict[int, int] = {}  # of each storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor) and id(one) not in self._known:
                self._follow(one)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._old:
            return
        if not self._readers.get(place):
            self._readers[place] = 0
            self.now += size
            self.peak = max(self.peak, self.now)
        self._readers[place] += 1
        self._known.add(id(tensor))
        weakref.finalize(tensor, self._gone, id(tensor), place, size)

    def _gone(self, tensor: int, place: int, size: int) -> None:
        self._known.discard(tensor)
        self._readers[place] -= 1
        if not self._readers[place]:
            self.now -= size


@torch.no_grad()
def alive_per_token(
    shape: dict[str, Any], dtype: torch.dtype, tokens: tuple[int, int] = (1024, 2048)
) -> float:
    """Bytes a token that a forward holds at once beside the weights: what twice the prompt adds."""
    model = build(shape, dtype)
    peaks = []
    for length in tokens:
        ids = prompt(model, length)
        with Alive([ids, *model.parameters(), *model.buffers()]) as alive:
            model(ids, logits_to_keep=1)
        peaks.append(alive.peak)
    return (peaks[1] - peaks[0]) / (tokens[1] - tokens[0])


# -- planned ----------------------------------------------------------------------------------------------


def narrowed(text: dict[str, Any]) -> dict[str, Any]:
    """The same network with every width, and the window, divided, and few words; heads and blocks are as many."""
    widths = ("hidden_size", "intermediate_size", "head_dim", "global_head_dim", "sliding_window")
    divided = {name: text[name] // NARROWER for name in widths if name in text}
    return text | divided | {"vocab_size": 100, "pad_token_id": 0}


def weight_numbers(cfg: HookedConfig) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for _, weight in HookedModel(cfg).named_weights())


def held_numbers(layer: LayerConfig, tokens: int, windows: bool = True) -> int:
    """Of a block's keys and values in a cache; none of a borrower."""
    if layer.lender is not None:
        return 0
    kept = tokens
    if windows and layer.window is not None and tokens > layer.window:
        kept = slots_of(layer.window)
    return 2 * kept * layer.n_key_value_heads * layer.d_head


@cache
def pairs(window: int | None, tokens: int) -> int:
    """Of query and key that a block computes a score of: those that see each other, and what a block does in vain."""
    if window is None:
        return tokens * (tokens + 1) // 2
    total = 0
    for part in parts_of(Rule(window), Prompt(0, tokens), 0, tokens):
        queries = part.stop - part.start
        if part.how == "windows":
            blocks = queries // block_size(window)
            total += queries * (part.high - part.low - (blocks - 1) * block_size(window))
        elif part.how == "causal":
            total += queries * (queries + 1) // 2
        else:
            total += queries * (part.high - part.low)
    return total


def attention_flops(layer: LayerConfig, tokens: int) -> int:
    """Of scores and mixed values: two products, each of as many multiplications and additions."""
    return 4 * pairs(layer.window, tokens) * layer.n_heads * layer.d_head


def product_flops(cfg: HookedConfig, tokens: int) -> int:
    """Of all matrices but the embedding and the head, at every token."""
    with torch.device("meta"):
        matrices = [
            w.numel() for n, w in HookedModel(cfg).named_weights() if "blocks." in n and w.ndim == 2
        ]
    return 2 * tokens * sum(matrices)


def by_kind(cfg: HookedConfig, of: Callable[[LayerConfig], int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for layer in cfg.layers:
        total[layer.kind] = total.get(layer.kind, 0) + of(layer)
    return total


def plan(text: dict[str, Any], tokens: int, dtype: torch.dtype) -> Iterator[str]:
    """The figures, line by line."""
    cfg = HookedConfig.from_hf({"model_type": "gemma4_unified_text"} | text)
    size = dtype.itemsize
    count = by_kind(cfg, lambda layer: 1)
    yield (
        f"{tokens:,} tokens of {len(cfg.layers)} blocks, {cfg.d_model} wide ({count}, window {cfg.window_size}), "
        f"{str(dtype).removeprefix('torch.')}; GB are 1e9 bytes"
    )
    weights = weight_numbers(cfg) * size
    yield f"weights of the text network {weights / 1e9:8.1f} GB"
    yield f"stream [pos d_model]        {tokens * cfg.d_model * size / 1e9:8.1f} GB each"
    held = by_kind(cfg, lambda layer: held_numbers(layer, tokens) * size)
    whole = by_kind(cfg, lambda layer: held_numbers(layer, tokens, windows=False) * size)
    for kind, number in held.items():
        without = f" ({whole[kind] / 1e9:.1f} without)" if kind == "sliding" else ""
        how = "as windows" if kind == "sliding" else "whole"
        yield f"keys and values, {kind:10} {number / 1e9:8.2f} GB, kept {how}{without}"
    last, all_logits = cfg.d_vocab * size, tokens * cfg.d_vocab * size
    yield f"logits, last position       {last / 1e9:8.4f} GB (logits_to_keep=1); of all {all_logits / 1e9:.1f} GB"
    yield f"a mask of the whole         {tokens**2 / 1e9:8.1f} GB of bytes, which local attention never makes"
    row = tokens * size
    yield (
        f"a pattern, one head         {tokens * row / 1e9:8.1f} GB; a row of it {row / 1e6:.2f} MB (attention_rows)"
    )
    alive = NARROWER * alive_per_token(narrowed(text), dtype)
    whole, chunk = alive * tokens, alive * CHUNK + FULL_BLOCK * tokens * (1 + size)  # and a mask
    yield (
        f"alive at once in a forward  {whole / 1e9:8.1f} GB in one call ({alive / 1e3:.0f} kB a token), {chunk / 1e9:.1f} GB in "
        f"chunks of {CHUNK:,} on a kv_cache"
    )
    ways = {
        "one call": weights + whole + last,
        "one call, all logits": weights + whole + 2 * all_logits,  # before the softcap and after
        # a full block's memory is doubled when it runs out
        "chunks on a kv_cache": weights + chunk + last + sum(held.values()) + held.get("full", 0),
    }
    for way, needed in ways.items():
        fits = ", ".join(
            f"{'fits' if needed < 0.95 * room else 'does NOT fit'} in {name}"
            for name, room in GPUS.items()
        )
        yield f"  {way:36} {needed / 1e9:6.1f} GB: {fits}"
    yield from _work(cfg, tokens)


def _work(cfg: HookedConfig, tokens: int) -> Iterator[str]:
    work = {"matrices": product_flops(cfg, tokens)} | {
        f"attention, {kind}": number
        for kind, number in by_kind(cfg, lambda layer: attention_flops(layer, tokens)).items()
    }
    total = sum(work.values())
    for what, number in work.items():
        yield f"{what:27} {number / 1e15:8.3f} PFLOP, {number / total:.1%}"
    sliding = [layer for layer in cfg.layers if layer.kind == "sliding"]
    square = sum(4 * pairs(None, tokens) * layer.n_heads * layer.d_head for layer in sliding)
    yield f"sliding blocks by the square{square / 1e15:8.3f} PFLOP, which local attention spares"
    yield f"all                         {total / 1e15:8.3f} PFLOP: {total / 4e14:.0f} s at a sustained 400 TFLOP/s"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--attn", default="local")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--config", type=Path, help="a config.json instead of the 12B's shape")
    parser.add_argument("--plan-tokens", type=int, default=262_144)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.attn)))
        return 0
    lines, held = [f"{datetime.date.today()}  {machine()}"], True
    if not args.plan:
        found = [in_a_process(tokens, args.attn) for tokens in args.tokens]
        measured, held = table(found, alive_per_token(SHAPE, torch.float32))
        lines += [
            f"{shape_in_words()}, float32, one thread, process clock, attention {args.attn!r}",
            *measured,
            "",
        ]
    text = json.loads(args.config.read_text()) if args.config else TEXT_12B
    lines += plan(text.get("text_config", text), args.plan_tokens, getattr(torch, args.dtype))
    print("\n".join(lines), flush=True)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
