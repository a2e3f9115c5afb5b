"""The logit lens of every block beside the one-shot way and nnterp's: time and peak memory, one thread, float32.

    python benchmarks/lens.py [--rounds 5] [--nnterp-python PATH] [--clock wall] [-o FILE]

A random model of 12 blocks, 512 wide, with 262,144 words; 128 positions, the ten likeliest tokens of each block. Every
way is a process of its own, and the processes take turns. Memory is how far the resident size rises above what it was
before the first call (Linux). Exit code 1 when ours takes more than 0.7 of the time of nnterp's logit lens.

nnterp needs an environment of its own:

    python -m venv ENV && ENV/bin/pip install -e . nnterp==1.3.0 nnsight==0.6.3
    python benchmarks/lens.py --nnterp-python ENV/bin/python
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import TEXT_MID, TEXT_SMALL, calm, machine, randomise

SHAPES = {"full": TEXT_MID | {"vocab_size": 262_144}, "small": TEXT_SMALL}
POSITIONS = 128
TOP = 10
BOUND = 0.7
CLOCKS = {"process": time.process_time, "wall": time.perf_counter}
WAYS = {
    "ours": "top tokens with log-probabilities",
    "ours, all": "and entropy, and KL to the final distribution",
    "one-shot": "all logits of all blocks, then softmax and top tokens (our run and formula)",
    "nnterp": "its logit_lens at all positions, then top tokens",
    "nnterp, lean": "project_on_vocab, softmax and top tokens block by block in one trace, nothing else kept",
    "ours, last": "the last position only",
    "nnterp, last": "its logit_lens as it is (the last position only), then top tokens",
}
# What each way is compared with, and whether the bound holds there.
PAIRS = {
    "ours": {"nnterp": True, "nnterp, lean": False, "one-shot": False},
    "ours, all": {"nnterp": False, "one-shot": False},
    "ours, last": {"nnterp, last": False},
}


def prompt_ids(d_vocab: int) -> torch.Tensor:
    return torch.randint(3, d_vocab, (1, POSITIONS), generator=torch.Generator().manual_seed(0))


def hf_model(shape: dict[str, Any]) -> Any:
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    model = Gemma4UnifiedForCausalLM._from_config(
        Gemma4UnifiedTextConfig(**shape), dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval().requires_grad_(False)
    randomise(model)
    return model


# -- the ways, each a call that returns ids of the top tokens [layer pos k] ----------------------------


def our_way(way: str, shape: dict[str, Any]) -> Callable[[], torch.Tensor]:
    from lens_gemma4 import HookedModel

    model = HookedModel.from_pretrained(hf_model=hf_model(shape))
    ids = prompt_ids(shape["vocab_size"])
    lean = {"entropy": False, "kl": False, "top_k": TOP}

    @torch.no_grad()
    def one_shot() -> torch.Tensor:
        _, cache = model.run_with_cache(
            ids, names_filter="blocks.*.hook_resid_post", return_type=None
        )
        logits = model.project_on_vocab(cache.stack_activation("resid_post"))
        return logits.log_softmax(-1).topk(TOP).indices[:, 0]

    calls = {
        "ours": lambda: model.logit_lens(ids, **lean).top_ids[:, 0],
        "ours, all": lambda: model.logit_lens(ids, top_k=TOP).top_ids[:, 0],
        "ours, last": lambda: model.logit_lens(ids, positions=-1, **lean).top_ids[:, 0],
        "one-shot": one_shot,
    }
    return calls[way]


def nnterp_way(way: str, shape: dict[str, Any]) -> Callable[[], torch.Tensor]:
    from nnterp import StandardizedTransformer
    from nnterp.interventions import logit_lens
    from nnterp.nnsight_utils import get_layer_output, project_on_vocab

    words = _tokenizer(shape["vocab_size"])
    model = StandardizedTransformer(hf_model(shape), tokenizer=words, check_renaming=False)
    ids = prompt_ids(shape["vocab_size"])
    prompt = words.decode(ids[0])
    blocks = range(shape["num_hidden_layers"])

    @torch.no_grad()
    def everywhere() -> torch.Tensor:
        with model.trace(prompt):
            found = []
            for i in blocks:
                logits = project_on_vocab(model, get_layer_output(model, i))
                found.append(logits.softmax(-1).cpu())
            probs = torch.stack(found).transpose(0, 1).save()
        return probs.topk(TOP).indices.squeeze()

    @torch.no_grad()
    def lean() -> torch.Tensor:
        with model.trace(prompt):
            found = []
            for i in blocks:
                logits = project_on_vocab(model, get_layer_output(model, i))
                found.append(logits.softmax(-1).topk(TOP).indices)
            kept = torch.stack(found).save()
        return kept[:, 0]

    def last() -> torch.Tensor:
        return logit_lens(model, prompt).topk(TOP).indices[0, :, None]

    return {"nnterp": everywhere, "nnterp, lean": lean, "nnterp, last": last}[way]


def _tokenizer(d_vocab: int) -> Any:
    """One word for each id, so that a text can stand for any ids: nnterp's function takes text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(d_vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", unk_token="w0", padding_side="left"
    )


