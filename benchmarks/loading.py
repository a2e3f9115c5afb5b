"""Loading a 1 GB checkpoint in its own dtype on CPU: time and peak anonymous memory beside transformers.

    python benchmarks/loading.py [--rounds 5] [-o benchmarks/results/loading.txt]

Each load is a process of its own. Anonymous memory is what cannot be dropped: pages of a mapped file do not
count. It is sampled while loading and after the weights have been read once.
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
from pathlib import Path

import torch
from common import MID, machine, randomise

SHAPE = MID | {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "vocab_size": 64_000,
}


def anonymous_kb() -> int:
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def load(which: str, folder: str) -> None:
    """In a process of its own: load, touch every weight, print seconds and peak anonymous growth."""
    if which == "transformers":
        from transformers import Gemma4UnifiedForCausalLM as Model

        settings = {"dtype": "auto"}
    else:
        from lens_gemma4 import HookedModel as Model

        settings = {}
    before = peak = anonymous_kb()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_kb())

    watcher = threading.Thread(target=sample)
    watcher.start()
    begin = time.perf_counter()
    model = Model.from_pretrained(folder, **settings)
    seconds = time.perf_counter() - begin
    for weight in model.parameters():
        weight.sum()
    done.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "peak_mb": (max(peak, anonymous_kb()) - before) / 1024}))


def run(which: str, folder: Path) -> dict[str, float]:
    out = subprocess.run(
        [sys.executable, __file__, "--load", which, str(folder)], capture_output=True, text=True
    )
    if out.returncode:
        raise RuntimeError(out.stderr)
    return json.loads(out.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.load:
        load(*args.load)
        return
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    with tempfile.TemporaryDirectory() as folder:
        hf_model = Gemma4UnifiedForCausalLM._from_config(
            Gemma4UnifiedTextConfig(**SHAPE), dtype=torch.bfloat16
        )
        randomise(hf_model)
        hf_model.save_pretrained(folder)
        del hf_model
        size = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors")) / 2**20
        rounds = [
            {which: run(which, Path(folder)) for which in ("transformers", "ours")}
            for _ in range(args.rounds)
        ]
    lines = [
        f"{datetime.date.today()}  {machine()}",
        f"a file of {size:.0f} MB, bfloat16, {args.rounds} rounds",
    ]
    for key, unit in (("seconds", "s"), ("peak_mb", "MB")):
        ours, theirs = ([r[which][key] for r in rounds] for which in ("ours", "transformers"))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True) if b)
        lines.append(
            f"{key:8} ours {statistics.median(ours):8.2f} {unit}  transformers {statistics.median(theirs):8.2f} {unit}  ratio {ratio:.3f}"
        )
    share = statistics.median(r["ours"]["peak_mb"] for r in rounds) / size
    lines.append(
        f"anonymous memory added by ours: {share:.1%} of the file (bound 5 %: {'ok' if share < 0.05 else 'ABOVE'})"
    )
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
