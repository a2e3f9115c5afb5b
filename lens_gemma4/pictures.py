"""Looking at pictures: a number for each patch, laid over the picture in its own pixels.

    over_picture       any numbers
    lens_grid          what the logit lens reads at each patch, block by block
    attention_over     how much a position looks at each patch
    attribution_over   what each patch gave to a logit
    ablation_over      what a metric loses with each patch
    mask_picture       who sees whom in a block, under both mask rules
    as_seen            the picture as the model got it

All but the last give plotly figures: `figure.write_html(path)` is a page that needs nothing else, `save_png` a file.
"""

from __future__ import annotations

import base64
import io
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_gemma4 import forms, overlays
from lens_gemma4.attribution import Attribution
from lens_gemma4.cache import ActivationCache
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.lenses import Lens
from lens_gemma4.masks import attention_masks
from lens_gemma4.overlays import Ground, Layer
from lens_gemma4.plots import save_png
from lens_gemma4.results import SweepResult
from lens_gemma4.spans import MEDIA, Span, spans_of, token_labels

if TYPE_CHECKING:
    import PIL.Image

SHOWN = 1024  # pixels of the longer side that a figure keeps of a picture
PALE = 90  # grey that stands for black: dark pictures would swallow the colours over them
LONGEST = 11  # letters of a token that are written in a field
LETTER = 17  # pixels that a name on an axis is high
RULES = ("transformers", "windowed")
# What a query makes of a key, in `mask_picture`.
HIDDEN, PAST, AHEAD, FAR = range(4)
KINDS = ("hidden", "seen, as in text", "seen ahead", "seen beyond the window")


def over_picture(
    image: Any,
    span: Span,
    values: Float[Tensor, " token"] | Mapping[str, Float[Tensor, " token"]],
    *,
    unit: str = "",
    title: str = "",
    centred: bool = True,
    cells: Sequence[str] | None = None,
    grey: bool = True,
    step: str = "",
) -> Any:
    """Numbers of patches as a translucent map over the picture, in its own pixels, as a plotly figure.

    Args:
        image: the picture, as it was given to the model; None leaves the map alone, in patches where the span's size is not known.
        span: an image or frame of `model.prepare(...).spans`.
        values: one for each of its tokens, in their order; NaN leaves a patch free. Several by name get a slider.
        unit: of the values, which are the colours.
        title: over the figure.
        centred: colours diverge from zero; else they run from the lowest to the highest value.
        cells: what is written in each patch; any text.
        grey: show the picture in grey, so that all colour is of the values.
        step: what the slider chooses.
    Raises:
        ValueError: no values, another number of them than tokens, or infinite ones; a picture of another size than the one that
            was run; sound.

    >>> from PIL import Image
    >>> from lens_gemma4 import HookedModel
    >>> model, picture = HookedModel.from_pretrained("tiny"), Image.new("RGB", (300, 200), "red")
    >>> (span,) = model.prepare(f"{model.image_token} a", images=[picture]).spans
    >>> figure = over_picture(picture, span, span.boxes()[:, 0], unit="left edge, pixels")
    >>> list(figure.data[0].z[0][:2])
    [0.0, 15.0]
    """
    named = dict(values) if isinstance(values, Mapping) else {title: values}
    if not named:
        raise ValueError("values is empty: there is nothing to draw")
    layers = {
        name: Layer(
            _field(span, given).tolist(),
            title,
            None if cells is None else _texts(span, cells, f"cells of {span.name}"),
        )
        for name, given in named.items()
    }
    ground = _ground(image, span, grey)
    return overlays.overlay(ground, layers, unit=unit, centred=centred, step=step, shown=0)