# -- a process for each way ---------------------------------------------------------------------------


def resident_mb(which: str = "VmRSS") -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def rise_mb(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and how far the resident size rose meanwhile above where it began."""
    before = resident_mb()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    out = call()
    return out, resident_mb("VmHWM") - before


def work(way: str, size: str, clock: str) -> None:
    """Build the model; run once for memory and answers; then once for each line on standard input."""
    make = nnterp_way if way.startswith("nnterp") else our_way
    call = make(way, SHAPES[size])
    top, rise = rise_mb(call)
    versions = ["torch", "transformers"]
    versions += ["nnterp", "nnsight"] if way.startswith("nnterp") else []
    told = {
        "rise": rise,
        "top": top[..., 0].tolist(),
        "versions": {name: version(name) for name in versions},
    }
    print(json.dumps(told), flush=True)
    for _ in sys.stdin:
        begin = CLOCKS[clock]()
        call()
        print(json.dumps(CLOCKS[clock]() - begin), flush=True)


class Worker:
    """A process that runs one way when it is told to."""

    def __init__(self, way: str, size: str, clock: str, python: str) -> None:
        command = [python, __file__, "--work", way, "--size", size, "--clock", clock]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.way = way
        self.first = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", *"0123456789")):  # libraries print too
                return json.loads(line)
        raise RuntimeError(f"{self.way!r} ended early; what it said stands above")

    def time(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def workers(ways: list[str], size: str, clock: str, nnterp: str | None) -> Iterator[list[Worker]]:
    running: list[Worker] = []
    try:
        for way in ways:
            python = (nnterp or "") if way.startswith("nnterp") else sys.executable
            running.append(Worker(way, size, clock, python))
        yield running
    finally:
        for worker in running:
            worker.close()


def agree(running: list[Worker]) -> None:
    """Every way names the same first choices, but for ties and rounding."""
    wanted = torch.tensor(running[0].first["top"])
    for worker in running[1:]:
        found = torch.tensor(worker.first["top"])
        share = (found == wanted[:, -found.shape[1] :]).double().mean().item()
        assert share > 0.995, f"{worker.way} agrees on {share:.1%} of the first choices only"


def measure(running: list[Worker], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, round by round; each round begins with another way."""
    times: dict[str, list[float]] = {worker.way: [] for worker in running}
    for turn in range(rounds):
        first = turn % len(running)
        for worker in running[first:] + running[:first]:
            times[worker.way].append(worker.time())
    return times


def table(running: list[Worker], times: dict[str, list[float]]) -> list[str]:
    lines = [f"{'':13} {'seconds':>8} {'memory':>9}"]
    for worker in running:
        seconds = statistics.median(times[worker.way])
        lines.append(
            f"{worker.way:13} {seconds:8.2f} {worker.first['rise']:6.0f} MB  {WAYS[worker.way]}"
        )
    return lines


def ratios(times: dict[str, list[float]], running: list[Worker]) -> tuple[list[str], bool]:
    """Time ratios, the median over rounds, and memory ratios; whether the bound holds."""
    lines, held = [], True
    rise = {worker.way: worker.first["rise"] for worker in running}
    for way, others in PAIRS.items():
        for other, bounded in others.items():
            if way not in times or other not in times:
                continue
            each = [a / b for a, b in zip(times[way], times[other], strict=True)]
            ratio = statistics.median(each)
            line = (
                f"{way} over {other}: time {ratio:.3f} (rounds {min(each):.3f} to {max(each):.3f}), "
                f"memory {rise[way] / rise[other]:.3f}"
            )
            if bounded:
                held &= ratio <= BOUND
                line += f"; bound {BOUND}: {'ok' if ratio <= BOUND else 'ABOVE'}"
            lines.append(line)
    return lines, held


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nnterp-python", help="the python of an environment that holds nnterp")
    parser.add_argument("--clock", choices=list(CLOCKS), default="process")
    parser.add_argument("--size", choices=list(SHAPES), default="full")
    parser.add_argument("--work", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    calm()
    torch.set_num_threads(1)
    if args.work:
        work(args.work, args.size, args.clock)
        return 0
    ways = [way for way in WAYS if args.nnterp_python or not way.startswith("nnterp")]
    with workers(ways, args.size, args.clock, args.nnterp_python) as running:
        agree(running)
        times = measure(running, args.rounds)
    versions = ", ".join(f"{k} {v}" for k, v in running[-1].first["versions"].items())
    compared, held = ratios(times, running)
    lines = [
        f"{datetime.date.today()}  {machine()}",
        f"logit lens of 12 blocks, 512 wide, 262,144 words, {POSITIONS} positions, top {TOP}, float32, one thread"
        if args.size == "full"
        else f"a small model, {POSITIONS} positions: overhead is all",
        f"{args.rounds} interleaved rounds, {args.clock} clock, each way a process of its own; medians",
        *table(running, times),
        *compared,
    ]
    if args.nnterp_python:
        lines.insert(1, f"nnterp's environment: {versions}; nnterp applies no softcap, ours does")
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
