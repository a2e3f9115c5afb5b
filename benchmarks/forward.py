"""Forward beside transformers (sdpa), TransformerLens's bridge and nnsight: one thread, interleaved rounds, peak memory.

    python benchmarks/forward.py [--runs 3] [--rounds 31] [--seconds 150] [--only small 32] [--clock wall] [-o FILE]
                                 [--tl-python PATH] [--nnsight-python PATH]

Each line has a call's milliseconds (the median), the memory by which the process rises while it runs (Linux), and the
quartiles of its time over transformers' in the same round, for each run. What a call frees stays with the process, so that
the next finds it at hand; in lines of "fresh memory" all of it has gone back to the system before, and each page that a call
needs is asked for anew. transformers is asked for no key/value cache, which it would copy keys and values into; its default
stands beside. A case takes about --seconds; from 4,096 tokens on it is one run of one round.

A bound holds when at least two thirds of the runs are within it; exit code 1 when one does not. The clock is
the process's own processor time, which leaves out what other processes of the machine take; `--clock wall`
is the clock on the wall, and on an idle machine says the same. `sweep.py` says how peers' environments are made.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    TEXT_MID,
    TEXT_SMALL,
    Spread,
    calm,
    hold_memory,
    in_turns,
    machine,
    spread,
    stopwatch,
    text_pair,
)
from forward_peers import CLOCKS, Peer, add_options, heading, peers, prompt, pythons, rise

from lens_gemma4 import HookedModel

SHAPES = {"small": TEXT_SMALL, "mid": TEXT_MID}
SQUARES = ".hook_attn_scores", ".hook_pattern"  # a number for each pair of positions
BASE = "transformers"
LONG = 4096  # tokens from which "local" runs, and no call is made untimed before each turn
PEERS_UP_TO = 2048
# Attention by parts, and peers that pass other masks, round otherwise, and twelve random blocks amplify that threefold each: at
# 600 tokens float32 is as far from float64 as two logits are from each other. So "local" is compared block by block, each on
# the same stream (the largest distance over the length of what the block writes), and peers on a short prompt (the largest
# difference of logits over their spread); another mask or weight is off by far more.
ROUNDING = {"local": 1e-5, "peers": 0.05}
PEERS_CHECKED_AT = 8  # tokens


class Bound(NamedTuple):
    """Time over another call's, at most."""

    limit: float
    over: str = BASE


OWN, FRESH = "forward", ", fresh memory"
# (model, tokens): bounds of calls.
BOUNDS: dict[tuple[str, int], dict[str, Bound]] = {
    ("small", 32): {
        "forward": Bound(0.7),
        "stream cached": Bound(1.0),
        "all cached": Bound(1.6),
    },
    ("mid", 32): {
        "forward": Bound(1.0),
        "stream cached": Bound(1.03, OWN),
        "all cached": Bound(1.12, OWN),
        "all cached" + FRESH: Bound(1.2, OWN + FRESH),
    },
    ("mid", 128): {"forward": Bound(1.0), "stream cached": Bound(1.03, OWN)},
    ("mid", 256): {
        "forward": Bound(1.0),
        "stream cached": Bound(1.03, OWN),
        "all cached": Bound(1.12, OWN),
        "all cached" + FRESH: Bound(1.2, OWN + FRESH),
    },
    ("mid", 512): {"forward": Bound(1.0), "stream cached": Bound(1.03, OWN)},
    ("mid", 1024): {
        "forward": Bound(1.0),
        "stream cached": Bound(1.03, OWN),
        "all but squares": Bound(1.10),
        "all cached": Bound(1.7),
    },
    ("mid", 2048): {"forward": Bound(1.0), "stream cached": Bound(1.03, OWN)},
    ("mid", LONG): {"local": Bound(0.75)},
    ("mid", 2 * LONG): {"local": Bound(0.55)},
}
# Calls that say more, where there is time for them: what is left to be made, read too; everything made in the run.
READ_AT = {("small", 32), ("mid", 256)}
FRESH_AT = {("mid", 32), ("mid", 256)}
FRESH_CALLS = BASE, OWN, "stream cached", "all cached"