def lens_grid(
    image: Any,
    span: Span,
    lens: Lens,
    *,
    layer: SupportsIndex | None = None,
    k: int = 1,
    value: str = "probability",
    token: int | None = None,
    grey: bool = True,
) -> Any:
    """What the logit lens reads at each patch: the likeliest tokens written over the picture, a slider through the blocks.

    Args:
        image, span, grey: as in `over_picture`.
        lens: `model.logit_lens(...)` of the same prompts; `positions=span.positions.tolist()` reads no more than is needed.
        layer: one block; by default every place that was read, the last in front.
        k: how many tokens are written in each patch.
        value: what the colour is: "probability" (of the first choice or of `token`), "rank" of `token`, "entropy" or "kl".
        token: one that the lens was asked about, by its id.
    Raises:
        ValueError: positions or a block that the lens did not read, fewer tokens than k, or a lens of another call.

    >>> from PIL import Image
    >>> from lens_gemma4 import HookedModel
    >>> model, picture = HookedModel.from_pretrained("tiny"), Image.new("RGB", (300, 200), "red")
    >>> inputs = model.prepare(f"{model.image_token} a", images=[picture], image_tokens=70)
    >>> (span,) = inputs.spans
    >>> lens = model.logit_lens(inputs, positions=span.positions.tolist())
    >>> len(lens_grid(picture, span, lens).data) == model.cfg.n_layers
    True
    """
    known = lens.top_ids.shape[-1]
    if not 1 <= k <= known:
        raise ValueError(f"k is {k}; this lens kept the {known} likeliest tokens of each place")
    at = _read_at(lens, span)
    _check_labels(span, [lens.at_position(span.row, i) or "" for i in at], "lens")
    grid = lens.grid(value, token)[:, span.row, at].cpu()  # [place token]
    places = range(len(lens.places)) if layer is None else [lens.at(operator.index(layer))]
    several_points = len({place.point for place in lens.places}) > 1
    of = "the first choice" if token is None else repr(lens.name(token))
    about = f"{value} of {of}" if value in ("probability", "rank") else f"{value}, nats"
    names: dict[int, str] = {}
    layers = {}
    for i in places:
        place = lens.places[i]
        ids, probs = (v[i, span.row, at].cpu() for v in (lens.top_ids, lens.top_probs))
        names |= {one: lens.name(one) for one in set(ids.flatten().tolist()) - names.keys()}
        words = [[names[one] for one in row] for row in ids.tolist()]
        cells = ["\n".join(_short(word) for word in row[:k]) for row in words]
        told = [
            ", ".join(f"{word!r} {prob:.3f}" for word, prob in zip(*pair, strict=True))
            for pair in zip(words, probs.tolist(), strict=True)
        ]
        where = f"block {place}" if several_points else f"block {place.layer}"
        layers[where.removeprefix("block ")] = Layer(
            _field(span, grid[i]).tolist(),
            f"Logit lens after {where} on {span.name}",
            _texts(span, cells),
            _texts(span, told),
            limits=(0.0, 1.0) if value == "probability" else None,
        )
    ground = _ground(image, span, grey)
    return overlays.overlay(ground, layers, unit=about, centred=False, step="block")


def attention_over(
    image: Any,
    span: Span,
    cache: ActivationCache,
    layer: SupportsIndex | Sequence[SupportsIndex] | None = None,
    head: SupportsIndex | None = None,
    position: SupportsIndex | str = "last",
    *,
    grey: bool = True,
) -> Any:
    """How much of a position's attention goes to each patch, as a map over the picture; each block in colours of its own.

    Args:
        image, span, grey: as in `over_picture`.
        cache: of a run that kept `attn.hook_pattern`.
        layer: a block, or several to slide through; by default all that the cache holds.
        head: by default the mean over heads.
        position: the query, in the padded row (negative ones count from its end); "last" is the prompt's last real token.
    Raises:
        ValueError: no such position or head, no pattern, positions that were cut away, or a run in which other tokens stand
            where the span does; a cache that was cut to some prompts, which does not say which.

    >>> from PIL import Image
    >>> from lens_gemma4 import HookedModel
    >>> model, picture = HookedModel.from_pretrained("tiny"), Image.new("RGB", (300, 200), "red")
    >>> inputs = model.prepare(f"{model.image_token} a", images=[picture], image_tokens=70)
    >>> (span,) = inputs.spans
    >>> _, cache = model.run_with_cache(inputs, names_filter="blocks.3.attn.hook_pattern")
    >>> attention_over(picture, span, cache, 3, head=1).data[0].type
    'heatmap'
    """
    blocks = _patterns_of(cache) if layer is None else _blocks(layer)
    layers = {}
    for block in (cache.cfg.layer(i).index for i in blocks):
        pattern = _of_row(cache["pattern", block], span, cache)  # [head pos kv_pos]
        heads, pos, kv_pos = pattern.shape
        if pos != kv_pos:
            raise ValueError(
                f"the run had {kv_pos} positions and {pos} were kept: keep them all (no pos_slice) and choose with position="
            )
        head = None if head is None else _one_of(head, heads, "head", f"block {block} has heads")
        query = _query(cache, span, position, pos)
        _check_labels(span, _labels_at(span, cache), "run")
        asked = f"position {query}{_token_at(cache, span, query)}"
        rows = pattern[:, query, span.positions.to(pattern.device)].float().cpu()  # [head token]
        seen = rows.mean(0) if head is None else rows[head]
        who = f"mean of {heads} heads" if head is None else f"head {head}"
        layers[str(block)] = Layer(
            _field(span, seen).tolist(),
            f"Block {block}, {who}: {asked} gives {seen.sum():.1%} of its attention to {span.name}",
            limits=(0.0, seen.max().item() or 1.0),
        )
    ground = _ground(image, span, grey)
    return overlays.overlay(ground, layers, unit="share of attention", centred=False, step="block")


