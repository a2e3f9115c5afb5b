"""Forward beside transformers (sdpa): one thread, interleaved rounds, medians of per-round ratios.

    python benchmarks/forward.py [--runs 3] [--rounds 31] [--only small 32] [--clock wall] [-o FILE]

A bound holds when at least two thirds of the runs are within it; exit code 1 when one does not. The clock is
the process's own processor time, which leaves out what other processes of the machine take; `--clock wall`
is the clock on the wall, and on an idle machine says the same.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import TEXT_MID, TEXT_SMALL, Spread, calm, machine, ratios, text_pair

SHAPES = {"small": TEXT_SMALL, "mid": TEXT_MID}
SQUARES = ".hook_attn_scores", ".hook_pattern"  # a number for each pair of positions
CLOCKS = {"process": time.process_time, "wall": time.perf_counter}
# (model, tokens): the bound of each call's ratio.
BOUNDS: dict[tuple[str, int], dict[str, float]] = {
    ("small", 32): {"forward": 0.9, "stream cached": 1.0, "all cached": 1.6},
    ("mid", 32): {"forward": 1.03, "stream cached": 1.06, "all cached": 1.15},
    ("mid", 256): {"forward": 1.03, "stream cached": 1.06, "all cached": 1.15},
    ("mid", 1024): {
        "forward": 1.03,
        "stream cached": 1.06,
        "all but squares": 1.10,
        "all cached": 1.7,
    },
}


def all_but_squares(model: Any) -> Callable[[str], bool]:
    """A filter of what no filter caches, without scores and pattern."""
    kept = {
        name for name in model.hook_dict if not model.uncached(name) and not name.endswith(SQUARES)
    }
    return kept.__contains__


def ways(hf_model: Any, model: Any, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed."""
    without = all_but_squares(model)
    return {
        "transformers": lambda: hf_model(ids).logits,
        "forward": lambda: model(ids),
        "stream cached": lambda: model.run_with_cache(ids, names_filter="blocks.*.hook_resid_post"),
        "all but squares": lambda: model.run_with_cache(ids, names_filter=without),
        "all cached": lambda: model.run_with_cache(ids),
        # what was left to be made when it is read, too; and everything made in the run
        "all read": lambda: list(model.run_with_cache(ids)[1].values()),
        "all at once": lambda: model.run_with_cache(ids, lazy=False),
    }


@torch.no_grad()
def measure(
    hf_model: Any, model: Any, tokens: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Spread]:
    ids = torch.randint(
        3, model.cfg.d_vocab, (1, tokens), generator=torch.Generator().manual_seed(0)
    )
    calls = ways(hf_model, model, ids)
    assert torch.equal(calls["transformers"](), calls["forward"]()), (
        "timing two models that differ means nothing"
    )
    gc.collect()
    return ratios(calls, "transformers", rounds, clock)


def table(case: tuple[str, int], runs: list[dict[str, Spread]]) -> tuple[list[str], bool]:
    """A line for each call, quartiles of each run, and whether every bound holds."""
    lines, held = [], True
    for call in runs[0]:
        spreads = "   ".join(
            f"{r[call].low:5.3f} {r[call].median:5.3f} {r[call].high:5.3f}" for r in runs
        )
        bound = BOUNDS[case].get(call)
        verdict = ""
        if bound is not None:
            within = sum(run[call].median <= bound for run in runs)
            holds = 3 * within >= 2 * len(runs)
            held &= holds
            verdict = f"  bound {bound:.2f}: {within} of {len(runs)} {'ok' if holds else 'ABOVE'}"
        lines.append(f"{case[0]:5} {case[1]:5} {call:16} {spreads}{verdict}")
    return lines, held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "TOKENS"))
    parser.add_argument("--clock", choices=list(CLOCKS), default="process")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    calm()
    torch.set_num_threads(1)
    lines = [
        f"{datetime.date.today()}  {machine()}",
        f"{args.runs} runs of {args.rounds} interleaved rounds, one thread, float32, {args.clock} clock",
        f"{'model':5} {'':5} {'time over transformers':22}" + " quartiles of each run",
    ]
    print("\n".join(lines), flush=True)
    all_held = True
    for case in BOUNDS:
        if args.only and case != (args.only[0], int(args.only[1])):
            continue
        pair = text_pair(SHAPES[case[0]])
        runs = [measure(*pair, case[1], args.rounds, CLOCKS[args.clock]) for _ in range(args.runs)]
        found, held = table(case, runs)
        all_held &= held
        lines += found
        print("\n".join(found), flush=True)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return 0 if all_held else 1


if __name__ == "__main__":
    sys.exit(main())
