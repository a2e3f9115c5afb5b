"""Ablation and patching maps beside a loop of `run_with_hooks`: interleaved rounds, medians of per-round ratios.

    python benchmarks/sweep.py [--tokens 32] [--rounds 3] [--threads 2] [-o FILE]

The model has 12 blocks of 8 heads, 512 wide, 32,000 words, float32. Each map is checked against the loop first, in the
same run; exit code 1 when a bound is missed. Peak memory is what the engine's batch was allowed (`sweep.MAX_BYTES`).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import TEXT_MID, calm, machine, ratios, text_pair

from lens_gemma4 import sweep
from lens_gemma4.interventions import (
    Intervention,
    at_each_position,
    position_mask,
    replaced,
    scaled,
    units_of,
)

# Map: how many times faster than the loop it is to be at 32 tokens.
BOUNDS = {"heads, all positions": 4.0, "heads, last position": 40.0, "stream, each position": 8.0}
ANSWER, VERSUS = 7, 9


def maps(model: Any, ids: torch.Tensor, other: torch.Tensor) -> dict[str, list[Intervention]]:
    """The interventions of each map."""
    real = torch.ones_like(ids)
    heads = units_of("heads", model.cfg)
    _, kept = model.run_with_cache(other, names_filter="blocks.*.hook_resid_pre")
    streams = [replaced(n, p, kept[p.hook]) for n, p in units_of("resid_pre", model.cfg)]
    return {
        "heads, all positions": [scaled(*one, 0.0) for one in heads],
        "heads, last position": [scaled(*one, 0.0, position_mask("last", real)) for one in heads],
        "stream, each position": at_each_position(streams, 1, ids.shape[1], ids.device),
    }


def loop(model: Any, ids: torch.Tensor, variants: list[Intervention]) -> torch.Tensor:
    """One run with hooks for each."""
    found = []
    for one in variants:
        logits = model.run_with_hooks(ids, fwd_hooks=one.hooks())[:, -1]
        found.append(logits[:, ANSWER] - logits[:, VERSUS])
    return torch.stack(found)


def engine(model: Any, ids: torch.Tensor, variants: list[Intervention]) -> torch.Tensor:
    return sweep.sweep(model, ids, variants, sweep.logit_difference(ANSWER, VERSUS)).values


@torch.no_grad()
def measure(
    model: Any, tokens: int, rounds: int
) -> dict[str, tuple[int, float, float, float, float]]:
    """Of each map: variants, quartiles of loop over engine, and the largest difference of the two."""
    generator = torch.Generator().manual_seed(0)
    ids, other = torch.randint(3, model.cfg.d_vocab, (2, 1, tokens), generator=generator)
    found = {}
    for name, variants in maps(model, ids, other).items():
        calls: dict[str, Callable[[], Any]] = {
            "engine": lambda v=variants: engine(model, ids, v),  # type: ignore[misc]
            "loop": lambda v=variants: loop(model, ids, v),  # type: ignore[misc]
        }
        off = (calls["engine"]() - calls["loop"]()).abs().max().item()
        spread = ratios(calls, "engine", rounds)["loop"]
        found[name] = (len(variants), *spread, off)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    calm()
    torch.set_num_threads(args.threads)
    lines = [
        f"{datetime.date.today()}  {machine()}",
        f"{args.rounds} interleaved rounds, {args.threads} threads, float32, wall clock",
        f"{'map':24}{'tokens':>7}{'variants':>9}  loop over engine, quartiles   largest difference",
    ]
    print("\n".join(lines), flush=True)
    _, model = text_pair(TEXT_MID)
    held = True
    for tokens in args.tokens:
        for name, (n, low, middle, high, off) in measure(model, tokens, args.rounds).items():
            bound = BOUNDS[name] if tokens == 32 else None
            verdict = (
                ""
                if bound is None
                else f"  bound {bound:g}: {'ok' if middle >= bound else 'BELOW'}"
            )
            held &= bound is None or middle >= bound
            line = f"{name:24}{tokens:7}{n:9}  {low:7.1f} {middle:7.1f} {high:7.1f}   {off:.1e}{verdict}"
            lines.append(line)
            print(line, flush=True)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