def attribution_over(
    image: Any,
    span: Span,
    found: Attribution,
    *,
    layer: SupportsIndex | None = None,
    head: SupportsIndex | None = None,
    pos: SupportsIndex = -1,
    grey: bool = True,
) -> Any:
    """What each patch gave to a target, as a map over the picture.

    Args:
        image, span, grey: as in `over_picture`.
        found: of `by_source`, what heads read from each patch at one position, summed over blocks and heads; or of
            `by_token(positions=None)`, what each patch's own row gives to the target at that patch.
        layer, head: of `by_source`, one of them in place of the sum.
        pos: of `by_source`, which of the positions that were asked.
    Raises:
        ValueError: another question's attribution, one that lacks the span's positions or was made of another call, or no such
            block, head or position.

    >>> from PIL import Image
    >>> from lens_gemma4 import HookedModel
    >>> model, picture = HookedModel.from_pretrained("tiny"), Image.new("RGB", (300, 200), "red")
    >>> inputs = model.prepare(f"{model.image_token} a", images=[picture], image_tokens=70)
    >>> (span,) = inputs.spans
    >>> found = model.attribute(inputs, " Paris", " Rome", by="source")
    >>> attribution_over(picture, span, found).data[0].type
    'heatmap'
    """
    where = span.positions.to(found.values.device)
    if found.axes == ("layer", "head", "batch", "pos", "source"):
        n_layers, n_heads, rows, n_pos, _ = found.values.shape
        _check_row(span, rows, "attribution")
        pos = _one_of(pos, n_pos, "pos", "it was asked at positions")
        values = found.values[:, :, span.row, pos]  # [layer head source]
        if layer is not None:
            layer = _one_of(layer, n_layers, "layer", "there are blocks")
            values = values[layer][None]
        if head is not None:
            head = _one_of(head, n_heads, "head", "there are heads")
            values = values[:, head, None]
        parts = [
            "all blocks" if layer is None else f"block {layer}",
            "all heads" if head is None else f"head {head}",
        ]
        _within(span, values.shape[-1])
        _check_numbered(span, found.labels.get("source"))
        given = values.sum((0, 1))[where]
        title = f"Read from {span.name} by {', '.join(parts)}: {given.sum():+.3g} in all"
    elif found.axes == ("batch", "pos") and layer is None and head is None:
        _within(span, found.values.shape[-1])
        _check_row(span, len(found.values), "attribution")
        numbers = [label.split(" ")[0] for label in found.labels["pos"]]
        if any(numbers[i] != str(i) for i in span.positions.tolist()):
            raise ValueError(
                "by_token answers at the patches' own positions: ask it at all of them, positions=None"
            )
        _check_numbered(span, found.labels["pos"])
        given = found.values[span.row, where]
        title = f"{span.name}: what each patch's own row gives at that patch, along the stream"
    else:
        raise ValueError(
            f"an attribution over {' '.join(found.axes)} does not tell patches apart: use by_source or, without layer and head, "
            "by_token(positions=None)"
        )
    return over_picture(image, span, given, unit=found.target, title=title, grey=grey)


