"""What may be done to a run: edits of hook points, made by kind of unit and by how they change.

An `Intervention` is some edits made together, in one variant of the run. As hooks (`hooks`) they are what
`run_with_hooks` takes; the sweep engine does the same to many variants at once.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4.config import HookedConfig

# Points that can be edited, in the order in which a block makes them.
POINTS = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.v_norm.hook_out",
    "attn.hook_attn_scores",
    "attn.hook_pattern",
    "attn.hook_z",
    "hook_attn_out",
    "hook_resid_mid",
    "mlp.hook_post",
    "hook_mlp_out",
    "hook_resid_post",
)
SQUARES = ("attn.hook_attn_scores", "attn.hook_pattern")  # [batch head pos kv_pos]


class Kind(NamedTuple):
    """Units of a kind: the points that each is part of, the axis that tells them apart, its letter in names."""

    points: tuple[str, ...]
    axis: str | None = None
    letter: str = ""


UNITS = {
    "heads": Kind(("attn.hook_z",), "head", "H"),
    "kv_heads": Kind(("attn.hook_z",), "kv_head", "KV"),  # the query heads that read one
    "queries": Kind(("attn.hook_rot_q",), "head", "Q"),
    "keys": Kind(("attn.hook_rot_k",), "kv_head", "K"),
    "values": Kind(("attn.v_norm.hook_out",), "kv_head", "V"),
    "patterns": Kind(("attn.hook_pattern",), "head", "P"),
    "neurons": Kind(("mlp.hook_post",), "neuron", "N"),
    "attn": Kind(("hook_attn_out",)),
    "mlp": Kind(("hook_mlp_out",)),
    "blocks": Kind(("hook_attn_out", "hook_mlp_out")),  # all that a block writes
    "resid_pre": Kind(("hook_resid_pre",)),
    "resid_mid": Kind(("hook_resid_mid",)),
    "resid_post": Kind(("hook_resid_post",)),
}
WHOLE = {"attn": "attn_out", "mlp": "mlp_out", "blocks": "block"}  # in the names of units


class Place(NamedTuple):
    """A hook point of a block, and one of its units: a head, a neuron, a group of them; None is the whole value."""

    layer: int
    point: str
    unit: int | slice | None = None

    @property
    def hook(self) -> str:
        return f"blocks.{self.layer}.{self.point}"

    @property
    def stage(self) -> tuple[int, int]:
        """When a forward pass comes by."""
        return self.layer, POINTS.index(self.point)

    @property
    def ndim(self) -> int:
        """Axes of the unit's value, `[batch pos ...]`."""
        return (4 if self.point.startswith("attn.") else 3) - isinstance(self.unit, int)

    def overlaps(self, other: Place) -> bool:
        """Whether some of a value is in both."""
        if self[:2] != other[:2] or self.unit is None or other.unit is None:
            return self[:2] == other[:2]
        ends = [
            (unit.start, unit.stop) if isinstance(unit, slice) else (unit, unit + 1)
            for unit in (self.unit, other.unit)
        ]
        return max(start for start, _ in ends) < min(stop for _, stop in ends)

    def of(self, value: Tensor) -> Tensor:
        """This unit of the whole point's value, positions second: of scores and patterns `[batch pos ... kv_pos]`."""
        value = value.transpose(1, 2) if self.point in SQUARES else value
        return value if self.unit is None else value[:, :, self.unit]


class Unit(NamedTuple):
    """What is changed as one: "L3H2", the places it is made of, and where it stands on the axes of a map."""

    name: str
    places: tuple[Place, ...]
    axes: dict[str, int]

    def __and__(self, other: Unit) -> Unit:  # type: ignore[override]
        """Both as one.

        Raises:
            ValueError: they overlap, so that a part would be changed twice.
        """
        for one in self.places:
            for two in other.places:
                if one.overlaps(two):
                    raise ValueError(
                        f"{self.name} and {other.name} both hold {one.hook}: a part would be changed twice"
                    )
        return Unit(f"{self.name} & {other.name}", (*self.places, *other.places), {})


