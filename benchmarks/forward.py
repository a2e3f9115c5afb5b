"""Forward beside transformers (sdpa): one thread, interleaved rounds, medians of per-round ratios.

python benchmarks/forward.py [--rounds 31] [--only small] [-o benchmarks/results/forward.txt]
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import torch
from common import MID, SMALL, machine, ratios, text_pair

NO_SQUARES = ".hook_attn_scores", ".hook_pattern", ".hook_result"
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


def measure(
    hf_model: Any, model: Any, tokens: int, rounds: int
) -> dict[str, tuple[float, float, float]]:
    ids = torch.randint(
        3, model.cfg.d_vocab, (1, tokens), generator=torch.Generator().manual_seed(0)
    )
    calls = {
        "transformers": lambda: hf_model(ids).logits,
        "forward": lambda: model(ids),
        "stream cached": lambda: model.run_with_cache(ids, names_filter="blocks.*.hook_resid_post"),
        "all but squares": lambda: model.run_with_cache(
            ids, names_filter=lambda name: not name.endswith(NO_SQUARES)
        ),
        "all cached": lambda: model.run_with_cache(ids),
    }
    with torch.no_grad():
        assert torch.equal(calls["transformers"](), calls["forward"]())
        return ratios(calls, "transformers", rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", choices=["small", "mid"])
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"{datetime.date.today()}  {machine()}",
        f"{args.rounds} interleaved rounds, one thread, float32",
    ]
    lines += [
        f"{'model':6} {'tokens':>6} {'call':16} {'q1':>6} {'median':>6} {'q3':>6} {'bound':>6}"
    ]
    pairs = {
        name: text_pair(shape)
        for name, shape in (("small", SMALL), ("mid", MID))
        if args.only in (None, name)
    }
    print("\n".join(lines), flush=True)
    for (name, tokens), bounds in BOUNDS.items():
        if name not in pairs:
            continue
        for call, (low, middle, high) in measure(*pairs[name], tokens, args.rounds).items():
            bound = bounds.get(call)
            verdict = (
                "" if bound is None else f"{bound:6.2f} {'ok' if middle <= bound else 'ABOVE'}"
            )
            lines.append(
                f"{name:6} {tokens:6} {call:16} {low:6.3f} {middle:6.3f} {high:6.3f} {verdict}"
            )
            print(lines[-1], flush=True)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
