"""What a map changes: units of a kind or by name, and what takes their place, as one intervention each.

`maps`, `knockouts`, estimates and circuits are made of these.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4 import interventions, sweep
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.identities import plain
from lens_gemma4.interventions import SQUARES, Edit, Intervention, Place, Unit
from lens_gemma4.spans import Box, Size, Span, media_labels, spans_of

PICTURES = ("patches", "images")
_ROWS = (Place(0, "hook_resid_pre"),)  # where rows of image tokens enter
CHUNK = 16  # prompts of a reference that run at a time

# How a unit is changed at some positions; whether it brought these decides what its mean goes over.
Change = Callable[["Chosen", Tensor | None], Intervention]


def changes(
    model: HookedModel,
    tensors: Mapping[str, Any],
    units: str | Sequence[Any] = "heads",
    layers: Any = None,
    mode: Any = "zero",
    positions: Any = "all",
    *,
    reference: Any = None,
    per_position: bool = False,
    skip_first: bool = True,
    seed: int = 0,
    within: Any = None,
) -> list[Intervention]:
    """What `ablate` runs, one intervention for each unit (and position): to be joined by `&`, or run by `sweep`.

    Args:
        tensors: a prepared call's, `model.prepare(...)`.
        units, layers, mode, positions, reference, per_position, skip_first, seed, within: as in `ablate`.
    """
    chosen = places(model, tensors, units, layers, positions)
    given = Reference(model, tensors, reference, per_position, skip_first, seed)
    basis = None if within is None else basis_of(model, within, chosen)
    change = change_of(given, mode, chosen, basis, draw=0)
    return everywhere(chosen, change, tensors, positions)


# -- units --------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """A unit, and the positions that it consists of, where it does.

    Args:
        spans: the images that its positions were found in, of whichever call it was made for.
    """

    unit: Unit
    where: Bool[Tensor, "batch pos"] | None = None
    spans: tuple[Span, ...] = ()

    def __str__(self) -> str:
        return self.unit.name

    def __and__(self, other: Chosen) -> Chosen:  # type: ignore[override]
        """Both as one.

        Raises:
            ValueError: one of them alone stands at positions of its own, as a region does and a head does not; they overlap.
        """
        if self.where is None and other.where is None:
            return Chosen(self.unit & other.unit)
        if self.where is None or other.where is None:
            raise ValueError(f"{self} and {other} are of two kinds: change them as two units")
        unit = Unit(f"{self} & {other}", self.unit.places, {})
        return Chosen(unit, self.where | other.where, self.spans + other.spans)


def places(
    model: HookedModel, tensors: Mapping[str, Any], units: Any, layers: Any, positions: Any
) -> list[Chosen]:
    """Units of a kind or by name that this model and these prompts have.

    Args:
        positions: "all" and "each" are where a unit stands, of one that brings its positions.
    """
    own = isinstance(positions, str) and positions in ("all", "each")
    if isinstance(units, str) and units in PICTURES:
        if layers is not None or not own:
            raise ValueError(
                f"{units} stand at positions of their own, before block 0: leave out layers and positions"
            )
        return list(picture_units(model, tensors, units))
    found = _chosen(model, tensors, units, layers)
    placed = [one for one in found if one.where is not None]
    if placed and not own:
        raise ValueError(f"{placed[0]} stands at positions of its own: leave out positions")
    for one in placed:
        _check_of_this_call(model, tensors, one)
    for one in found:
        for place in one.unit.places:
            model.hook_point(place.hook)
    if not found:
        raise ValueError("units is empty: there is nothing to change")
    names = [one.unit.name for one in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"units holds {twice} twice")
    return found


def _chosen(
    model: HookedModel, tensors: Mapping[str, Any], units: Any, layers: Any
) -> list[Chosen]:
    """Units by kind or name, and those that bring their positions."""
    if isinstance(units, str) and not units.startswith("image["):
        return [Chosen(unit) for unit in interventions.units_from(units, model.cfg, layers)]
    if layers is not None:
        raise ValueError("layers goes with a kind of units, not with units chosen by name")
    pictures: dict[str, Chosen] = {}

    def named(name: str) -> Chosen:
        if not name.startswith("image["):
            return Chosen(interventions.unit_named(name, model.cfg))
        if not pictures:
            for kind in PICTURES:
                pictures.update({one.unit.name: one for one in picture_units(model, tensors, kind)})
        if name not in pictures:
            raise ValueError(f"the prompts hold no {name}")
        return pictures[name]

    def one(item: Any) -> Chosen:
        """A unit, or several as one."""
        if isinstance(item, Chosen):
            return item
        if isinstance(item, Unit):
            return Chosen(item)
        parts = [part.strip() for part in item.split("&")] if isinstance(item, str) else list(item)
        if not parts:
            raise ValueError("a unit is an empty list: there is nothing to change")
        if isinstance(item, str):
            return functools.reduce(operator.and_, map(named, parts))
        return functools.reduce(operator.and_, map(one, parts))

    return [one(item) for item in _listed(units)]


def _listed(units: Any) -> list[Any]:
    return [units] if isinstance(units, (Chosen, Unit, str)) else list(units)


def _check_of_this_call(model: HookedModel, tensors: Mapping[str, Any], chosen: Chosen) -> None:
    """Refuse a region of other prompts, whose pictures stand elsewhere or are of another size."""
    assert chosen.where is not None
    here = {
        (s.row, s.number): s for s in _images(model, tensors) if _named_in(chosen.spans, s.number)
    }
    of = {(s.row, s.number): s for s in chosen.spans}
    ids = tensors["input_ids"]
    if (
        chosen.where.shape != ids.shape
        or here.keys() != of.keys()
        or any(_differ(here[key], of[key]) for key in of)
    ):
        raise ValueError(
            f"{chosen} was made for another call, in which the pictures stand elsewhere or are of another size: make it for "
            "the inputs that are run, region(model, inputs, box)"
        )


def _named_in(spans: Sequence[Span], number: int) -> bool:
    return any(span.number == number for span in spans)


def _differ(one: Span, other: Span) -> bool:
    sizes: list[Size | None] = [one.size, other.size]
    return (
        one.positions.tolist() != other.positions.tolist()
        or one.labels() != other.labels()
        or (None not in sizes and sizes[0] != sizes[1])
    )


def picture_units(model: HookedModel, tensors: Mapping[str, Any], kind: str) -> Iterator[Chosen]:
    """Rows of image tokens as they enter block 0: by patch, "image[0] (x, y)", or by image; images are counted in each prompt.

    Raises:
        ValueError: there is no image in the prompts.
    """
    pictures = _images(model, tensors)
    if not pictures:
        raise ValueError(
            f"units is {kind!r}; the prompts hold no image, and frames and sound are no units of their own: change their rows "
            "by units='resid_pre', layers=0, positions=span.positions"
        )
    ids = tensors["input_ids"]
    where: dict[tuple[int, ...], Tensor] = {}
    for span in pictures:
        assert span.grid is not None
        for position, place in zip(span.positions.tolist(), span.grid.tolist(), strict=True):
            key = (span.number, *place) if kind == "patches" else (span.number,)
            mask = where.setdefault(key, torch.zeros_like(ids, dtype=torch.bool))
            mask[span.row, position] = True
    for key, mask in sorted(where.items(), key=lambda one: _reading_order(one[0])):
        name = f"image[{key[0]}]" + (f" ({key[1]}, {key[2]})" if len(key) > 1 else "")
        axes = dict(zip(("image", "x", "y"), key, strict=False))
        spans = tuple(span for span in pictures if span.number == key[0])
        yield Chosen(Unit(name, _ROWS, axes), mask, spans)


def region(
    model: HookedModel,
    tensors: Mapping[str, Any],
    box: Box,
    image: int = 0,
    size: Size | None = None,
) -> Chosen:
    """The image tokens that a box of a picture covers, as one unit: `ablate(..., units=[region(...)])`.

    It is of this call alone, and refused where another call's pictures stand elsewhere.

    Args:
        tensors: a prepared call's, `model.prepare(text, images=...)`, which knows the pictures' sizes.
        box: left, top, right and bottom in the original picture's pixels; patches that it touches are meant.
        image: which of each prompt's images; prompts without it are left as they are, and are nan in results.
        size: width and height of the pictures, where only a processor's output was given, which does not tell.
    Raises:
        ValueError: no prompt has it; a box without area or outside a picture; sizes that are not known.

    >>> from PIL import Image
    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> picture = Image.new("RGB", (192, 144))
    >>> inputs = model.prepare(f"{model.image_token} is", images=picture, image_tokens=70)
    >>> region(model, inputs, (20, 20, 100, 100)).unit.name
    'image[0] in (20, 20, 100, 100)'
    """
    where = torch.zeros_like(tensors["input_ids"], dtype=torch.bool)
    spans = _numbered(model, tensors, image)
    for span in spans:
        where[span.row, span.positions[span.tokens_in(box, size)]] = True
    sides = ", ".join(f"{side:g}" for side in box)
    unit = Unit(f"image[{image}] in ({sides})", _ROWS, {"image": image})
    return Chosen(unit, where, tuple(spans))


@torch.no_grad()
def swapped(
    model: HookedModel, tensors: Mapping[str, Any], image: int = 0, other: int = 1
) -> Intervention:
    """Two images of each prompt in each other's places: for `sweep`, or its `hooks()` for `run_with_hooks`.

    The rows of the stream are swapped as they enter block 0, so everything between and around them stays.

    Args:
        tensors: a prepared call's, `model.prepare(text, images=...)`.
        image, other: which of each prompt's images; prompts with neither are left as they are.
    Raises:
        ValueError: no prompt has them, or a prompt has one of them alone; they have different numbers of tokens.

    >>> from PIL import Image
    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> two = [Image.new("RGB", (192, 144), colour) for colour in ("red", "blue")]
    >>> inputs = model.prepare(f"{model.image_token} or {model.image_token}", images=two, image_tokens=70)
    >>> changed = model.run_with_hooks(inputs, fwd_hooks=swapped(model, inputs).hooks())
    >>> bool((changed - model(inputs)).abs().max() > 0.01)
    True
    """
    ones, others = _numbered(model, tensors, image), _numbered(model, tensors, other)
    rows = [[span.row for span in spans] for spans in (ones, others)]
    if rows[0] != rows[1]:
        raise ValueError(
            f"image[{image}] is in prompts {rows[0]} and image[{other}] in {rows[1]}: both are needed to swap them"
        )
    stream = model.forward(**tensors, stop_at_layer=0)
    assert isinstance(stream, Tensor)
    instead, where = stream.clone(), torch.zeros_like(tensors["input_ids"], dtype=torch.bool)
    for one, two in zip(ones, others, strict=True):
        if len(one) != len(two):
            raise ValueError(
                f"{one.name} of prompt {one.row} has {len(one)} tokens and {two.name} {len(two)}: images that are swapped "
                "must have as many, as pictures of one shape have"
            )
        for to, of in ((one, two), (two, one)):
            instead[one.row, to.positions] = stream[one.row, of.positions]
            where[one.row, to.positions] = True
    name = f"image[{image}] <-> image[{other}]"
    return Intervention(name, (Edit(_ROWS[0], where, add=instead),))


def _images(model: HookedModel, tensors: Mapping[str, Any]) -> list[Span]:
    return [span for span in spans_of(model, tensors) if span.kind == "image"]


def _numbered(model: HookedModel, tensors: Mapping[str, Any], number: int) -> list[Span]:
    """One image of each prompt that has it."""
    images = _images(model, tensors)
    found = [span for span in images if span.number == number]
    if not found:
        most = max((span.number + 1 for span in images), default=0)
        raise ValueError(f"there is no image[{number}]: the prompts hold {most} images at most")
    return found


def _reading_order(key: tuple[int, ...]) -> tuple[int, ...]:
    """By image, then row by row."""
    return (key[0], key[2], key[1]) if len(key) > 1 else key


def everywhere(
    chosen: Sequence[Chosen], change: Change, tensors: Mapping[str, Any], positions: Any
) -> list[Intervention]:
    """Each unit changed at the positions meant, or at each in turn; one that brings its positions is changed there."""
    real = real_of(tensors)
    each = isinstance(positions, str) and positions == "each"
    at = None if each else interventions.position_mask(positions, real)
    changed: list[Intervention] = []
    for one in chosen:
        if one.where is None and each:
            shape = (len(real), real.shape[1], real.device)
            changed += interventions.at_each_position([change(one, None)], *shape)
        else:
            changed.append(change(one, at if one.where is None else one.where))
    return changed


def lacking(
    chosen: Sequence[Chosen], names: Sequence[str], batch: int
) -> Bool[Tensor, "variant batch"] | None:
    """Which prompts lack what a variant changes, as those without a picture lack its patches; None where none lacks any."""
    without = {str(c): ~c.where.any(1).cpu() for c in chosen if c.where is not None}
    has = torch.zeros(batch, dtype=torch.bool)
    found = torch.stack([without.get(name, has) for name in names])
    return found if bool(found.any()) else None


def basis_of(model: HookedModel, within: Any, chosen: Sequence[Chosen]) -> Float[Tensor, "k d"]:
    """Orthonormal rows that span directions in the units' last axis."""
    basis = interventions.span(within).to(model.device)
    for place in (place for c in chosen for place in c.unit.places):
        if place.point in SQUARES:
            raise ValueError(f"within is of directions in activations; {place.hook} is a pattern")
        width = shape_of(model, place, 1, 1)[-1]
        if place.point == "mlp.hook_post" and place.unit is not None:
            raise ValueError("within is of directions; a neuron is a number")
        if basis.shape[1] != width:
            raise ValueError(
                f"within has directions of {basis.shape[1]} numbers; {place.hook} has {width}"
            )
    return basis