def ablation_over(
    image: Any, span: Span, result: SweepResult | Mapping[str, SweepResult], *, grey: bool = True
) -> Any:
    """What each patch's ablation does to a metric in the span's prompt, as a map over the picture.

    Args:
        image, span, grey: as in `over_picture`.
        result: of `ablate(units="patches")` on the same prompts, or an estimate of it; patches that are not among its variants
            stay free.
    Raises:
        ValueError: no variant is a patch of this picture, a result of another call, or results of several metrics.

    >>> from PIL import Image
    >>> from lens_gemma4 import HookedModel
    >>> model, picture = HookedModel.from_pretrained("tiny"), Image.new("RGB", (300, 200), "red")
    >>> inputs = model.prepare(f"{model.image_token} a", images=[picture], image_tokens=70)
    >>> (span,) = inputs.spans
    >>> from lens_gemma4 import ablate, log_prob
    >>> result = ablate(model, inputs, log_prob(model.to_single_token(" Paris")), units="patches")
    >>> ablation_over(picture, span, result).data[0].type
    'heatmap'
    """
    if isinstance(result, Mapping):
        raise ValueError(
            f"there are results of {len(result)} metrics: give one of them, result[{next(iter(result), '')!r}]"
        )
    if span.kind != "image":
        raise ValueError(f"{span.name}: patches are ablated in images, not in each {span.kind}")
    at = {(one.get("image"), one.get("x"), one.get("y")): i for i, one in enumerate(result.at)}
    places = [at.get((span.number, x, y)) for x, y in _grid_of(span)]
    if all(place is None for place in places):
        raise ValueError(
            f"no variant is a patch of {span.name}: make the result by ablate(..., units='patches')"
        )
    if span.row >= result.values.shape[1]:
        raise ValueError(
            f"{span.name} is in prompt {span.row}; the result has {result.values.shape[1]}"
        )
    if result.tokens is not None:
        _check_labels(span, _at(result.tokens[span.row], span), "result")
    effect = result.effect[:, span.row].tolist()
    given = torch.tensor([torch.nan if i is None else effect[i] for i in places])
    base = result.baseline[span.row].item()
    return over_picture(
        image,
        span,
        given,
        unit=f"change of {result.metric}",
        title=f"{result.metric} is {base:.4g}; how it changes without each patch of {span.name}",
        grey=grey,
    )


