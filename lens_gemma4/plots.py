"""Figures from arrays and labels, and one self-contained page of them. The only importer of plotly.

Labels are tokens of a user's text: they are escaped wherever they are shown, and axes are numbered, so that two
equal tokens stay two columns.
"""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIVERGING = "RdBu"  # red below zero, blue above; told apart by colour-blind eyes
BLUE, RED = "#2166ac", "#b2182b"
CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000")  # Okabe and Ito's
DASHES = ("solid", "dash", "dot", "dashdot")  # so that no curve is known by its colour alone
HEIGHT = 360  # pixels of a plot whose axes are both numbers
SIDE = 640  # pixels a heatmap may be wide before its columns narrow
CELL = 34
WRITTEN_CELL = 72  # pixels of a column in whose cells a word stands
MARGIN = 90
LETTER = 17  # pixels that a label on an axis is high
BROWSERS = "chromium chromium-browser google-chrome google-chrome-stable chrome msedge".split()
SECONDS = 60  # that a browser may take for one figure


def graph_objects() -> Any:
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise ImportError(
            "plots need plotly, which is not installed: pip install 'lens-gemma4[plots]'"
        ) from error
    return plotly.graph_objects


def require() -> None:
    """Raise now, rather than after the work, when plotly is missing.

    Raises:
        ImportError: it says what to install.
    """
    graph_objects()


def heatmap(
    values: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    row_title: str = "",
    column_title: str = "",
    unit: str = "",
    centred: bool = True,
    cells: Sequence[Sequence[str]] | None = None,
) -> Any:
    """A heatmap, first row at the top, as a plotly figure.

    Args:
        values: `[row column]`; NaN leaves a cell empty.
        rows, columns: labels; any text.
        row_title, column_title: what the axes are.
        unit: of the values, beside the colours.
        centred: colours diverge from zero; else they run from the lowest to the highest value.
        cells: what is written in each cell, and shown with its value; any text.
    Raises:
        ValueError: the labels or the cells do not fit the values.

    >>> heatmap([[1.0, -1.0]], ["block 0"], ["head 0", "head 1"]).data[0].type
    'heatmap'
    """
    go = graph_objects()
    grid = [[float(value) for value in row] for row in values]
    if len(grid) != len(rows) or any(len(row) != len(columns) for row in grid):
        shape = f"[{len(grid)} {len(grid[0]) if grid else 0}]"
        raise ValueError(
            f"values are {shape}, labels name {len(rows)} rows and {len(columns)} columns"
        )
    if cells is not None and [len(row) for row in cells] != [len(row) for row in grid]:
        raise ValueError(f"cells is not [{len(rows)} {len(columns)}], as the values are")
    colours = {"colorscale": DIVERGING, "zmid": 0} if centred else {"colorscale": "Blues"}
    trace = go.Heatmap(
        z=grid,
        customdata=[
            [
                safe(f"{row_title} {row}, {column_title} {column}")
                + ("" if cells is None else f": {safe(cells[i][j])}")
                for j, column in enumerate(columns)
            ]
            for i, row in enumerate(rows)
        ],
        hovertemplate="%{customdata}: %{z:.4f}<extra></extra>",
        colorbar={"title": {"text": safe(unit)}, "exponentformat": "e"},
        xgap=1,
        ygap=1,
        **colours,
    )
    cell = CELL
    if cells is not None:
        trace.update(text=[[safe(text) for text in row] for row in cells], texttemplate="%{text}")
        cell = WRITTEN_CELL
    figure = go.Figure(trace)
    wide = min(SIDE, cell * len(columns))
    ticks = _ticks(columns, column_title, wide)
    figure.update_xaxes(**ticks)
    figure.update_yaxes(**_ticks(rows, row_title), autorange="reversed")
    width = wide + 2 * MARGIN
    longest = 7 * max(map(len, ticks["ticktext"]), default=0)  # pixels
    upright = longest if longest * len(ticks["ticktext"]) > wide else 0  # how plotly turns them
    return laid_out(figure, height=CELL * len(rows) + MARGIN + upright, width=max(width, 360))


