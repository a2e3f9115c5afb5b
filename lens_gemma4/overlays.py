"""Figures over pictures: one number for each field of a picture's grid, and squares of who sees whom.

From arrays and labels, as in `plots`; `pictures` fills them from a model's runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lens_gemma4.plots import DIVERGING, WRITTEN_CELL, graph_objects, laid_out, safe

PICTURE = 560  # pixels of a picture's longer side
THIN = 90  # pixels of its shorter side at least, even where that bends a long strip
OVER = 0.65  # how much of a picture is hidden by what lies over it
COLOURS = 110  # pixels that a bar of colours takes beside a picture
ONE_LINE = 34  # pixels of a title of one line
PANEL = 400  # pixels of a square's side
KINDS = ("#f2f2f2", "#9ecae1", "#d55e00", "#cc79a7", "#009e73")  # the first is nothing

# -- over pictures ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One number for each field of a picture's grid, and what is said of it.

    Args:
        values: `[row column]`, first row on top; NaN leaves a field free.
        title: over the figure while this layer is in front.
        cells: what is written in each field; any text, its lines one under another.
        told: what the pointer is told of each field beside its name and value; any text.
        limits: values of the first and the last colour; by default the same for all layers.
    """

    values: Sequence[Sequence[float]]
    title: str = ""
    cells: Sequence[Sequence[str]] | None = None
    told: Sequence[Sequence[str]] | None = None
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Ground:
    """What values are laid over.

    Args:
        across, down: edges of the fields from left to right and from top to bottom, one more than columns and rows.
        names: `[row column]`, of the fields.
        picture: its address, "data:image/png;base64,..."; it is stretched from edge to edge. None is a plain ground.
        length: what the edges are counted in.
    """

    across: Sequence[float]
    down: Sequence[float]
    names: Sequence[Sequence[str]]
    picture: str | None = None
    length: str = "pixels"


def overlay(
    ground: Ground,
    layers: Mapping[str, Layer],
    *,
    unit: str = "",
    centred: bool = True,
    step: str = "",
    shown: int = -1,
) -> Any:
    """Numbers in the fields of a picture's grid, translucent over it, first row on top, as a plotly figure.

    Args:
        layers: by name; through several a slider goes.
        unit: of the values, which are the colours.
        centred: colours diverge from zero; else they run from the lowest to the highest value.
        step: what the slider chooses.
        shown: the layer in front at first, by number.
    Raises:
        ValueError: names, values or cells that do not fit the edges.
    """
    go = graph_objects()
    _check_fit(ground, layers)
    reached = _reach([layer.values for layer in layers.values()], centred)
    front = list(layers)[shown]
    figure = go.Figure()
    for key, layer in layers.items():
        low, high = layer.limits or reached
        trace = go.Heatmap(
            x=list(ground.across),
            y=list(ground.down),
            z=[[float(value) for value in row] for row in layer.values],
            customdata=_field_texts(ground.names, layer.told),
            hovertemplate="%{customdata}<br>%{z:.4g}<extra></extra>",
            colorscale=DIVERGING if centred else "Blues",
            colorbar={"exponentformat": "e"},
            zmin=low,
            zmax=high,
            opacity=OVER if ground.picture else 1,
            xgap=1,
            ygap=1,
            visible=key == front,
        )
        if layer.cells is not None:
            written = [[safe(text).replace("\n", "<br>") for text in row] for row in layer.cells]
            trace.update(text=written, texttemplate="%{text}", textfont={"size": 12})
        figure.add_trace(trace)
    heads = {
        key: "; ".join(filter(None, (one.title, unit and f"colour: {unit}")))
        for key, one in layers.items()
    }
    return _as_picture(figure, ground, heads, front, step)


def _check_fit(ground: Ground, layers: Mapping[str, Layer]) -> None:
    rows, columns = len(ground.down) - 1, len(ground.across) - 1
    given: dict[str, Any] = {"names": ground.names}
    for key, layer in layers.items():
        parts = {"values": layer.values, "cells": layer.cells, "told": layer.told}
        given |= {f"{name} of {key!r}": part for name, part in parts.items() if part is not None}
    for name, grid in given.items():
        if [len(row) for row in grid] != [columns] * rows:
            raise ValueError(
                f"{name} are not [{rows} {columns}] [row column], which the edges enclose"
            )


