"""TransformerLens's bridge and nnsight, each in a process of its own that runs what it is told to.

`forward.py` and `decode.py` start them with the pythons of environments that hold them. All build the same random model,
run in inference mode, and ask a forward pass for no key/value cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import sweep_peers
import torch
from common import calm, give_memory_back, hold_memory, stopwatch
from lens import rise_mb

CLOCKS = {"process": time.process_time, "wall": time.perf_counter}
NEEDS = {"TransformerLens": "transformer-lens", "nnsight": "nnsight"}
NEW_TOKENS = 64  # of a call of "decoding"
Call = Callable[[torch.Tensor], torch.Tensor]  # of ids: logits, or all ids where it decodes


def transformer_lens(shape: dict[str, Any]) -> dict[str, Call]:
    model = sweep_peers.bridge(shape)
    stream = [f"blocks.{i}.hook_resid_post" for i in range(shape["num_hidden_layers"])]
    writing = {"do_sample": False, "stop_at_eos": False, "return_type": "tokens", "verbose": False}
    return {
        "forward": lambda ids: model(ids, use_cache=False),
        "stream cached": lambda ids: model.run_with_cache(
            ids, names_filter=stream, use_cache=False
        )[0],
        "all cached": lambda ids: model.run_with_cache(ids, use_cache=False)[0],
        "decoding": lambda ids: model.generate(ids, max_new_tokens=NEW_TOKENS, **writing),
    }


def nnsight(shape: dict[str, Any]) -> dict[str, Call]:
    """It has no call that keeps everything by name."""
    model, _ = sweep_peers.nnsight_model(shape)
    model._module.generation_config.eos_token_id = None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with model.trace(ids, use_cache=False):
            logits = model.output.logits.save()
        return logits  # noqa: RET504 -- a trace ends at its block's end

    def stream_cached(ids: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        with model.trace(ids, use_cache=False):
            for block in model.model.layers:
                kept.append(block.output.save())
            logits = model.output.logits.save()
        assert len(kept) == shape["num_hidden_layers"]
        return logits

    def decoding(ids: torch.Tensor) -> torch.Tensor:
        with model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False) as tracer:
            found = tracer.result.save()
        return found  # noqa: RET504

    return {"forward": forward, "stream cached": stream_cached, "decoding": decoding}


MAKERS = {"TransformerLens": transformer_lens, "nnsight": nnsight}


def prompt(d_vocab: int, tokens: int) -> torch.Tensor:
    """Ids `[1 pos]`, the same in every process."""
    return torch.randint(3, d_vocab, (1, tokens), generator=torch.Generator().manual_seed(0))


def rise(call: Callable[[], Any]) -> float:
    """MB by which the process grows while a call runs, freed memory given back to the system before (Linux)."""
    give_memory_back()
    return rise_mb(call)[1]


def answer(call: Call, ids: torch.Tensor, asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a call; or, first, what it answers and its memory."""
    if "clock" in asked:
        timer = stopwatch(lambda: call(ids), CLOCKS[asked["clock"]], asked["warm"])
        return {"seconds": timer()}
    call(ids[:, :2])  # loads what the first call loads
    told = call(ids)
    told = told[0, -1] if told.is_floating_point() else told[0]
    return {"answer": told.tolist(), "rise": rise(lambda: call(ids))}


class Peer:
    """A process that runs a peer."""

    def __init__(self, way: str, shape: dict[str, Any], python: str) -> None:
        command = [python, __file__, "--way", way, "--shape", json.dumps(shape)]
        self.way = way
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},  # nobody looks for a model of that name
        )
        first = self._answer()
        self.versions, self.calls = first["versions"], first["calls"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print too
                return json.loads(line)
        self.close()
        raise RuntimeError(f"{self.way!r} ended early; what it said stands above")

    def ask(self, call: str, tokens: int, **how: Any) -> dict[str, Any]:
        """`clock` and `warm` in `how` ask for seconds; without them it tells its answer and its memory."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": call, "tokens": tokens, **how}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        with self.process:  # closes its pipes, at which it ends, and waits
            pass


@contextmanager
def peers(pythons: dict[str, str | None], shape: dict[str, Any]) -> Iterator[dict[str, Peer]]:
    """Those whose python is known."""
    running: dict[str, Peer] = {}
    try:
        for way, python in pythons.items():
            if python:
                running[way] = Peer(way, shape, python)
        yield running
    finally:
        for peer in running.values():
            peer.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tl-python", help="the python of an environment that holds TransformerLens"
    )
    parser.add_argument("--nnsight-python", help="the python of an environment that holds nnsight")


def pythons(args: argparse.Namespace) -> dict[str, str | None]:
    return {"TransformerLens": args.tl_python, "nnsight": args.nnsight_python}


def heading(running: dict[str, Any]) -> list[str]:
    """What of the peers runs, and what could not."""
    return [
        f"  {way}: {running[way].versions}"
        if way in running
        else f"  {way} is LEFT OUT: no python was given that holds it"
        for way in NEEDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=list(MAKERS), required=True)
    parser.add_argument("--shape", type=json.loads, required=True, help="of the model, in JSON")
    args = parser.parse_args()
    calm()
    hold_memory()
    torch.set_num_threads(1)
    with torch.inference_mode():
        calls = MAKERS[args.way](args.shape)
        names = "torch", "transformers", NEEDS[args.way]
        told = {
            "versions": ", ".join(f"{name} {version(name)}" for name in names),
            "calls": list(calls),
        }
        print(json.dumps(told), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            ids = prompt(args.shape["vocab_size"], asked["tokens"])
            print(json.dumps(answer(calls[asked["call"]], ids, asked)), flush=True)


if __name__ == "__main__":
    main()