def shape_of(model: HookedModel, place: Place, batch: int, pos: int) -> tuple[int, ...]:
    """Of a unit's value, `[batch pos ...]`."""
    layer = model.cfg.layer(place.layer)
    kv = (
        "rot_k" in place.point
        or "v_norm" in place.point
        or place.point in ("attn.hook_k", "attn.hook_v")
    )
    heads = layer.n_key_value_heads if kv else layer.n_heads
    if place.point in SQUARES:
        whole: tuple[int, ...] = (batch, heads, pos, pos)
    elif place.point.startswith("attn."):
        whole = (batch, pos, heads, layer.d_head)
    else:
        whole = (batch, pos, layer.d_mlp if place.point == "mlp.hook_post" else model.cfg.d_model)
    return tuple(place.of(torch.empty(whole, device="meta")).shape)


def hooks_of(chosen: Sequence[Chosen]) -> list[str]:
    return sorted({place.hook for c in chosen for place in c.unit.places})


# -- what takes a unit's place ------------------------------------------------------------------------


class Reference:
    """Prompts that values are taken from."""

    def __init__(
        self,
        model: HookedModel,
        tensors: Mapping[str, Any],
        reference: Any,
        per_position: bool,
        skip_first: bool,
        seed: int,
    ) -> None:
        self.model, self.tensors, self.seed = model, tensors, seed
        self.own = reference is None
        self.given = tensors if reference is None else model.prepare(reference)
        self.per_position, self.skip_first = per_position, skip_first

    def means(self, chosen: Sequence[Chosen]) -> dict[str, dict[str, Tensor]]:
        """For each unit, by its name, the means of its points, `[1 1 ...]` or by position `[1 pos ...]`.

        Those of units that bring their positions go over images alone, whatever stands beside them.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for placed in (False, True):
            some = [one for one in chosen if (one.where is not None) == placed]
            if some:
                found |= dict.fromkeys(map(str, some), self._means(some, placed))
        return found

    def _means(self, chosen: Sequence[Chosen], placed: bool) -> dict[str, Tensor]:
        squares = {p.hook for c in chosen for p in c.unit.places if p.point in SQUARES}
        if squares and not self.per_position:
            raise ValueError(
                "a mean of patterns over positions would read what comes later: use per_position=True"
            )
        weight = self._counted(placed)
        if self.per_position:
            same_length(self.given, self.tensors, "a mean by position")
            if placed:  # every prompt's value goes into every other's, where it has an image
                every = [range(len(weight))] * len(self.tensors["input_ids"])
                same_patches(self.model, self.given, self.tensors, chosen, every, words=True)
            else:
                weight = real_of(self.given).bool()
        dims = (0,) if self.per_position else (0, 1)
        count = weight.sum(dims)
        if placed:
            asked = functools.reduce(operator.or_, (c.where.any(0) for c in chosen))  # type: ignore[union-attr]
            if not bool((count[asked] if self.per_position else count).all()):
                raise ValueError(
                    "a mean of an image's rows goes over image tokens, and the reference holds none (by position: none there): "
                    "give prompts with images"
                )
            count = count.clamp(min=1)  # by position: where no unit stands nothing is replaced
        elif not bool((count > 0).all()):
            raise ValueError(
                "a mean needs tokens to go over: pads are left out, and each first token unless skip_first=False"
            )
        total: dict[str, Tensor] = {}
        for rows, part in self._chunks():
            for name, value in kept_values(self.model, part, chosen).items():
                value = value.transpose(1, 2) if name in squares else value
                counted = weight[rows].reshape(*weight[rows].shape, *[1] * (value.ndim - 2))
                summed = torch.where(counted, value.double(), 0.0).sum(dims)
                total[name] = total.get(name, 0.0) + summed
        lead = (None,) if self.per_position else (None, None)
        found = {}
        for name, value in total.items():
            per = count.reshape(*count.shape, *[1] * (value.ndim - count.ndim))
            mean = (value / per)[lead].to(self.model.dtype)
            found[name] = mean.transpose(1, 2) if name in squares else mean
        return found

    def _counted(self, placed: bool) -> Bool[Tensor, "batch pos"]:
        """The tokens that a mean over positions goes over: of units that bring their positions, those of images."""
        real = real_of(self.given).bool()
        if placed:
            return real & (self.given["input_ids"] == self.model.cfg.image_token_id)
        return real & (real.long().cumsum(1) > 1) if self.skip_first else real

    def _chunks(self) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Some prompts at a time; with media, which are not told apart by row, all at once."""
        batch = len(self.given["input_ids"])
        if any(v is not None and name not in sweep.BY_ROW for name, v in self.given.items()):
            yield slice(0, batch), dict(self.given)
            return
        for i in range(0, batch, CHUNK):
            rows = slice(i, min(i + CHUNK, batch))
            yield (
                rows,
                sweep.of_rows(self.given, rows),
            )

    def drawn(self, chosen: Sequence[Chosen], draw: int) -> dict[str, Tensor]:
        """Each point in another prompt, at the same position, one for each prompt."""
        same_length(self.given, self.tensors, "resampling")
        n, wanted = len(self.given["input_ids"]), len(self.tensors["input_ids"])
        generator = torch.Generator().manual_seed(self.seed + draw)
        if self.own:
            if n < 2:
                raise ValueError("resampling needs other prompts: give several, or a reference")
            # A random order in which each takes the next one's: nobody takes its own.
            order = torch.randperm(n, generator=generator)
            rows = torch.empty_like(order)
            rows[order] = order.roll(1)
        else:
            rows = torch.randint(n, (wanted,), generator=generator)
        rows = rows.to(self.model.device)
        lost = real_of(self.tensors).bool() & ~real_of(self.given).bool()[rows]
        if bool(lost.any()):
            raise ValueError(
                f"resampling puts a position's value into the same position: prompts {lost.any(1).nonzero()[:, 0].tolist()} have "
                "tokens where those drawn for them have padding; use prompts of one length"
            )
        same_patches(self.model, self.given, self.tensors, chosen, [[row] for row in rows.tolist()])
        return {
            name: value[rows] for name, value in kept_values(self.model, self.given, chosen).items()
        }