def mask_picture(
    model: HookedModel, input: Any = None, layer: int = 0, *, row: int = 0, **inputs: Any
) -> Any:
    """Who sees whom in a block, under both rules for images side by side, as a plotly figure.

    Args:
        input, inputs: what `forward` takes, or a prepared call.
        layer: the block; what it shows is true of every block of its type.
        row: the prompt of the batch.
    Raises:
        ValueError: no such prompt.
    Source: `attention_masks`, which the network itself runs on.

    >>> from lens_gemma4 import HookedModel
    >>> figure = mask_picture(HookedModel.from_pretrained("tiny"), "The capital of", layer=3)
    >>> [list(row) for row in figure.data[0].z]
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    tensors = model.prepare(input, **inputs)
    labels = token_labels(model, tensors)
    if not 0 <= row < len(labels):
        raise ValueError(f"row is {row}; there are prompts 0 to {len(labels) - 1}")
    block = model.cfg.layer(layer)
    window = model.cfg.window_size if block.kind == "sliding" else None
    panels = {}
    for rule in RULES:
        kinds = _kinds(visible(model, tensors, block.kind, rule)[row], window)
        panels[_rule_says(model, rule, kinds, window)] = kinds.tolist()
    names = [f"{i} {label}" for i, label in enumerate(labels[row])]
    size = "" if window is None else f", window {window}"
    title = (
        f"Who sees whom in block {block.index} ({block.kind}{size}), prompt {row}. 'transformers', its forward: images see both "
        "ways in every block, even beyond the window. 'windowed', its generation with a static cache: full blocks are "
        "causal, sliding ones see both ways inside an image but never back beyond the window."
    )
    spans = [span for span in spans_of(model, tensors) if span.row == row]
    mask = tensors.get("attention_mask")
    padding = set() if mask is None else set((mask[row] == 0).nonzero()[:, 0].tolist())
    return overlays.squares(
        panels,
        KINDS,
        names,
        row_title="query",
        column_title="key",
        ticks=_ticks(names, spans, padding),
        title=title,
    )


def as_seen(tensors: Mapping[str, Any], span: Span) -> PIL.Image.Image:
    """The picture as the model got it: its patches put together, each a patch's size in pixels.

    What a picture shows is from 0 to 1: pixels beyond, as floats that were resampled have, are cut off here and not in the model.

    Args:
        tensors: the prepared call that the span is of.
    Raises:
        ValueError: the call holds no pixels of this span; sound.

    >>> from PIL import Image
    >>> from lens_gemma4 import HookedModel
    >>> model, picture = HookedModel.from_pretrained("tiny"), Image.new("RGB", (300, 200), "red")
    >>> inputs = model.prepare(f"{model.image_token} a", images=[picture], image_tokens=70)
    >>> (span,) = inputs.spans
    >>> as_seen(inputs, span).size
    (480, 288)
    """
    from PIL import Image

    columns, rows = span.shape
    name = "pixel_values" if span.kind == "image" else "pixel_values_videos"
    pixels = tensors.get(name)
    if pixels is None:
        raise ValueError(f"{span.name} has no pixels here: this call holds no {name}")
    patches = pixels.flatten(0, -3)[span.index, span.valid].float().cpu()  # [token d_patch]
    side = round((patches.shape[-1] / 3) ** 0.5)
    picture = torch.zeros(rows, side, columns, side, 3)
    for patch, (x, y) in zip(patches, _grid_of(span), strict=True):
        picture[y, :, x] = patch.view(side, side, 3)
    picture = picture.reshape(rows * side, columns * side, 3)
    return Image.fromarray((picture * 255).round().clamp(0, 255).byte().numpy())


# -- a span as a grid ---------------------------------------------------------------------------------


def _grid_of(span: Span) -> list[tuple[int, int]]:
    if span.grid is None:
        raise ValueError(f"{span.name} is sound: it has no patches to draw")
    return [(x, y) for x, y in span.grid.tolist()]


def _field(span: Span, values: Float[Tensor, " token"]) -> Float[Tensor, "row column"]:
    """Values in their places; NaN where there is no patch."""
    places = _grid_of(span)
    values = torch.as_tensor(values).detach().cpu().double()
    if bool(values.isinf().any()):
        raise ValueError(f"values of {span.name} are infinite: nan leaves a patch free")
    if values.shape != (len(places),):
        raise ValueError(
            f"values are {list(values.shape)}; {span.name} has {len(places)} tokens: give one number for each"
        )
    columns, rows = span.shape
    field = torch.full((rows, columns), torch.nan, dtype=torch.float64)
    x, y = torch.tensor(places).unbind(1)
    field[y, x] = values
    return field


def _texts(span: Span, texts: Sequence[str], what: str = "texts") -> list[list[str]]:
    places = _grid_of(span)
    if len(texts) != len(places):
        raise ValueError(f"{what} are {len(texts)}; it has {len(places)} tokens")
    columns, rows = span.shape
    field = [[""] * columns for _ in range(rows)]
    for (x, y), text in zip(places, texts, strict=True):
        field[y][x] = text
    return field


def _ground(image: Any, span: Span, grey: bool) -> Ground:
    """The picture, where its patches lie in it, and their names."""
    shape = span.shape  # raises for sound, before any work
    picture, size = None, span.size or shape
    if image is not None:
        picture = _picture(image)
        size = picture.size
        if span.size not in (None, size):
            raise ValueError(
                f"{span.name} was {list(span.size or ())} [width height] when it was run, and this picture is {list(size)}: give "
                "the one that was run"
            )
    boxes = span.boxes(size)
    across, down = ([0.0] * (n + 1) for n in shape)
    for (x, y), (left, top, right, bottom) in zip(_grid_of(span), boxes.tolist(), strict=True):
        across[x : x + 2], down[y : y + 2] = [left, right], [top, bottom]
    length = "pixels" if image is not None or span.size else "patches"
    names = [
        f"{label}: {length} {left:g} to {right:g}, {top:g} to {bottom:g}"
        for label, (left, top, right, bottom) in zip(
            span.labels(), boxes.round(decimals=1).tolist(), strict=True
        )
    ]
    address = None if picture is None else _address(picture, grey)
    return Ground(across, down, _texts(span, names), address, length)


def _picture(image: Any) -> PIL.Image.Image:
    """What a user gives as an image, as PIL has it."""
    from PIL import Image

    found = forms.image_of(image)
    if isinstance(found, Tensor):  # [3 height width], 0 to 255
        channels = found.cpu().round().to(torch.uint8).permute(1, 2, 0)
        return Image.fromarray(channels.contiguous().numpy())
    return found


def _address(picture: PIL.Image.Image, grey: bool) -> str:
    """The picture inside its own address, no larger than a figure shows."""
    shown = picture.convert("RGB")
    shown.thumbnail((SHOWN, SHOWN))
    if grey:
        shown = shown.convert("L").point([PALE + v * (255 - PALE) // 255 for v in range(256)])
    file = io.BytesIO()
    shown.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# -- what is read of runs -----------------------------------------------------------------------------


def _read_at(lens: Lens, span: Span) -> list[int]:
    """Where a lens holds a span's positions."""
    at = {position: i for i, position in enumerate(lens.positions)}
    missing = [position for position in span.positions.tolist() if position not in at]
    if missing or span.row >= lens.top_ids.shape[1]:
        raise ValueError(
            f"{span.name} stands at positions {span.positions[0]} to {span.positions[-1]} of prompt {span.row}, which this lens "
            "did not read all: ask logit_lens(..., positions=span.positions.tolist()), or for all with None"
        )
    return [at[position] for position in span.positions.tolist()]