@dataclass(frozen=True, eq=False)
class Edit:
    """One change: of a place, at some positions, `value -> scale * value + add`.

    Args:
        where: what is changed.
        positions: True where, `[batch pos]`; of scores and patterns these are the queries. None means everywhere.
        scale: 0 removes what is there, 1 leaves it.
        add: `[...]` that broadcasts over the place's `[batch pos ...]` (`Place.of`); with scale 0 it replaces.
        sources: of scores and patterns, the keys: True where, `[batch kv_pos]`; None means all.
        within: orthonormal rows; only the part of the value in their span is changed.
    """

    where: Place
    positions: Bool[Tensor, "batch pos"] | None = None
    scale: float = 0.0
    add: Tensor | None = None
    sources: Bool[Tensor, "batch kv_pos"] | None = None
    within: Float[Tensor, "k d"] | None = None

    def apply(self, value: Tensor, at: Int[Tensor, "batch chosen"] | None = None) -> Tensor:
        """Another value of the whole point, which stands at positions `at` of the prompts (all of them by default)."""
        square = self.where.point in SQUARES
        old = self.where.of(value)
        new = self._changed(old, at)
        for mask in self._masks(old, at):
            new = torch.where(mask, new, old)
        if self.where.unit is not None:
            out = (value.transpose(1, 2) if square else value).clone()
            out[:, :, self.where.unit] = new
            new = out
        return new.transpose(1, 2) if square else new

    def _changed(self, old: Tensor, at: Tensor | None) -> Tensor:
        add = None if self.add is None else _standing_at(self.add.to(old), old.ndim, at)
        if self.within is None:
            return old * self.scale if add is None else old * self.scale + add
        basis = self.within.to(old)
        inside = (old @ basis.T) @ basis
        new = old + (self.scale - 1) * inside
        return new if add is None else new + (add @ basis.T) @ basis

    def _masks(self, old: Tensor, at: Tensor | None) -> Iterator[Tensor]:
        """Where the change is made, each broadcasting over the unit's value."""
        if self.positions is not None:
            here = _standing_at(self.positions, 2, at)
            yield here.reshape(*here.shape, *[1] * (old.ndim - 2))
        if self.sources is not None:
            rows, keys = self.sources.shape
            yield self.sources.reshape(rows, *[1] * (old.ndim - 2), keys)

    def first_position(self) -> int:
        """Before it nothing is changed by this edit itself, as far as what is later is not seen."""
        return max(_first(self.positions), _first(self.sources) if self._hides else 0)

    @property
    def _hides(self) -> bool:
        """Whether what a query does not see stays so: then no query before the first source changes."""
        if self.add is None:
            return self.where.point == "attn.hook_pattern"
        low = torch.finfo(self.add.dtype).min if self.add.is_floating_point() else 0
        return self.scale == 0 and self.add.ndim == 0 and self.add.item() == low


def _first(mask: Tensor | None) -> int:
    if mask is None:
        return 0
    touched = mask.any(0).nonzero()
    return int(touched[0]) if len(touched) else mask.shape[1] - 1


@dataclass(frozen=True, eq=False)
class Intervention:
    """Edits made together.

    Args:
        name: "L3H2", "L3H2 @ 5", ...
        edits: in any order; of the same place, one after another.
        axes: where it stands on the axes of a map: `{"layer": 3, "head": 2, "pos": 5}`.
    """

    name: str
    edits: tuple[Edit, ...]
    axes: dict[str, int] = field(default_factory=dict)

    @cached_property
    def stage(self) -> tuple[int, int]:
        """When a forward pass comes by its first edit."""
        return min(edit.where.stage for edit in self.edits)

    def first_position(self) -> int:
        return min(edit.first_position() for edit in self.edits)

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        """What `run_with_hooks` takes to do the same."""
        return [(edit.where.hook, _hook(edit)) for edit in self.edits]

    def at(self, positions: Tensor | None, name: str | None = None, **axes: int) -> Intervention:
        """The same at other positions `[batch pos]`."""
        edits = tuple(replace(edit, positions=positions) for edit in self.edits)
        return Intervention(name or self.name, edits, self.axes | axes)

    def rows(self, rows: slice, batch: int) -> Intervention:
        """The same for some of the `batch` prompts."""

        def cut(value: Tensor | None, ndim: int = 2) -> Tensor | None:
            """What broadcasts over prompts stays."""
            if value is None or value.ndim < ndim or len(value) != batch:
                return value
            return value[rows]

        edits = [
            replace(
                edit,
                positions=cut(edit.positions),
                add=cut(edit.add, edit.where.ndim),
                sources=cut(edit.sources),
            )
            for edit in self.edits
        ]
        return Intervention(self.name, tuple(edits), self.axes)

    def __and__(self, other: Intervention) -> Intervention:
        """Both together."""
        return Intervention(f"{self.name} & {other.name}", (*self.edits, *other.edits))


def _standing_at(value: Tensor, ndim: int, at: Tensor | None) -> Tensor:
    """Positions `at` of what has a position axis; what broadcasts over it stays."""
    if at is None or value.ndim < ndim or value.shape[1] == 1:
        return value
    rows = torch.arange(len(value), device=value.device) if len(value) > 1 else at.new_zeros(1)
    return value[rows[:, None], at]