def bars(values: Any, labels: Sequence[str], *, title: str = "", unit: str = "") -> Any:
    """Horizontal bars, first at the top, blue above zero and red below, as a plotly figure.

    Args:
        values: one for each label.
        title: what the labels are.
        unit: of the values.
    Raises:
        ValueError: as many labels as values are needed.
    """
    go = graph_objects()
    heights = [float(value) for value in values]
    if len(heights) != len(labels):
        raise ValueError(f"there are {len(heights)} values and {len(labels)} labels")
    trace = go.Bar(
        x=heights,
        y=list(range(len(heights))),
        orientation="h",
        marker={"color": [BLUE if value >= 0 else RED for value in heights]},
        customdata=[safe(label) for label in labels],
        hovertemplate="%{customdata}: %{x:.4f}<extra></extra>",
    )
    figure = go.Figure(trace)
    figure.update_yaxes(**_ticks(labels, title), autorange="reversed")
    figure.update_xaxes(title={"text": safe(unit)}, zeroline=True)
    return laid_out(figure, height=24 * len(labels) + MARGIN, width=SIDE + MARGIN)


def lines(
    x: Any,
    curves: Mapping[str, Any],
    *,
    x_title: str = "",
    unit: str = "",
    log: bool = False,
) -> Any:
    """Curves over the same places, each with its name, as a plotly figure.

    Args:
        x: a number for each place.
        curves: by name, as many values as places; NaN leaves a gap.
        x_title: what the places are.
        unit: of the values.
        log: a logarithmic axis of values.
    Raises:
        ValueError: as many values as places are needed; a value without a logarithm.

    >>> lines([0, 1], {"entropy": [2.0, 0.5]}).data[0].name
    'entropy'
    """
    go = graph_objects()
    places = [float(place) for place in x]
    figure = go.Figure()
    for i, (name, values) in enumerate(curves.items()):
        heights = [float(value) for value in values]
        if len(heights) != len(places):
            raise ValueError(f"{name!r} has {len(heights)} values for {len(places)} places")
        if log and any(value <= 0 for value in heights):
            raise ValueError(
                f"{name!r} reaches {min(heights)}, which has no logarithm: use log=False"
            )
        style = {"color": CURVES[i % len(CURVES)], "dash": DASHES[i % len(DASHES)]}
        figure.add_scatter(
            x=places, y=heights, name=safe(name), mode="lines+markers", line=style, showlegend=True
        )
    figure.update_xaxes(title={"text": safe(x_title)})
    figure.update_yaxes(title={"text": safe(unit)}, type="log" if log else "linear")
    figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return laid_out(figure, height=HEIGHT, width=SIDE + MARGIN)


def scatter(
    x: Any,
    y: Any,
    labels: Sequence[str],
    *,
    x_title: str = "",
    y_title: str = "",
    diagonal: bool = True,
) -> Any:
    """Named points, as a plotly figure.

    Args:
        x, y: one of each for each label.
        x_title, y_title: what they are.
        diagonal: draw the line on which both are equal.
    Raises:
        ValueError: as many of both as labels are needed.
    """
    go = graph_objects()
    across, up = ([float(value) for value in values] for values in (x, y))
    if not len(across) == len(up) == len(labels):
        raise ValueError(f"there are {len(across)} x, {len(up)} y and {len(labels)} labels")
    figure = go.Figure()
    if diagonal and labels:
        ends = [min(across + up), max(across + up)]
        equal = {"color": "#999999", "width": 1}
        figure.add_scatter(x=ends, y=ends, mode="lines", line=equal, hoverinfo="skip")
    figure.add_scatter(
        x=across,
        y=up,
        mode="markers+text",
        marker={"color": BLUE},
        text=[safe(label) for label in labels],
        textposition="top center",
        hovertemplate="%{text}: %{x:.4f}, %{y:.4f}<extra></extra>",
    )
    figure.update_xaxes(title={"text": safe(x_title)}, zeroline=True)
    figure.update_yaxes(title={"text": safe(y_title)}, zeroline=True)
    figure.update_layout(showlegend=False)
    return laid_out(figure, height=SIDE, width=SIDE + MARGIN)