def _short(word: str) -> str:
    """A token as a field has room for it; what is no letter to see is spelled out."""
    word = word.strip(" ") or word
    word = word if word.isprintable() and word.strip() else repr(word)[1:-1]
    return word if len(word) <= LONGEST else word[: LONGEST - 1] + "…"


def _patterns_of(cache: ActivationCache) -> list[int]:
    n = cache.cfg.n_layers
    kept = [i for i in range(n) if f"blocks.{i}.attn.hook_pattern" in cache]
    if not kept:
        raise ValueError(
            "this cache holds no pattern: run with names_filter='blocks.*.attn.hook_pattern', or without a filter"
        )
    return kept


def _of_row(value: Tensor, span: Span, cache: ActivationCache) -> Tensor:
    """A cached value in a span's prompt."""
    rows = value if cache.has_batch_dim else value[None]
    ran = cache["input_size"][0] if "input_size" in cache.derived else len(rows)
    if len(rows) != ran:
        raise ValueError(
            f"the run had {ran} prompts and this cache holds {len(rows)} of them, which does not say which: give the cache as "
            "it was, the span knows its prompt"
        )
    if span.row >= len(rows):
        raise ValueError(f"{span.name} is in prompt {span.row}; the cache holds {len(rows)}")
    return rows[span.row]


def _blocks(layer: Any) -> list[int]:
    blocks = [operator.index(i) for i in (layer if isinstance(layer, Iterable) else [layer])]
    if not blocks:
        raise ValueError("layer is empty: there is no block to draw")
    return blocks


def _one_of(number: SupportsIndex, n: int, what: str, there: str) -> int:
    """A number that may count from the end, from 0."""
    if not -n <= operator.index(number) < n:
        raise ValueError(f"{what} is {number}; {there} 0 to {n - 1}")
    return operator.index(number) % n


def _query(cache: ActivationCache, span: Span, position: SupportsIndex | str, pos: int) -> int:
    """A position's number in the padded row."""
    _within(span, pos)
    if isinstance(position, str):
        if position != "last":
            raise ValueError(f"position is {position!r}; use 'last' or a number")
        mask = _of_row(torch.as_tensor(cache["attention_mask"]), span, cache)
        return int(mask.bool().nonzero().max())
    return _one_of(position, pos, "position", "the prompt has positions")


def _check_row(span: Span, rows: int, what: str) -> None:
    if span.row >= rows:
        raise ValueError(f"{span.name} is in prompt {span.row}; the {what} has {rows}")


def _at(labels: Sequence[str], span: Span) -> list[str]:
    """Labels of a prompt's positions, at a span's; none beyond the end."""
    return [labels[i] if i < len(labels) else "" for i in span.positions.tolist()]


def _labels_at(span: Span, cache: ActivationCache) -> list[str]:
    labels = cache["token_labels"] if "token_labels" in cache.derived else None
    if labels is None:
        return span.labels()
    return _at(labels[span.row] if cache.has_batch_dim else labels, span)


