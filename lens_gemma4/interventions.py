"""What may be done to a run: edits of hook points, made by kind of unit and by how they change.

An `Intervention` is some edits made together, in one variant of the run. As hooks (`hooks`) they are what
`run_with_hooks` takes; the sweep engine does the same to many variants at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from lens_gemma4.config import HookedConfig

# Points that can be edited, in the order in which a block makes them; where positions are in their axes.
POINTS = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.v_norm.hook_out",
    "attn.hook_z",
    "hook_attn_out",
    "hook_resid_mid",
    "mlp.hook_post",
    "hook_mlp_out",
    "hook_resid_post",
)
UNITS = {  # kind of unit -> (point, axis of the unit or None for the whole value)
    "heads": ("attn.hook_z", 2),
    "queries": ("attn.hook_rot_q", 2),
    "keys": ("attn.hook_rot_k", 2),
    "values": ("attn.v_norm.hook_out", 2),
    "neurons": ("mlp.hook_post", 2),
    "attn": ("hook_attn_out", None),
    "mlp": ("hook_mlp_out", None),
    "resid_pre": ("hook_resid_pre", None),
    "resid_mid": ("hook_resid_mid", None),
    "resid_post": ("hook_resid_post", None),
}


class Place(NamedTuple):
    """A hook point of a block, and one of its units: a head, a neuron; None is the whole value."""

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


@dataclass(frozen=True, eq=False)
class Edit:
    """One change: of a place, at some positions, `value -> scale * value + add`.

    Args:
        where: what is changed.
        positions: True where, `[batch pos]`; None means everywhere.
        scale: 0 removes what is there, 1 leaves it.
        add: `[...]` that broadcasts over the place's `[batch pos ...]`; with scale 0 it replaces.
    """

    where: Place
    positions: Tensor | None = None
    scale: float = 0.0
    add: Tensor | None = None

    def apply(self, value: Tensor, at: Int[Tensor, "batch chosen"] | None = None) -> Tensor:
        """Another value `[batch chosen ...]`, which stands at positions `at` of the prompts (all of them by default)."""
        unit = self.where.unit
        old = value if unit is None else value[:, :, unit]
        new = old * self.scale
        if self.add is not None:
            new = new + _standing_at(self.add.to(old), old.ndim, at)
        if self.positions is not None:
            here = _standing_at(self.positions, 2, at)
            new = torch.where(here.reshape(*here.shape, *[1] * (old.ndim - 2)), new, old)
        if unit is None:
            return new
        out = value.clone()
        out[:, :, unit] = new
        return out

    def first_position(self) -> int:
        """Before it nothing is changed by this edit itself."""
        if self.positions is None:
            return 0
        touched = self.positions.any(0).nonzero()
        return int(touched[0]) if len(touched) else self.positions.shape[1] - 1


@dataclass(frozen=True, eq=False)
class Intervention:
    """Edits made together, with a name."""

    name: str
    edits: tuple[Edit, ...]

    @property
    def stage(self) -> tuple[int, int]:
        return min(edit.where.stage for edit in self.edits)

    def first_position(self) -> int:
        return min(edit.first_position() for edit in self.edits)

    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        """What `run_with_hooks` takes to do the same."""
        return [(edit.where.hook, _hook(edit)) for edit in self.edits]

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


def units_of(kind: str, cfg: HookedConfig) -> list[tuple[str, Place]]:
    """Every unit of a kind, with its name: "L3H2", "L3KV0", "L3N17", "3_attn_out", "3_resid_pre".

    Raises:
        ValueError: no such kind.
    """
    if kind not in UNITS:
        raise ValueError(f"units is {kind!r}; known are {', '.join(map(repr, UNITS))}")
    point, axis = UNITS[kind]
    return [
        found for layer in range(cfg.n_layers) for found in _in_block(kind, point, axis, cfg, layer)
    ]


def _in_block(
    kind: str, point: str, axis: int | None, cfg: HookedConfig, layer: int
) -> Iterator[tuple[str, Place]]:
    if axis is None:
        yield f"{layer}_{point.removeprefix('hook_')}", Place(layer, point)
        return
    block = cfg.layer(layer)
    letter, number = {
        "heads": ("H", block.n_heads),
        "queries": ("Q", block.n_heads),
        "keys": ("K", block.n_key_value_heads),
        "values": ("V", block.n_key_value_heads),
        "neurons": ("N", block.d_mlp),
    }[kind]
    for unit in range(number):
        yield f"L{layer}{letter}{unit}", Place(layer, point, unit)


def scaled(name: str, where: Place, factor: float, positions: Tensor | None = None) -> Intervention:
    """A unit times a factor; 0 is zero ablation."""
    return Intervention(name, (Edit(where, positions, scale=factor),))


def replaced(
    name: str, where: Place, value: Tensor, positions: Tensor | None = None
) -> Intervention:
    """A unit with another value in its place: a mean, another prompt's, anything that broadcasts over `[batch pos ...]`."""
    return Intervention(name, (Edit(where, positions, scale=0.0, add=value),))


def added(name: str, where: Place, value: Tensor, positions: Tensor | None = None) -> Intervention:
    """A unit with something added: a steering vector."""
    return Intervention(name, (Edit(where, positions, scale=1.0, add=value),))


def at_each_position(
    interventions: Sequence[Intervention], batch: int, pos: int, device: torch.device
) -> list[Intervention]:
    """Each of them at one position at a time, position after position within each."""
    found = []
    for intervention in interventions:
        for p in range(pos):
            at = torch.zeros(batch, pos, dtype=torch.bool, device=device)
            at[:, p] = True
            edits = tuple(replace(edit, positions=at) for edit in intervention.edits)
            found.append(Intervention(f"{intervention.name} @ {p}", edits))
    return found


def position_mask(positions: Any, real: Int[Tensor, "batch pos"]) -> Tensor | None:
    """True at the positions meant: "all" (None), "last" (each row's last real token), an int, a list, a slice, or a mask.

    Args:
        real: 1 on real tokens.
    Raises:
        ValueError: another word, or a position outside the prompt.
    """
    batch, pos = real.shape
    if isinstance(positions, Tensor) and positions.dtype == torch.bool:
        return positions.expand(batch, pos)
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
    try:
        mask[:, [positions] if isinstance(positions, int) else positions] = True
    except IndexError:
        raise ValueError(f"positions is {positions!r}; the prompts have {pos} positions") from None
    return mask