def change_of(
    given: Reference, mode: Any, chosen: Sequence[Chosen], basis: Tensor | None, draw: int
) -> Change:
    """How a unit is changed, for a mode."""
    if isinstance(mode, str):
        if mode not in ("zero", "mean", "resample"):
            raise ValueError(
                f"mode is {mode!r}; use 'zero', 'mean', 'resample', a number to multiply by or a tensor"
            )
        if mode == "zero":
            return lambda one, at: interventions.scaled(one.unit, 0.0, at, basis)
        if mode == "mean":
            means = given.means(chosen)
            return lambda one, at: interventions.replaced(one.unit, means[str(one)], at, basis)
        drawn = given.drawn(chosen, draw)
        return lambda one, at: interventions.replaced(one.unit, drawn, at, basis)
    if isinstance(mode, (list, tuple)) or mode is None:
        raise ValueError(f"mode is {mode!r}; for values of your own give a tensor")
    value = torch.as_tensor(mode)
    if value.ndim:
        wide = {c.unit.name: _fitted(given, value, c.unit) for c in chosen}
        return lambda one, at: interventions.replaced(one.unit, wide[str(one)], at, basis)
    return lambda one, at: interventions.scaled(one.unit, float(value), at, basis)


def _fitted(given: Reference, value: Tensor, unit: Unit) -> Tensor:
    """A value in place of a unit's, with all its axes.

    Raises:
        ValueError: it does not broadcast over them.
    """
    batch, pos = given.tensors["input_ids"].shape
    for place in unit.places:
        shape = shape_of(given.model, place, batch, pos)
        try:
            value = value.broadcast_to(shape)
        except RuntimeError:
            raise ValueError(
                f"mode is {list(value.shape)}; it takes the place of {unit.name}, which is {list(shape)} [batch pos ...]"
            ) from None
    return value


