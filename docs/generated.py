"""Writes the parts of docs/ that are made from something else: hook points from names.py, figures from benchmarks/results.

    python docs/generated.py

A part stands between `<!-- made: NAME -->` and `<!-- end: NAME -->`; NAME is one of PARTS, and everything between is
replaced. No figure of a measurement stands outside such a part.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from lens_gemma4 import names

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import common  # noqa: E402  (shapes of the models that are measured)
import gpu  # noqa: E402  (the 12B's)

RESULTS = ROOT / "benchmarks" / "results"
MADE = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- end: \2 -->)", flags=re.DOTALL)
PEERS = "[--tl-python TL/bin/python] [--nnsight-python NNSIGHT/bin/python]"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -- names ----------------------------------------------------------------------------------------------


def vocabularies() -> str:
    """What each value is called elsewhere: rows that have a name there."""
    short = {path: word for word, path in names.SHORT.items()}
    rows = []
    for row in names.ROWS:
        if row.media == "video" or not (row.standard or row.hf):
            continue
        word = short.get(row.name.removeprefix("blocks.{i}."))
        rows.append(
            [
                f"`{row.name}`",
                f'`cache["{word}", i]`' if word else "",
                ", ".join(f"`{name}`" for name in row.standard),
                f"`{row.hf}`" if row.hf else "",
            ]
        )
    return table(["here", "short form", "nnterp", "in transformers"], rows)


# -- benchmarks -----------------------------------------------------------------------------------------


def lines(name: str) -> list[str]:
    """A result file."""
    return (RESULTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def made_by(name: str) -> str:
    """Date, versions and machine of a result file, and the command that `make bench` runs for it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\t\$\(BIN\)/python (.*results/{name}\.txt)$", makefile, flags=re.M)
    command = re.sub(
        r"\$\(if \$\(NNTERP_PYTHON\),.*?\)\)?", "[--nnterp-python NNTERP/bin/python]", line
    )
    command = command.replace("$(PEERS)", PEERS).replace("  ", " ")
    date, versions = lines(name)[0].split("  ", 1)
    return f"`python {command}`\n\n{date}: {versions}; all of it in [{name}.txt](../benchmarks/results/{name}.txt)."


def shapes() -> str:
    """The random models that are measured."""
    told = []
    for name, text in (("small", common.TEXT_SMALL), ("mid", common.TEXT_MID)):
        blocks, heads, width, words = (
            text[key]
            for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
        )
        told.append(
            f"- *{name}*: {blocks} blocks of {heads} heads, {width} wide, {words:,} words, random weights"
        )
    return "\n".join(told)


def forward() -> str:
    """Time over transformers, the median of the runs' medians, by call and tokens."""
    time: dict[str, dict[str, str]] = {}
    memory: dict[str, dict[str, str]] = {}
    for model, tokens, call, size, ratios, verdict in _forward_lines():
        case = f"{model} {tokens}"
        missed = re.search(r"(?:(of forward[^:]*: [\d.]+); )?bound ([\d.]+): .* ABOVE", verdict)
        told = f" ({missed[1] or ''}, ABOVE {missed[2]})".replace("(, ", "(") if missed else ""
        time.setdefault(call, {})[case] = f"{statistics.median(ratios[1::3]):.2f}{told}"
        memory.setdefault(call, {})[case] = size
    cases = list(dict.fromkeys(case for row in time.values() for case in row))
    tables = [
        table(
            [what, *cases], [[call, *(row.get(case, "") for case in cases)] for call, row in found]
        )
        for what, found in (
            ("time over transformers", time.items()),
            ("peak memory, MB", memory.items()),
        )
    ]
    return "\n\n".join([made_by("forward"), lines("forward")[1] + ".", *tables])


def _forward_lines() -> Iterable[tuple[str, int, str, str, list[float], str]]:
    pattern = re.compile(
        r"^(small|mid) +(\d+) (.+?) +[\d.]+ ms +([\d.]+) MB +((?:[\d.]+ +)*[\d.]+)(.*)$"
    )
    for line in lines("forward"):
        if found := pattern.match(line):
            model, tokens, call, size, ratios, rest = found.groups()
            yield model, int(tokens), call, size, [float(r) for r in ratios.split()], rest


def decode() -> str:
    """Tokens a second."""
    pattern = re.compile(
        r"^(small|mid) +(.+?) +([\d.]+) tokens/s +([\d.]+) MB +([\d. ]+?)( +bound.*)?$"
    )
    rows = []
    for line in lines("decode"):
        if found := pattern.match(line):
            model, way, speed, size, ratios, bound = found.groups()
            middle = statistics.median([float(r) for r in ratios.split()][1::3])
            rows.append([model, way, speed, f"{middle:.2f}", size, (bound or "").strip()])
    head = ["model", "way", "tokens a second", "over transformers", "MB", "bound"]
    return made_by("decode") + "\n\n" + table(head, rows)