def _hook(edit: Edit) -> Callable[..., Tensor]:
    return lambda value, hook: edit.apply(value)


# -- units --------------------------------------------------------------------------------------------


def units_of(kind: str, cfg: HookedConfig, layers: Any = None) -> list[Unit]:
    """Every unit of a kind, block by block: "L3H2", "L3KV0", "L3N17", "3_attn_out", "3_resid_pre".

    Args:
        kind: "heads", "kv_heads" (the query heads that read one), "queries", "keys", "values", "patterns", "neurons", "attn",
            "mlp", "blocks", "resid_pre", "resid_mid", "resid_post".
        layers: blocks, all by default; -1 is the last.
    Raises:
        ValueError: no such kind, or no such block.
    """
    if kind not in UNITS:
        raise ValueError(f"units is {kind!r}; known are {', '.join(map(repr, UNITS))}")
    if isinstance(layers, int):
        layers = [layers]
    blocks = range(cfg.n_layers) if layers is None else [_block(int(i), cfg) for i in layers]
    return [unit for layer in blocks for unit in _in_block(kind, cfg, layer)]


def _block(layer: int, cfg: HookedConfig) -> int:
    if not -cfg.n_layers <= layer < cfg.n_layers:
        raise ValueError(f"there is no block {layer}: the model has {cfg.n_layers}")
    return layer % cfg.n_layers


def _in_block(kind: str, cfg: HookedConfig, layer: int) -> Iterator[Unit]:
    points, axis, letter = UNITS[kind]
    if axis is None:
        places = tuple(Place(layer, point) for point in points)
        yield Unit(f"{layer}_{WHOLE.get(kind, kind)}", places, {"layer": layer})
        return
    block = cfg.layer(layer)
    sizes = {"head": block.n_heads, "kv_head": block.n_key_value_heads, "neuron": block.d_mlp}
    group = block.n_heads // block.n_key_value_heads
    for i in range(sizes[axis]):
        chosen = slice(i * group, (i + 1) * group) if kind == "kv_heads" else i
        places = tuple(Place(layer, point, chosen) for point in points)
        yield Unit(f"L{layer}{letter}{i}", places, {"layer": layer, axis: i})


def unit_named(name: str, cfg: HookedConfig) -> Unit:
    """The unit of a name that `units_of` gives; "L3H2 & L5H0" is both as one.

    Raises:
        ValueError: no such unit.

    >>> from lens_gemma4 import HookedModel
    >>> unit_named("L3H2", HookedModel.from_pretrained("tiny").cfg).places
    (Place(layer=3, point='attn.hook_z', unit=2),)
    """
    if "&" in name:
        first, *others = (unit_named(part.strip(), cfg) for part in name.split("&"))
        for other in others:
            first = first & other
        return first
    by_letter = {kind.letter: word for word, kind in UNITS.items() if kind.letter}
    by_word = {WHOLE.get(word, word): word for word, kind in UNITS.items() if not kind.letter}
    found = re.fullmatch(r"L(\d+)([A-Z]+)\d+|(\d+)_(\w+)", name)
    layer = found and (found[1] or found[3])
    kind = found and (by_letter.get(found[2]) or by_word.get(found[4]))
    if layer is not None and kind and int(layer) < cfg.n_layers:
        for unit in _in_block(kind, cfg, int(layer)):
            if unit.name == name:
                return unit
    examples = ", ".join(next(_in_block(kind, cfg, 0)).name for kind in UNITS)
    raise ValueError(
        f"there is no unit {name!r} in this model; names are as in block 0: {examples}"
    )


def units_from(what: str | Sequence[Any], cfg: HookedConfig, layers: Any = None) -> list[Unit]:
    """Units from a kind, or from a list of names, units, or lists of these that are changed as one."""
    if isinstance(what, Unit):
        return [what]
    if isinstance(what, str) and what in UNITS:
        return units_of(what, cfg, layers)
    if layers is not None:
        raise ValueError("layers goes with a kind of units, not with units chosen by name")
    if isinstance(what, str):
        if re.match(r"L?\d", what):
            return [unit_named(what, cfg)]
        return units_of(what, cfg)  # which says what is known
    return [_one(item, cfg) for item in what]


def _one(item: Any, cfg: HookedConfig) -> Unit:
    if isinstance(item, Unit):
        return item
    if isinstance(item, str):
        return unit_named(item, cfg)
    parts = [_one(part, cfg) for part in item]
    if not parts:
        raise ValueError("a unit is an empty list: there is nothing to change")
    return functools.reduce(operator.and_, parts)


# -- how a unit is changed ----------------------------------------------------------------------------