def all_but_squares(model: Any) -> Callable[[str], bool]:
    """A filter of what no filter caches, without scores and pattern."""
    kept = {
        name for name in model.hook_dict if not model.uncached(name) and not name.endswith(SQUARES)
    }
    return kept.__contains__


def ways(
    hf_model: Any, model: Any, ids: torch.Tensor, case: tuple[str, int]
) -> dict[str, Callable[[], Any]]:
    """What is timed in this process."""
    base = {BASE: lambda: hf_model(ids, use_cache=False).logits}
    if case[1] >= LONG:
        local = HookedModel.from_pretrained(hf_model=hf_model, attn_implementation="local")
        check_blocks(model, local, ids)
        return base | {"forward": lambda: model(ids), "local": lambda: local(ids)}
    calls = base | {
        "transformers, default": lambda: hf_model(ids).logits,
        "forward": lambda: model(ids),
        "stream cached": lambda: model.run_with_cache(ids, names_filter="blocks.*.hook_resid_post"),
        "all but squares": lambda: model.run_with_cache(ids, names_filter=all_but_squares(model)),
        "all cached": lambda: model.run_with_cache(ids),
    }
    if case in READ_AT:
        calls["all read"] = lambda: list(model.run_with_cache(ids)[1].values())
        calls["all at once"] = lambda: model.run_with_cache(ids, lazy=False)
    return calls


def check_blocks(model: Any, local: Any, ids: torch.Tensor) -> None:
    """Timing models that differ means nothing.

    Raises:
        AssertionError: a block of `local` writes something else than `model`'s does on the same stream.
    """
    stream = model(ids, stop_at_layer=0)
    for i in range(model.cfg.n_layers):
        part = {"start_at_layer": i, "stop_at_layer": i + 1}
        wanted, found = model(stream, **part), local(stream, **part)
        scale = model.blocks[i].layer_scalar  # what a block writes is added before this
        off = ((found - wanted).norm() / (wanted - scale * stream).norm()).item()
        assert off < ROUNDING["local"], f"block {i} of local is off by {off:.1e}"
        stream = wanted


