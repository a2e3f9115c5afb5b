"""Loading a 1 GB checkpoint in its own dtype on CPU: time and peak anonymous memory beside transformers.

    python benchmarks/loading.py [--rounds 5] [--small] [-o FILE]

Each load is a process of its own, the two taking turns. Anonymous memory is what the machine cannot drop:
pages of a mapped file do not count. It is sampled from before loading until every weight has been read once.
Exit code 1 when ours adds 5 % of the file or more. `--small` runs the same on a file of 140 MB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import TEXT_MID, calm, machine, randomise

SHAPE = TEXT_MID | {"hidden_size": 1536, "intermediate_size": 6144, "vocab_size": 128_000}
SHAPE_SMALL = TEXT_MID  # 140 MB: the few megabytes that any load costs still count as little
ALLOWED_SHARE = 0.05
MEASURES = {"loaded": "s", "loaded and read": "s", "peak anonymous": "MB"}


def anonymous_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


@contextmanager
def watched_memory() -> Iterator[list[float]]:
    """The anonymous memory of this process, every two milliseconds."""
    seen, done = [anonymous_mb()], threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            seen.append(anonymous_mb())

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()
        seen.append(anonymous_mb())


def load(which: str, folder: str) -> dict[str, float]:
    """In a process of its own: load, then read every weight once."""
    Model, settings = _loader(which)
    with watched_memory() as seen:
        begin = time.perf_counter()
        model = Model.from_pretrained(folder, **settings)
        loaded = time.perf_counter() - begin
        for weight in model.parameters():
            weight.amax()
        read = time.perf_counter() - begin
    return {"loaded": loaded, "loaded and read": read, "peak anonymous": max(seen) - seen[0]}


def _loader(which: str) -> tuple[Any, dict[str, Any]]:
    if which == "transformers":
        from transformers import Gemma4UnifiedForCausalLM

        return Gemma4UnifiedForCausalLM, {"dtype": "auto"}
    from lens_gemma4 import HookedModel

    return HookedModel, {"dtype": torch.float32} if which == "ours, widened" else {}


def in_a_process(which: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--load", which, str(folder)]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        raise RuntimeError(out.stderr)
    return json.loads(out.stdout.strip().splitlines()[-1])


def write_checkpoint(shape: dict[str, Any], folder: Path) -> float:
    """A random bfloat16 checkpoint, written by transformers; its size in MB."""
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    hf_model = Gemma4UnifiedForCausalLM._from_config(
        Gemma4UnifiedTextConfig(**shape), dtype=torch.bfloat16
    )
    randomise(hf_model)
    hf_model.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20


def report(rounds: list[dict[str, dict[str, float]]], size: float) -> tuple[list[str], bool]:
    lines = [f"{'':16} {'ours':>10} {'transformers':>14} {'ratio':>8}"]
    for measure, unit in MEASURES.items():
        ours, theirs = (
            [one[which][measure] for one in rounds] for which in ("ours", "transformers")
        )
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True) if b)
        values = (
            f"{statistics.median(ours):8.2f} {unit:2} {statistics.median(theirs):11.2f} {unit:2}"
        )
        lines.append(f"{measure:16} {values} {ratio:8.3f}")
    share = max(one["ours"]["peak anonymous"] for one in rounds) / size
    holds = share < ALLOWED_SHARE
    verdict = f"bound {ALLOWED_SHARE:.0%}: {'ok' if holds else 'ABOVE'}"
    lines.append(f"anonymous memory added by ours, at most: {share:.1%} of the file, {verdict}")
    return lines, holds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    calm()
    torch.set_num_threads(1)
    if args.load:
        print(json.dumps(load(*args.load)))
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        size = write_checkpoint(SHAPE_SMALL if args.small else SHAPE, folder)
        rounds = [
            {which: in_a_process(which, folder) for which in ("transformers", "ours")}
            for _ in range(args.rounds)
        ]
    found, held = report(rounds, size)
    head = [
        f"{datetime.date.today()}  {machine()}",
        f"a file of {size:.0f} MB, bfloat16, medians of {args.rounds} rounds",
    ]
    print("\n".join(head + found))
    if args.output:
        args.output.write_text("\n".join(head + found) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