def kept_values(
    model: HookedModel, tensors: Mapping[str, Any], chosen: Sequence[Chosen]
) -> Mapping[str, Tensor]:
    last = max(place.layer for c in chosen for place in c.unit.places)
    return model.run_and_store(**tensors, names_filter=hooks_of(chosen), stop_at_layer=last + 1)[1]


def real_of(tensors: Mapping[str, Any]) -> Int[Tensor, "batch pos"]:
    ids, mask = tensors.get("input_ids"), tensors.get("attention_mask")
    if ids is None:
        raise ValueError("this needs prompts with ids: give text, ids or a processor's output")
    return torch.ones_like(ids) if mask is None else mask.long().expand_as(ids)


def same_shape(given: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    sizes = [list(t["input_ids"].shape) for t in (given, base)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"one is {sizes[0]} and the other {sizes[1]} [batch pos]: patching puts a position into the same position, so "
            "they must have the same shape"
        )
    unlike = (real_of(given) != real_of(base)).any(1).nonzero()[:, 0].tolist()
    if unlike:
        lengths = [real_of(t)[unlike[0]].sum().item() for t in (given, base)]
        raise ValueError(
            f"prompt {unlike[0]} has {lengths[0]} tokens in one and {lengths[1]} in the other, or padding elsewhere: patching puts a "
            "position into the same position, so both must have tokens at the same places"
        )


def same_patches(
    model: HookedModel,
    given: Mapping[str, Any],
    base: Mapping[str, Any],
    chosen: Sequence[Chosen],
    rows: Sequence[Sequence[int]] | None = None,
    words: bool = False,
) -> None:
    """Refuse values of images that would be put where another patch stands, or that are a word's.

    Args:
        given, base: where values come from, and where they go to, into the same positions.
        rows: for each prompt of `base`, those of `given` that it gets values of; the same by default.
        words: words are left out by who asks.
    Raises:
        ValueError: names the first patch that differs. An image as a whole may be of another shape, of as many tokens.
    """
    if all(one.where is None for one in chosen):
        return
    rows = [[row] for row in range(len(base["input_ids"]))] if rows is None else rows
    here, there = (
        [media_labels(spans_of(model, tensors), row) for row in range(len(tensors["input_ids"]))]
        for tensors in (base, given)
    )
    for one in (one for one in chosen if one.where is not None):
        whole = str(one).endswith("]")  # "image[0]"
        assert one.where is not None
        for row, position in one.where.nonzero().tolist():
            for other in rows[row]:
                names = [by.get(position, "text") for by in (here[row], there[other])]
                if words and names[1] == "text":
                    continue
                if len({name.split(" ")[0] if whole else name for name in names}) > 1:
                    raise ValueError(
                        f"{one} of prompt {row} would get values of {names[1]} in place of {names[0]}, since they stand at the "
                        "same position: use prompts whose pictures have the same places and shapes"
                    )


def same_length(given: Mapping[str, Any], base: Mapping[str, Any], what: str) -> None:
    sizes = [t["input_ids"].shape[1] for t in (given, base)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{what} needs prompts of one length: the reference has {sizes[0]} positions, the prompts {sizes[1]}"
        )


# -- for the record -----------------------------------------------------------------------------------


def asked(units: Any, layers: Any, positions: Any) -> dict[str, Any]:
    named = units if isinstance(units, str) else [_name(unit) for unit in _listed(units)]
    return {"units": named, "layers": plain(layers), "positions": word(positions)}


def _name(unit: Any) -> Any:
    return getattr(unit, "name", None) or str(unit)


def word(positions: Any) -> Any:
    """Positions as JSON takes them."""
    return plain(positions)