def check_peer(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same of a peer's logits `[d_vocab]`."""
    off = ((found - wanted).abs().max() / wanted.std()).item()
    assert off < ROUNDING["peers"], f"{name}: logits differ by {off:.1e} of their spread"


class Case:
    """One model and one length: every way's timer and memory, answers compared."""

    def __init__(
        self,
        case: tuple[str, int],
        pair: tuple[Any, Any],
        clock: str = "process",
        running: dict[str, Peer] | None = None,
    ) -> None:
        self.case, tokens = case, case[1]
        self.warm = tokens < LONG
        self.memory: dict[str, float] = {}
        self.timers: dict[str, Callable[[], float]] = {}
        calls = ways(*pair, prompt(pair[1].cfg.d_vocab, tokens), case)
        if tokens <= LONG:  # beyond, two more runs would take minutes
            same = torch.equal(calls["forward"](), calls[BASE]())
            assert same, "logits differ from transformers'"
        # transformers' own last: it needs most, and a long prompt's calls find at hand what was left there.
        self.memory |= {name: rise(call) for name, call in reversed(calls.items())}
        for name, call in calls.items():
            self.timers[name] = stopwatch(call, CLOCKS[clock], self.warm)
        for name in FRESH_CALLS if case in FRESH_AT else ():
            self.memory[name + FRESH] = self.memory[name]
            self.timers[name + FRESH] = stopwatch(calls[name], CLOCKS[clock], fresh=True)
        for peer in (running or {}).values() if tokens <= PEERS_UP_TO else ():
            self._add(peer, pair[0], clock)

    def round(self) -> float:
        """Seconds that a round takes, on the wall; tried, but for long prompts, where one is all there is time for."""
        if not self.warm:
            return math.inf
        begin = time.perf_counter()
        self.run(1)
        return time.perf_counter() - begin

    def _add(self, peer: Peer, hf_model: Any, clock: str) -> None:
        wanted = hf_model(prompt(hf_model.config.vocab_size, PEERS_CHECKED_AT)).logits[0, -1]
        for call in ("forward", "stream cached", "all cached"):
            if call not in peer.calls:
                continue
            name = peer.way + ("" if call == "forward" else f", {call}")
            told = peer.ask(call, PEERS_CHECKED_AT)
            check_peer(name, torch.tensor(told["answer"]), wanted)
            self.memory[name] = peer.ask(call, self.case[1])["rise"]
            how = {"clock": clock, "warm": self.warm}
            self.timers[name] = partial(_seconds, peer, call, self.case[1], how)

    def run(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of each way, round by round."""
        return in_turns(self.timers, rounds)


def _seconds(peer: Peer, call: str, tokens: int, how: dict[str, Any]) -> float:
    return peer.ask(call, tokens, **how)["seconds"]


def table(
    case: tuple[str, int], runs: list[dict[str, list[float]]], memory: dict[str, float]
) -> tuple[list[str], bool]:
    """A line for each call, and whether every bound holds."""
    lines, held = [], True
    for call in runs[0]:
        middle = statistics.median(seconds for run in runs for seconds in run[call])
        spreads = "   ".join("{:5.3f} {:5.3f} {:5.3f}".format(*_over(run, call)) for run in runs)
        line = f"{case[0]:5} {case[1]:5} {call:30}{1e3 * middle:9.1f} ms{memory[call]:9.1f} MB  {spreads}"
        bound = BOUNDS.get(case, {}).get(call)
        if bound is not None:
            medians = [_over(run, call, bound.over).median for run in runs]
            within = sum(median <= bound.limit for median in medians)
            holds = 3 * within >= 2 * len(runs)
            held &= holds
            over = (
                "" if bound.over == BASE else f" of {bound.over}: {statistics.median(medians):.3f};"
            )
            line += f" {over} bound {bound.limit:.2f}: {within} of {len(runs)} {'ok' if holds else 'ABOVE'}"
        lines.append(line)
    return lines, held


def _over(run: dict[str, list[float]], call: str, base: str = BASE) -> Spread:
    return spread(run[call], run[base])


def report(args: argparse.Namespace, memory: str) -> Iterator[tuple[str, bool]]:
    """Lines, and whether the bounds in them hold; `memory` says where it comes from."""
    yield f"{datetime.date.today()}  {machine()}", True
    yield (
        (
            f"{args.runs} runs of up to {args.rounds} interleaved rounds, one thread, float32, {args.clock} clock, "
            f"{memory}; time, peak memory, and quartiles of time over {BASE} of each run"
        ),
        True,
    )
    only = args.only and (args.only[0], int(args.only[1]))
    for size, shape in SHAPES.items():
        cases = [case for case in BOUNDS if case[0] == size and only in (None, case)]
        if not cases:
            continue
        with peers(pythons(args), shape) as running:
            for line in heading(running):
                yield line, True
            pair = text_pair(shape)
            for case in cases:
                one = Case(case, pair, args.clock, running)
                rounds = max(1, min(args.rounds, int(args.seconds / args.runs / one.round())))
                runs = [one.run(rounds) for _ in range(args.runs if one.warm else 1)]
                lines, held = table(case, runs, one.memory)
                yield "\n".join(lines), held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=150.0, help="for the rounds of a case")
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "TOKENS"))
    parser.add_argument("--clock", choices=list(CLOCKS), default="process")
    parser.add_argument("-o", "--output", type=Path)
    add_options(parser)
    args = parser.parse_args()
    calm()
    warnings.simplefilter("ignore")  # such as the hint that "local" is quicker on long prompts
    torch.set_num_threads(1)
    lines, well = [], True
    with torch.no_grad():
        for line, held in report(args, hold_memory()):
            print(line, flush=True)
            lines.append(line)
            well &= held
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