def _token_at(cache: ActivationCache, span: Span, position: int) -> str:
    """ " (' is')", where the run's tokens are known."""
    if "token_labels" not in cache.derived:
        return ""
    labels = cache["token_labels"]
    label = (labels[span.row] if cache.has_batch_dim else labels)[position]
    return "" if label == str(position) else f" ({label!r})"


def _check_labels(span: Span, found: Sequence[str], what: str) -> None:
    """Refuse a run of another call: what stood at a span's positions is known by name."""
    wrong = [
        (i, a, b)
        for i, a, b in zip(span.positions.tolist(), found, span.labels(), strict=True)
        if a != b
    ]
    if wrong:
        position, there, here = wrong[0]
        raise ValueError(
            f"position {position} is {here} of prompt {span.row}, and {there!r} in this {what}: this span is of another call"
        )


def _check_numbered(span: Span, labels: Sequence[str] | None) -> None:
    """Of an attribution, whose labels are "3 image[0] (1, 0)" of a single prompt and else "3"."""
    if labels is not None and any(" " in label for label in labels):
        _check_labels(span, [at.partition(" ")[2] for at in _at(labels, span)], "attribution")


def _within(span: Span, pos: int) -> None:
    if int(span.positions.max()) >= pos:
        raise ValueError(
            f"{span.name} stands up to position {int(span.positions.max())}, and {pos} positions were kept: this span is of "
            "another call"
        )


# -- who sees whom ------------------------------------------------------------------------------------


def visible(
    model: HookedModel, tensors: Mapping[str, Any], kind: str, rule: Any
) -> Bool[Tensor, "batch pos kv_pos"]:
    ids, types = tensors.get("input_ids"), tensors.get("mm_token_type_ids")
    first = tensors.get("inputs_embeds") if ids is None else ids
    assert first is not None
    if types is None and ids is not None:
        types = torch.zeros_like(ids)
        for medium in MEDIA:
            token = getattr(model.cfg, medium.token)
            types = types if token is None else types.masked_fill(ids == token, medium.type)
    padding = tensors.get("attention_mask")
    padding = None if padding is None else padding.bool()
    batch, pos = first.shape[:2]
    masks = attention_masks(model.cfg, batch, pos, first.device, padding, types, rule)
    return masks[kind].seen()[:, 0].expand(batch, pos, pos).cpu()


def _kinds(visible: Bool[Tensor, "pos kv_pos"], window: int | None) -> Tensor:
    """Which of `KINDS` each key is to each query."""
    places = torch.arange(len(visible))
    back = places[:, None] - places[None]  # how far the key lies behind the query
    kinds = torch.full(visible.shape, PAST)
    kinds[back < 0] = AHEAD
    if window is not None:
        kinds[back >= window] = FAR
    return kinds.masked_fill(~visible, HIDDEN)


def _rule_says(model: HookedModel, rule: str, kinds: Tensor, window: int | None) -> str:
    ahead, far = (int((kinds == kind).sum()) for kind in (AHEAD, FAR))
    own = " (this model's)" if model.image_mask == rule else ""
    inside = ", inside an image" if model.cfg.bidirectional == "vision" else ""
    says = [f"{ahead:,} pairs see ahead{inside}" if ahead else "nothing is seen ahead"]
    if window is not None:
        says.append(f"{far:,} reach beyond the window" if far else "none beyond the window")
    return f"'{rule}'{own}: {'; '.join(says)}"


def _ticks(names: Sequence[str], spans: Sequence[Span], padding: set[int]) -> dict[int, str]:
    """Names on the axes: of all positions, or of media and as many other real ones as have room."""
    if len(names) * LETTER <= overlays.PANEL:
        return dict(enumerate(names))
    unnamed = padding | {int(position) for span in spans for position in span.positions}
    ticks = {int(span.positions[len(span) // 2]): span.name for span in spans}
    room = len(names) * LETTER / overlays.PANEL
    for i, name in enumerate(names):
        if i not in unnamed and all(abs(i - other) >= room for other in ticks):
            ticks[i] = name
    return dict(sorted(ticks.items()))


__all__ = [
    "ablation_over",
    "as_seen",
    "attention_over",
    "attribution_over",
    "lens_grid",
    "mask_picture",
    "over_picture",
    "save_png",
]