def sweep(name: str) -> str:
    """Seconds of a map, and of the loops over the engine."""
    title, at, rows = "", [], []
    for line in lines(name):
        if found := re.match(r"^(.+, \d+ tokens): (\d+) variants.*?; memory (\d+) MB", line):
            title, variants, memory = found.groups()
            at = [title, variants, memory, "", {}]
            rows.append(at)
        elif at and (
            found := re.match(r"^  (\S.+?) +([\d.]+) s +[\d.]+ ms +([\d.]+) +([\d.]+)", line)
        ):
            way, seconds, _, middle = found.groups()
            at[4][way] = middle
            if way == "engine":
                at[3] = seconds
    ways = list(dict.fromkeys(way for row in rows for way in row[4] if way != "engine"))
    head = [
        "map",
        "variants",
        "engine, MB",
        "engine, seconds",
        *(f"{way}, times that" for way in ways),
    ]
    body = [[*row[:4], *(row[4].get(way, "") for way in ways)] for row in rows]
    estimate = next(line for line in lines(name) if line.startswith("attribution patching"))
    return f"{made_by(name)}\n\n{lines(name)[1].capitalize()}.\n\n{table(head, body)}\n\n{estimate[0].upper() + estimate[1:]}."


def growth() -> str:
    """How the engine's seconds grow with blocks, heads and tokens."""
    found = iter(lines("sweep_long"))
    next(line for line in found if line.startswith("how the engine's cost grows"))
    maps = re.split(r" {2,}", next(found).strip())
    rows = [re.findall(r"[~\d.]+ s of +\d+|\S+", line) for line in found]
    return table(maps, [[re.sub(" +", " ", cell) for cell in row] for row in rows])


def lens() -> str:
    """Seconds and memory of a logit lens."""
    rows = []
    for line in lines("lens"):
        if found := re.match(r"^(\S.+?)  +([\d.]+) +(\d+) MB  (.+)$", line):
            rows.append([found[1], found[4], found[2], found[3]])
    ratios = [f"- {line}" for line in lines("lens") if " over " in line]
    what = lines("lens")[2]
    body = table(["way", "what it does", "seconds", "MB"], rows)
    return f"{made_by('lens')}\n\n{what[0].upper() + what[1:]}.\n\n{body}\n\n" + "\n".join(ratios)


def loading() -> str:
    """Time and memory of reading a checkpoint."""
    rows = [re.split(r" {2,}", line.strip()) for line in lines("loading")[3:6]]
    head = ["", *re.split(r" {2,}", lines("loading")[2].strip())]
    what, last = lines("loading")[1], lines("loading")[-1]
    return f"{made_by('loading')}\n\n{what[0].upper() + what[1:]}.\n\n{table(head, rows)}\n\n{last[0].upper() + last[1:]}."


def long() -> str:
    """What was measured on a small model."""
    found = [re.split(r" {2,}", line.strip()) for line in lines("long")[2:6]]
    notes = [f"- {line}" for line in lines("long")[6:8]]
    return (
        f"{made_by('long')}\n\n{lines('long')[1]}.\n\n{table(found[0], found[1:])}\n\n"
        + "\n".join(notes)
    )


def plan() -> str:
    """What the 12B needs, counted."""
    rows = lines("long")[9:]
    return "```text\n" + "\n".join(rows) + "\n```"


def memory() -> str:
    """Sizes of the 12B in bfloat16, from its shape and the list of its tensors."""
    text = gpu.TEXT_12B
    blocks, heads, width = (
        text[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    tensors = json.loads((ROOT / "weights" / "gemma-4-12B.tensors.json").read_text())
    weights = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    sizes = {
        "the stream after every block": lambda n: blocks * n * width,
        "every pattern": lambda n: blocks * heads * n * n,
        "one block's patterns": lambda n: heads * n * n,
        "logits of every position": lambda n: n * text["vocab_size"],
        "logits of the last": lambda n: text["vocab_size"],
    }
    tokens = [64, 512, 4096, 32768]
    rows = [[what, *(_bytes(2 * of(n)) for n in tokens)] for what, of in sizes.items()]
    head = ["bfloat16, at tokens", *(f"{n:,}" for n in tokens)]
    return f"Weights: {weights / 1e9:.2f} billion, {_bytes(2 * weights)} in bfloat16.\n\n{table(head, rows)}"


def _bytes(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 1e3:,.1f} kB"


PARTS: dict[str, Callable[[], str]] = {
    "hook points": names.markdown,
    "vocabularies": vocabularies,
    "shapes": shapes,
    "forward": forward,
    "decode": decode,
    "sweep": lambda: sweep("sweep"),
    "sweep_long": lambda: sweep("sweep_long"),
    "growth": growth,
    "lens": lens,
    "loading": loading,
    "long": long,
    "memory": memory,
    "plan": plan,
}


def rewritten(text: str) -> str:
    """A page with its made parts as they are now."""
    return MADE.sub(lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}", text)


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if MADE.search(text):
            print(page.relative_to(ROOT))
            page.write_text(rewritten(text), encoding="utf-8")