def _field_texts(
    names: Sequence[Sequence[str]], told: Sequence[Sequence[str]] | None
) -> list[list[str]]:
    if told is None:
        return [[safe(name) for name in row] for row in names]
    return [
        [f"{safe(name)}<br>{safe(text)}" for name, text in zip(*rows, strict=True)]
        for rows in zip(names, told, strict=True)
    ]


def _reach(grids: Sequence[Sequence[Sequence[float]]], centred: bool) -> tuple[float, float]:
    """The lowest and the highest of all numbers that are some."""
    numbers = [float(value) for grid in grids for row in grid for value in row]
    known = [number for number in numbers if number == number]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    if centred:
        high = max(-low, high)
        low = -high
    return (low, high) if low < high else (low - 1, high + 1)


def _as_picture(
    figure: Any, ground: Ground, heads: Mapping[str, str], front: str, step: str
) -> Any:
    """The picture below, axes in its own lengths, neither side bent; a slider where there are several layers."""
    (left, *_, right), (top, *_, bottom) = ground.across, ground.down
    if ground.picture:
        figure.add_layout_image(
            source=ground.picture,
            sizing="stretch",
            layer="below",
            xref="x",
            yref="y",
            x=left,
            y=top,
            sizex=right - left,
            sizey=bottom - top,
        )
    written = any(trace.text is not None for trace in figure.data)
    fields = max(len(ground.across), len(ground.down)) - 1
    side = max(PICTURE, WRITTEN_CELL * fields) if written else PICTURE
    scale = side / max(right - left, bottom - top)
    wide, high = (scale * length for length in (right - left, bottom - top))
    axis: dict[str, Any] = {"showgrid": False, "zeroline": False, "ticks": "outside"}
    figure.update_xaxes(**axis, range=[left, right], title={"text": f"x, {ground.length}"})
    figure.update_yaxes(**axis, range=[bottom, top], title={"text": f"y, {ground.length}"})
    if min(wide, high) >= THIN:
        figure.update_xaxes(constrain="domain")
        figure.update_yaxes(scaleanchor="x", constrain="domain")
    wide, high = max(wide, THIN), max(high, THIN)
    heads = {key: _broken(head, wide + COLOURS) for key, head in heads.items()}
    above = ONE_LINE + 20 * max(head.count("<br>") for head in heads.values())
    below = 150 if len(heads) > 1 else 60
    laid_out(figure, int(high) + above + below, int(wide) + 70 + COLOURS)
    figure.update_layout(
        title=_heading(heads[front], above), margin={"l": 70, "r": COLOURS, "t": above, "b": below}
    )
    return _with_slider(figure, heads, front, step) if len(heads) > 1 else figure


def _with_slider(figure: Any, heads: Mapping[str, str], front: str, step: str) -> Any:
    steps = [
        {
            "label": safe(key),
            "method": "update",
            "args": [{"visible": [other == key for other in heads]}, {"title.text": head}],
        }
        for key, head in heads.items()
    ]
    return figure.update_layout(
        sliders=[
            {
                "steps": steps,
                "active": list(heads).index(front),
                "pad": {"t": 55},
                "currentvalue": {"prefix": f"{safe(step)} "},
            }
        ]
    )


def _heading(text: str, room: int) -> dict[str, Any]:
    """A title whose first line begins at the top, in so many pixels."""
    lifted = 10 if room > ONE_LINE else 0  # by which plotly places several lines too high
    font, pad = {"size": 14}, {"t": 8 + lifted}
    return {"text": text, "x": 0.01, "y": 1, "yanchor": "top", "pad": pad, "font": font}


def _broken(text: str, width: int | float) -> str:
    """Into lines that fit so many pixels."""
    return "<br>".join(safe(line) for line in textwrap.wrap(text, max(24, int(width / 7.5))))


