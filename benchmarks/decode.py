"""Greedy decoding beside transformers' generate, TransformerLens's and nnsight's: one prompt, one thread, tokens a second.

    python benchmarks/decode.py [--runs 3] [--rounds 5] [--only mid] [--clock wall] [-o FILE]
                                [--tl-python PATH] [--nnsight-python PATH]

64 new tokens after a prompt of 32, float32, every library with its key/value cache; the prompt's own pass is in the time.
The speed is over transformers' plain generate in the same round, with a steering vector too: transformers with a hook of its
own is shown beside. In every way's text each token is the likeliest, but for rounding, by one run of transformers over it. Memory is how far the process rises (Linux). A
bound holds when at least two thirds of the runs are within it; exit code 1 when one does not.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    TEXT_MID,
    TEXT_SMALL,
    calm,
    hold_memory,
    in_turns,
    machine,
    spread,
    stopwatch,
    text_pair,
)
from forward_peers import (
    CLOCKS,
    NEW_TOKENS,
    Peer,
    add_options,
    heading,
    peers,
    prompt,
    pythons,
    rise,
)

SHAPES = {"small": TEXT_SMALL, "mid": TEXT_MID}
PROMPT = 32
# By how much a chosen token's logit may lie below the largest. Twelve random blocks amplify rounding: in float32 one run over
# the text is up to 0.6 away from float64 (seen here: 0.08). The logits' spread is 1; another token is off by about 4.
ROUNDING = 0.3
BASE = "transformers"
# Times as many tokens a second as transformers' plain generate, at least.
BOUNDS: dict[str, dict[str, float]] = {
    "small": {},
    "mid": {"ours": 1.3, "ours, steered": 1.2},
}


def steered_layer(shape: dict[str, Any]) -> int:
    return shape["num_hidden_layers"] // 2


def steering_vector(shape: dict[str, Any]) -> torch.Tensor:
    """As long as a stream of random blocks is, so that it changes what is written."""
    width = shape["hidden_size"]
    return torch.randn(width, generator=torch.Generator().manual_seed(1)) * 3


@contextmanager
def steered(hf_model: Any, shape: dict[str, Any]) -> Iterator[None]:
    """A hook of torch's own on one of transformers' blocks."""
    block, vector = hf_model.model.layers[steered_layer(shape)], steering_vector(shape)
    handle = block.register_forward_hook(lambda _, __, out: out + vector)
    try:
        yield
    finally:
        handle.remove()


def ways(
    hf_model: Any, model: Any, ids: torch.Tensor, shape: dict[str, Any]
) -> dict[str, Callable[[], torch.Tensor]]:
    """Each returns prompt and new tokens."""
    vector = steering_vector(shape)
    hook = (f"blocks.{steered_layer(shape)}.hook_resid_post", lambda stream, hook: stream + vector)
    hf_model.generation_config.eos_token_id = None  # nobody stops early

    def theirs() -> torch.Tensor:
        return hf_model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True)

    def theirs_steered() -> torch.Tensor:
        with steered(hf_model, shape):
            return theirs()

    ours = partial(
        model.generate, ids, max_new_tokens=NEW_TOKENS, stop_at_eos=False, return_type="tokens"
    )
    return {
        BASE: theirs,
        "transformers, steered": theirs_steered,
        "ours": ours,
        "ours, steered": partial(ours, fwd_hooks=[hook]),
    }


@torch.no_grad()
def shortfall(hf_model: Any, tokens: torch.Tensor) -> float:
    """By how much the new tokens of a text `[1 pos]` are less likely than the likeliest: the largest difference of logits,
    in a run of transformers over the whole text. 0 but for rounding where each was chosen as the likeliest."""
    logits = hf_model(tokens, use_cache=False).logits[0, PROMPT - 1 : -1]
    chosen = logits.gather(1, tokens[0, PROMPT:, None])[:, 0]
    return (logits.amax(-1) - chosen).max().item()


def check(hf_model: Any, written: dict[str, torch.Tensor], shape: dict[str, Any]) -> float:
    """The largest shortfall of all ways: timing those that write something else means nothing.

    Raises:
        AssertionError: a way writes other tokens than the likeliest, or the vector changes none.
    """
    found = []
    for name, tokens in written.items():
        assert tokens.shape == (1, PROMPT + NEW_TOKENS), f"{name} wrote {tokens.shape[1]} tokens"
        with steered(hf_model, shape) if name.endswith("steered") else nullcontext():
            found.append(shortfall(hf_model, tokens))
        assert found[-1] < ROUNDING, (
            f"{name} writes a token whose logit is {found[-1]:.2f} below the largest"
        )
    assert not torch.equal(written[BASE], written["transformers, steered"]), (
        "the vector changes no token: steering is not seen to be on"
    )
    return max(found)


class Case:
    """One model: every way's timer and memory, tokens compared."""

    def __init__(
        self,
        shape: dict[str, Any],
        clock: str = "process",
        running: dict[str, Peer] | None = None,
    ) -> None:
        hf_model, model = text_pair(shape)
        ids = prompt(model.cfg.d_vocab, PROMPT)
        calls = ways(hf_model, model, ids, shape)
        written = {name: call() for name, call in calls.items()}
        self.memory = {name: rise(call) for name, call in calls.items()}
        # Made once untimed above; what a step needs is used again by the next.
        self.timers = {name: stopwatch(call, CLOCKS[clock], False) for name, call in calls.items()}
        for way, peer in (running or {}).items():
            told = peer.ask("decoding", PROMPT)
            written[way] = torch.tensor(told["answer"])[None]
            self.memory[way] = told["rise"]
            self.timers[way] = partial(_seconds, peer, clock)
        self.shortfall = check(hf_model, written, shape)

    def run(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of each way, round by round."""
        return in_turns(self.timers, rounds)


def _seconds(peer: Peer, clock: str) -> float:
    return peer.ask("decoding", PROMPT, clock=clock, warm=False)["seconds"]


def table(
    size: str, runs: list[dict[str, list[float]]], memory: dict[str, float]
) -> tuple[list[str], bool]:
    """A line for each way, and whether every bound holds."""
    lines, held = [], True
    for way in runs[0]:
        speed = NEW_TOKENS / statistics.median(seconds for run in runs for seconds in run[way])
        # transformers' time over this one's: how many times as fast.
        spreads = [spread(run[BASE], run[way]) for run in runs]
        quartiles = "   ".join("{:5.2f} {:5.2f} {:5.2f}".format(*one) for one in spreads)
        line = f"{size:5} {way:22}{speed:8.1f} tokens/s{memory[way]:9.1f} MB  {quartiles}"
        bound = BOUNDS[size].get(way)
        if bound is not None:
            within = sum(one.median >= bound for one in spreads)
            holds = 3 * within >= 2 * len(runs)
            held &= holds
            line += f"  bound {bound:.1f}: {within} of {len(runs)} {'ok' if holds else 'BELOW'}"
        lines.append(line)
    return lines, held


def report(args: argparse.Namespace, memory: str) -> Iterator[tuple[str, bool]]:
    """Lines, and whether the bounds in them hold; `memory` says where it comes from."""
    yield f"{datetime.date.today()}  {machine()}", True
    yield (
        (
            f"{args.runs} runs of {args.rounds} interleaved rounds, one thread, float32, {args.clock} clock, {memory}: "
            f"{NEW_TOKENS} tokens after {PROMPT}; speed, peak memory, and quartiles of the speed over {BASE}' of each run"
        ),
        True,
    )
    for size in [args.only] if args.only else SHAPES:
        with peers(pythons(args), SHAPES[size]) as running:
            for line in heading(running):
                yield line, True
            case = Case(SHAPES[size], args.clock, running)
            runs = [case.run(args.rounds) for _ in range(args.runs)]
            lines, held = table(size, runs, case.memory)
            lines.append(
                f"{size:5} tokens that were chosen lie up to {case.shortfall:.3f} below the largest logit of one run"
            )
            yield "\n".join(lines), held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(SHAPES))
    parser.add_argument("--clock", choices=list(CLOCKS), default="process")
    parser.add_argument("-o", "--output", type=Path)
    add_options(parser)
    args = parser.parse_args()
    calm()
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