def scaled(
    unit: Unit,
    factor: float,
    positions: Tensor | None = None,
    within: Tensor | None = None,
) -> Intervention:
    """A unit times a factor; 0 is zero ablation."""
    edits = [Edit(place, positions, scale=factor, within=within) for place in unit.places]
    return Intervention(unit.name, tuple(edits), unit.axes)


def replaced(
    unit: Unit,
    value: Tensor | Mapping[str, Tensor],
    positions: Tensor | None = None,
    within: Tensor | None = None,
) -> Intervention:
    """A unit with another value in its place: a mean, another prompt's.

    Args:
        value: of the whole points, by hook name, as in a cache; or of the unit alone, anything that broadcasts over its
            `[batch pos ...]`.
    """
    values = [
        place.of(value[place.hook]) if isinstance(value, Mapping) else value
        for place in unit.places
    ]
    edits = [
        Edit(place, positions, scale=0.0, add=new, within=within)
        for place, new in zip(unit.places, values, strict=True)
    ]
    return Intervention(unit.name, tuple(edits), unit.axes)


def added(unit: Unit, value: Tensor, positions: Tensor | None = None) -> Intervention:
    """A unit with something added: a steering vector."""
    edits = [Edit(place, positions, scale=1.0, add=value) for place in unit.places]
    return Intervention(unit.name, tuple(edits), unit.axes)


def at_each_position(
    interventions: Sequence[Intervention], batch: int, pos: int, device: torch.device
) -> list[Intervention]:
    """Each of them at one position at a time, position after position within each."""
    masks = torch.eye(pos, dtype=torch.bool, device=device)[:, None].expand(pos, batch, pos)
    return [
        one.at(masks[p], f"{one.name} @ {p}", pos=p) for one in interventions for p in range(pos)
    ]


def span(directions: Any) -> Float[Tensor, "k d"]:
    """Orthonormal rows with the same span.

    Raises:
        ValueError: a direction of no length, not finite, or one that follows from the others.
    """
    rows = torch.atleast_2d(torch.as_tensor(directions).detach()).double()
    if not rows.numel():
        raise ValueError(f"there are no directions in {list(rows.shape)}")
    norms = rows.norm(dim=1, keepdim=True)
    if not bool(rows.isfinite().all()) or not bool((norms > 0).all()):
        raise ValueError("a direction must be finite and have a length")
    rank = int(torch.linalg.matrix_rank(rows / norms))
    if rank < len(rows):
        raise ValueError(
            f"{len(rows)} directions span only {rank} dimensions: leave out what follows from others"
        )
    return torch.linalg.qr((rows / norms).T)[0].T


def position_mask(positions: Any, real: Int[Tensor, "batch pos"]) -> Tensor | None:
    """True at the positions meant: "all" (None), "last" (each row's last real token), an int, a list, a slice, or a mask.

    Args:
        real: 1 on real tokens.
    Raises:
        ValueError: another word, or a position outside the prompt.
    """
    batch, pos = real.shape
    if positions is None or (isinstance(positions, str) and positions == "all"):
        return None
    mask = torch.zeros(batch, pos, dtype=torch.bool, device=real.device)
    if isinstance(positions, str):
        if positions != "last":
            raise ValueError(
                f"positions is {positions!r}; use 'all', 'last', 'each', ints or a mask"
            )
        last = (real.bool() * torch.arange(pos, device=real.device)).argmax(-1)
        mask[torch.arange(batch, device=real.device), last] = True
        return mask
    if isinstance(positions, slice):
        mask[:, positions] = True
    else:
        mask = _chosen(positions, mask)
    if not bool(mask.any()):
        raise ValueError(f"positions is {positions!r}: none of the {pos} positions is meant")
    return mask


def _chosen(positions: Any, mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """A mask as it is, or numbers of positions, the same in every prompt."""
    batch, pos = mask.shape
    if isinstance(positions, range):
        positions = list(positions)
    given = torch.as_tensor(positions, device=mask.device)
    if given.dtype == torch.bool:
        if given.shape not in ((pos,), (1, pos), (batch, pos)):
            raise ValueError(
                f"a mask of positions is [batch pos], here {[batch, pos]}, got {list(given.shape)}"
            )
        return given.expand(batch, pos)
    if given.is_floating_point() or given.ndim > 1:
        raise ValueError(
            f"positions is {positions!r}; give whole numbers, the same in every prompt, or a mask [batch pos] of bool"
        )
    if bool((given >= pos).any()) or bool((given < -pos).any()):
        raise ValueError(f"positions is {positions!r}; the prompts have {pos} positions")
    mask[:, given.long()] = True
    return mask