def squares(
    panels: Mapping[str, Sequence[Sequence[int]]],
    kinds: Sequence[str],
    names: Sequence[str],
    *,
    row_title: str = "",
    column_title: str = "",
    ticks: Mapping[int, str] | None = None,
    title: str = "",
) -> Any:
    """Squares side by side, of the same things on both axes and each field of a kind, as a plotly figure.

    Args:
        panels: by heading, `[row column]` numbers of kinds, first row on top.
        kinds: their names; the first is nothing, and grey.
        names: of the rows, and of the columns; all different.
        row_title, column_title: what the axes are.
        ticks: labels of some places; by default of all.
        title: over it all.
    Raises:
        ValueError: a panel that is no square of the names; equal names; more kinds than colours.
    """
    go = graph_objects()
    if len(kinds) > len(KINDS):
        raise ValueError(f"there are {len(kinds)} kinds and {len(KINDS)} colours")
    n, labels = len(names), [safe(name) for name in names]
    if len(set(labels)) < n:
        raise ValueError("names of squares are all different: put their numbers before them")
    figure = go.Figure()
    stairs = [[(i + end) / len(KINDS), KINDS[i]] for i in range(len(KINDS)) for end in (0, 1)]
    for i, (heading, grid) in enumerate(panels.items(), 1):
        if [len(row) for row in grid] != [n] * n:
            raise ValueError(f"{heading!r} is no square of the {n} names")
        figure.add_heatmap(
            z=[list(row) for row in grid],
            xaxis=f"x{i}",
            yaxis=f"y{i}",
            colorscale=stairs,
            zmin=-0.5,
            zmax=len(KINDS) - 0.5,
            showscale=False,
            x=labels,
            y=labels,
            hovertemplate=f"{safe(row_title)} %{{y}}, {safe(column_title)} %{{x}}<extra></extra>",
        )
    met = {0} | {kind for grid in panels.values() for row in grid for kind in row}
    for kind, colour in ((kinds[i], KINDS[i]) for i in sorted(met)):
        marker = {"color": colour, "symbol": "square", "size": 12, "line": {"width": 1}}
        figure.add_scatter(
            x=[None], y=[None], mode="markers", marker=marker, name=safe(kind), showlegend=True
        )
    return _as_squares(
        figure, panels, labels, ticks or dict(enumerate(names)), (row_title, column_title), title
    )


def _as_squares(
    figure: Any,
    panels: Mapping[str, Sequence[Sequence[int]]],
    names: Sequence[str],
    ticks: Mapping[int, str],
    titles: tuple[str, str],
    title: str,
) -> Any:
    """Side by side, first row on top, each heading under its square."""
    n = len(names)
    axis: dict[str, Any] = {
        "type": "category",
        "tickvals": [names[i] for i in ticks],
        "ticktext": [safe(label) for label in ticks.values()],
        "showgrid": False,
        "zeroline": False,
        "ticks": "outside",
    }
    labels = 30 + 7 * max(map(len, ticks.values()))  # pixels that they take
    gap = (labels + 40) / (labels * len(panels) + PANEL * len(panels))
    wide = (1 - gap * (len(panels) - 1)) / len(panels)
    headings = [_broken(heading, PANEL) for heading in panels]
    for i, heading in enumerate(headings):
        across = {"domain": [i * (wide + gap), i * (wide + gap) + wide], "anchor": f"y{i + 1}"}
        under = f"{safe(titles[1])}<br><br>{heading}"
        figure.layout[f"xaxis{i + 1}"] = {
            **(axis | across),
            "range": [-0.5, n - 0.5],
            "tickangle": -90,
            "title": {"text": under, "font": {"size": 13}},
        }
        down = {**axis, "anchor": f"x{i + 1}", "range": [n - 0.5, -0.5]}
        figure.layout[f"yaxis{i + 1}"] = {**down, "title": {"text": safe(titles[0])}}
    width = int(PANEL / wide) + labels + 70
    head = _broken(title, width)
    room = ONE_LINE + 20 * head.count("<br>")
    above = room + 40  # of which the legend takes some
    below = labels + 70 + 20 * max(heading.count("<br>") + 1 for heading in headings)
    laid_out(figure, PANEL + above + below, width)
    return figure.update_layout(
        title=_heading(head, room),
        margin={"l": labels + 40, "r": 30, "t": above, "b": below},
        legend={"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0},
    )
