"""Prompts from a file, and the maps that the command line makes of them."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lens_gemma4 import maps, metrics
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.plots import Table
from lens_gemma4.results import SweepResult, pyarrow

METRICS = {  # by their names on the command line, with the columns that each needs
    "logit_difference": ("answer", "versus"),
    "logit": ("answer",),
    "log_prob": ("answer",),
    "prob": ("answer",),
    "rank": ("answer",),
    "kl_to_clean": (),
    "loss": (),
}
Rows = list[dict[str, str]]


def read(path: str | Path, columns: Sequence[str]) -> Rows:
    """Rows of a JSON lines or CSV file that have all of some columns.

    Raises:
        ValueError: another kind of file, a line that is none, or a column that is missing; it names the line.
        OSError: no such file.
    """
    path = Path(path)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        rows = _json_lines(path)
    elif path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            try:
                rows = [(reader.line_num, row) for row in reader]
            except csv.Error as error:
                raise ValueError(f"{path}, line {reader.line_num + 1}: {error}") from None
    else:
        raise ValueError(f"{path} is neither JSON lines (.jsonl) nor CSV (.csv)")
    if not rows:
        raise ValueError(f"{path} holds no prompts")
    return [_row(path, number, row, columns) for number, row in rows]


def _json_lines(path: Path) -> list[tuple[int, Any]]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                found.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}, is no JSON: {error.msg}") from None
    return found


def _row(path: Path, number: int, row: Any, columns: Sequence[str]) -> dict[str, str]:
    if not isinstance(row, Mapping):
        raise ValueError(f"{path}, line {number}, is no object with {', '.join(columns)}")
    for column in columns:
        if not isinstance(row.get(column), str) or not row[column]:
            there = ", ".join(str(name) for name in row) or "nothing"
            raise ValueError(f"{path}, line {number}, needs text under {column!r}; it has {there}")
    return {column: row[column] for column in columns}


def measures(model: HookedModel, names: Sequence[str], rows: Rows) -> list[metrics.Metric]:
    """Metrics by name, each prompt with its own tokens.

    Raises:
        ValueError: no such metric, or an answer that is not one token.
    """
    tokens: dict[str, Tensor] = {
        column: torch.tensor([model.to_single_token(row[column]) for row in rows])
        for column in ("answer", "versus")
        if column in rows[0]
    }
    found = []
    for name in names:
        given = [tokens[column] for column in METRICS[name]]
        found.append(getattr(metrics, name)(*given))
    return found


def needed(names: Sequence[str]) -> list[str]:
    """The columns that metrics need, in the order of a file.

    Raises:
        ValueError: no such metric.
    """
    for name in names:
        if name not in METRICS:
            raise ValueError(f"there is no metric {name!r}; known are {', '.join(METRICS)}")
    return [c for c in ("answer", "versus") if any(c in METRICS[name] for name in names)]


def run(
    kind: str,
    file: str,
    output: str,
    *,
    model: HookedModel,
    metric: str = "logit_difference",
    top: int = 10,
    **options: Any,
) -> list[Path]:
    """An ablation or patching map of a file's prompts, printed and saved as parquet; started again it goes on where it stopped.

    Args:
        kind: "ablate" (column `prompt`) or "patch" (`clean`, `corrupted`).
        file: JSON lines or CSV with these columns, and `answer`, `versus` where the metric needs them.
        output: the parquet file; with several metrics one for each, its name before the suffix.
        metric: names of `METRICS`, with commas between.
        options: of `maps.ablate` or `maps.patch`.
    Returns:
        The files written.
    Raises:
        ValueError: a file that is no list of prompts, an output that is there already, or what the map refuses.
    """
    if top < 0:
        raise ValueError(f"top is {top}; it is how many variants are printed")
    pyarrow()  # missing, it is said before the work and not after
    names = [name.strip() for name in metric.split(",")]
    texts = ["prompt"] if kind == "ablate" else ["clean", "corrupted"]
    rows = read(file, texts + needed(names))
    outputs = _outputs(Path(output), names)
    parts = Path(f"{output}.parts")
    asked = measures(model, names, rows)
    given = [[row[column] for row in rows] for column in texts]
    if kind == "patch":
        _same_tokens(model, file, *given)
    call: Any = maps.ablate if kind == "ablate" else maps.patch
    found = call(model, *given, asked, save_to=parts, **options)
    for path, one in zip(outputs, found.values(), strict=True):
        one.save(path)
        print(_summary(one, top))
        print(f"{len(one.names)} variants, {len(rows)} prompts: {path}\n")
    shutil.rmtree(parts)
    return outputs


def _outputs(output: Path, names: Sequence[str]) -> list[Path]:
    if output.suffix != ".parquet":
        raise ValueError(f"{output} is to be a parquet file: name it {output.stem}.parquet")
    found = (
        [output] if len(names) == 1 else [output.with_suffix(f".{name}.parquet") for name in names]
    )
    for path in found:
        if path.exists():
            raise ValueError(f"{path} is there already: remove it, or give another name with -o")
    return found


def _same_tokens(model: HookedModel, file: str, clean: list[str], corrupted: list[str]) -> None:
    for i, pair in enumerate(zip(clean, corrupted, strict=True), 1):
        sizes = [model.to_tokens(text).shape[1] for text in pair]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{file}, prompt {i}: clean has {sizes[0]} tokens and corrupted {sizes[1]}; patching puts a position into the same "
                "position, so they must have as many"
            )


def _summary(found: SweepResult, top: int) -> str:
    best = found.top(top)
    columns = {
        "variant": [name for name, _ in best],
        f"change of {found.metric}": [f"{value:+.4f}" for _, value in best],
    }
    if found.values.shape[1] > 1:
        low, high = found.interval()
        index = {name: i for i, name in enumerate(found.names)}
        columns["95 % over prompts"] = [
            f"{low[index[name]]:+.4f} to {high[index[name]]:+.4f}" for name, _ in best
        ]
    return Table(columns).text()