def _ticks(labels: Sequence[str], title: str, room: int | None = None) -> dict[str, Any]:
    """Labels of the places; so many of them, evenly, as have room in so many pixels."""
    step = 1 if room is None else -(-len(labels) * LETTER // max(room, 1))
    places = list(range(0, len(labels), max(step, 1)))
    return {
        "tickvals": places,
        "ticktext": [safe(labels[i]) for i in places],
        "title": {"text": safe(title)},
    }


def safe(text: Any) -> str:
    """plotly reads tags and entities in every label."""
    return html.escape(str(text), quote=False)


def laid_out(figure: Any, height: int, width: int) -> Any:
    return figure.update_layout(
        template="plotly_white",
        height=height,
        width=width,
        margin={"l": MARGIN, "r": 20, "t": 20, "b": 50},
        font={"size": 13},
    )


# -- as a file ----------------------------------------------------------------------------------------


def save_png(
    figure: Any, path: str | Path, *, scale: float = 2.0, browser: str | None = None
) -> None:
    """Write a figure as a PNG, by a Chromium or Chrome without a window. (As a page: `figure.write_html(path)`.)

    Args:
        scale: pixels of the file for each of the figure.
        browser: its command or path; by default the first one found.
    Raises:
        RuntimeError: no such browser, or it draws nothing.
    """
    program = _browser(browser)
    width, height = figure.layout.width or 700, figure.layout.height or 450
    path = Path(path)
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "figure.html", Path(folder) / "figure.png"
        inner = figure.to_html(
            full_html=False, include_plotlyjs=True, config={"displayModeBar": False}
        )
        head = '<!DOCTYPE html><meta charset="utf-8"><body style="margin:0;background:#fff">'
        page.write_text(head + inner, encoding="utf-8")
        # The window is taller than the figure: some versions count their own bars to its height.
        command = [
            *(program, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
            *(
                ["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
            ),  # root needs it
            f"--user-data-dir={folder}/profile",
            f"--force-device-scale-factor={scale:g}",
            f"--window-size={width},{height + 200}",
            f"--screenshot={shot}",
            page.as_uri(),
        ]
        said = _run(command)
        if not shot.is_file():
            raise RuntimeError(f"{program} wrote no picture: {said[-500:]}")
        _crop(shot, path, int(width * scale), int(height * scale))


def _browser(given: str | None) -> str:
    for name in BROWSERS if given is None else [given]:
        if found := shutil.which(name):
            return found
    asked = f"no program {given!r}" if given else f"none of {', '.join(BROWSERS)} was found"
    raise RuntimeError(
        f"a PNG needs a Chromium or Chrome, and {asked}: install one, name it with browser=, "
        "or write the figure as a page: figure.write_html(path)"
    )


def _run(command: Sequence[str]) -> str:
    """Run a browser to its end; what it said."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"it did not end within {SECONDS} s"
    except OSError as error:
        return str(error)
    return run.stderr


def _crop(shot: Path, path: Path, width: int, height: int) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "a PNG needs pillow, which is not installed: pip install 'lens-gemma4[media]'"
        ) from error
    with Image.open(shot) as picture:
        picture.crop((0, 0, width, height)).convert("RGB").save(path, "PNG")


# -- the page -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Columns by name, for `page` or, as `.text()`, for a terminal; numbers are written as `shown` writes them.

    Raises:
        ValueError: columns of unlike length.

    >>> print(Table({"token": [" Paris"], "logit": [21.5]}).text())
    token     logit
     Paris  21.5000
    """

    columns: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        if len({len(column) for column in self.columns.values()}) > 1:
            lengths = {name: len(column) for name, column in self.columns.items()}
            raise ValueError(f"the columns of a table are of one length; these are {lengths}")

    def html(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        rows = "".join(
            f"<tr>{''.join(map(_cell, row))}</tr>"
            for row in zip(*self.columns.values(), strict=True)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def text(self) -> str:
        """For a terminal: columns padded, numbers to the right."""
        cells = [[name, *map(shown, column)] for name, column in self.columns.items()]
        numeric = [
            bool(column) and all(map(_is_number, column)) for column in self.columns.values()
        ]
        widths = [max(map(len, column)) for column in cells]
        lines = []
        for row in zip(*cells, strict=True):
            padded = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)


def shown(value: Any) -> str:
    """A cell as text: fractions with four places, or as powers of ten where these would hide them."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if 0 < abs(value) < 0.0001 else f"{value:.4f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    kind = ' class="number"' if _is_number(value) else ""
    return f"<td{kind}>{html.escape(shown(value))}</td>"


@dataclass(frozen=True)
class Section:
    """One part of a page: a heading, a sentence or two, then figures and tables in order.

    A table in `numbers` stays folded until it is opened: the figures' values, for those who do not see them.
    """

    heading: str
    text: str
    content: Sequence[Any] = ()
    numbers: Table | None = None


# Nothing may be loaded from anywhere, by anyone: the browser itself refuses.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
nav ul { padding-left: 1.2rem; } a { color: #0b5394; } :focus-visible { outline: 3px solid #0b5394; }
figure { margin: 1rem 0; } .wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .2rem .8rem; border-bottom: 1px solid #ccc;
  text-align: left; white-space: pre; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; }
"""


def page(title: str, sections: Sequence[Section], intro: str = "") -> str:
    """One HTML page that needs nothing else: plotly.js is inside, once, and no request leaves it.

    Args:
        title: of the page.
        sections: in order; figures are this module's, tables too.
        intro: a paragraph under the title.
    Returns:
        The page's text; write it as UTF-8.
    """
    graph_objects()
    from plotly.offline import get_plotlyjs

    links = "".join(
        f'<li><a href="#s{i}">{html.escape(s.heading)}</a></li>' for i, s in enumerate(sections)
    )
    body = "".join(_section(i, section) for i, section in enumerate(sections))
    has_figures = any(
        not isinstance(item, Table) for section in sections for item in section.content
    )
    script = f"<script>{get_plotlyjs()}</script>" if has_figures else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="lens-gemma4">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n{script}\n</head>\n<body>\n<main>\n<h1>{html.escape(title)}</h1>\n"
        f"<p>{html.escape(intro)}</p>\n<nav aria-label='Contents'><ul>{links}</ul></nav>\n{body}</main>\n</body>\n</html>\n"
    )


def _section(number: int, section: Section) -> str:
    items = "".join(
        f'<div class="wide" tabindex="0">{item.html()}</div>'
        if isinstance(item, Table)
        else _figure(item, section.heading, f"s{number}f{item_number}")
        for item_number, item in enumerate(section.content)
    )
    folded = (
        f"<details><summary>Numbers</summary>{section.numbers.html()}</details>"
        if section.numbers
        else ""
    )
    return (
        f'<section id="s{number}"><h2>{html.escape(section.heading)}</h2>\n'
        f"<p>{html.escape(section.text)}</p>\n{items}\n{folded}</section>\n"
    )


def _figure(figure: Any, name: str, place: str) -> str:
    settings = {"displaylogo": False, "responsive": True}
    inner = figure.to_html(full_html=False, include_plotlyjs=False, config=settings, div_id=place)
    return f'<figure class="wide" tabindex="0" role="img" aria-label="{html.escape(name)}">{inner}</figure>\n'
