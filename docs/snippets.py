"""Runs the Python of README.md and docs/, and writes what it printed where a page shows it.

    python docs/snippets.py              # every page again: after new weights, or when a tool prints otherwise
    python docs/snippets.py README.md    # one page

A page's ```python blocks run from top to bottom in one namespace (README.md: in one for each `##` section, which
starts with torch, HookedModel and the loaded model). Lines that start with `# >` are what the statement above them
printed. Code of other libraries stands in ```py blocks and is not run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
SHOWN = "# >"
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
LARGE = re.compile(r'"google/gemma-4-12B(?:-it)?"(, device="cuda")?(, dtype=torch\.bfloat16)?')


def parts(page: Path) -> list[str]:
    """A page in the pieces that run on their own; joined they are the page."""
    text = page.read_text(encoding="utf-8")
    return re.split(r"^(?=## )", text, flags=re.MULTILINE) if page.name == "README.md" else [text]


def title(part: str) -> str:
    """A piece's first heading."""
    return next((line.lstrip("# ") for line in part.splitlines() if line.startswith("#")), "")


def rewritten(part: str, scope: dict[str, Any], where: str) -> str:
    """The piece, its snippets run, with what they printed in place of what it shows."""
    numbers = iter(range(1, 1000))
    return FENCED.sub(
        lambda found: f"```python\n{run(found[1], scope, f'{where}, snippet {next(numbers)}')}```",
        part,
    )


def run(code: str, scope: dict[str, Any], where: str) -> str:
    """Run a snippet; the same code with its `# >` lines as they are now."""
    lines = code.splitlines()
    out: list[str] = []
    done, printed = 0, ""
    for statement in ast.parse(LARGE.sub('"tiny"', code)).body:  # line by line the same
        out += lines[done : statement.end_lineno]
        done = statement.end_lineno or 0
        printed += _executed(statement, scope, where)
        shown = done
        while shown < len(lines) and lines[shown].startswith(SHOWN):
            shown += 1
        if shown > done:
            out += [f"{SHOWN} {line}".rstrip() for line in printed.rstrip("\n").splitlines()]
            done, printed = shown, ""
    return "\n".join([*out, *lines[done:]]) + "\n"


def _executed(statement: ast.stmt, scope: dict[str, Any], where: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module([statement], type_ignores=[]), where, "exec"), scope)
    return printed.getvalue()


def alike(one: str, other: str) -> bool:
    """Same words, and numbers that agree but for rounding: another machine adds up in another order."""
    words = [
        " ".join(NUMBER.sub("0", line).split()) for line in (one, other)
    ]  # columns move by a sign
    if words[0] != words[1]:
        return False
    return all(_near(a, b) for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True))


def _near(one: str, other: str) -> bool:
    if "." not in one and "e" not in one:
        return one == other  # a count, a head's number
    digits = len(one.split("e")[0].partition(".")[2])
    room = 10.0**-digits if "e" not in one else 10 * abs(float(one))  # e: a size of rounding
    return abs(float(one) - float(other)) <= 1.01 * room + 1e-3 * abs(float(one))


def difference(shown: str, now: str) -> str | None:
    """The first line of a page that would be another today, or None."""
    pairs = itertools.zip_longest(shown.rstrip().splitlines(), now.rstrip().splitlines())
    for number, (one, other) in enumerate(pairs, start=1):
        if one is None or other is None or not alike(one.rstrip(), other.rstrip()):
            return f"line {number}:\n  {one}\nis today\n  {other}\n(python docs/snippets.py)"
    return None


def fresh(page: Path) -> dict[str, Any]:
    """What a piece of a page starts with."""
    if page.name != "README.md":
        return {"__name__": "__main__"}
    import torch

    from lens_gemma4 import HookedModel

    model = HookedModel.from_pretrained("tiny")
    return {"__name__": "__main__", "torch": torch, "HookedModel": HookedModel, "model": model}


def write(page: Path) -> None:
    """The page again, as it prints today. Its snippets run in a folder of their own."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            text = "".join(
                rewritten(part, fresh(page), f"{page.name}, {title(part)}") for part in parts(page)
            )
        finally:
            os.chdir(home)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    for chosen in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        print(chosen.relative_to(ROOT))
        write(chosen)
