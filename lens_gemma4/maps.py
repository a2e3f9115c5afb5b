"""Ablation, patching and knockout maps: every unit of a kind changed by itself, and what that does to a metric.

`ablate` changes units of a run, `patch` puts one prompt's values into another's run, `knockout` cuts attention between
positions. They make interventions; `sweep` runs them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4 import interventions, sweep
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import SQUARES, Edit, Intervention, Place, Unit
from lens_gemma4.metrics import Measure
from lens_gemma4.results import SweepResult

PICTURES = ("patches", "images")
CHUNK = 16  # prompts of a reference that run at a time

Metrics = Measure | Sequence[Measure] | Mapping[str, Measure]
Change = Callable[[Unit, Tensor | None], Intervention]


def ablate(
    model: HookedModel,
    prompts: Any,
    metric: Metrics,
    *,
    units: str | Sequence[Any] = "heads",
    layers: Sequence[int] | None = None,
    mode: str | float | Tensor = "zero",
    positions: Any = "all",
    reference: Any = None,
    per_position: bool = False,
    skip_first: bool = True,
    draws: int = 1,
    seed: int = 0,
    within: Float[Tensor, "*k d"] | None = None,
    batch_size: int | None = None,
    save_to: Any = None,
    **inputs: Any,
) -> Any:
    """A metric without each unit.

    Args:
        model, prompts, inputs, batch_size, save_to: as in `sweep.sweep`.
        metric: `logit_difference(...)`, `log_prob(...)`, `kl_to_clean()`, ..., or a function of `Logits`; or several.
        units: "heads" (z), "kv_heads" (the query heads that read one), "queries", "keys", "values", "patterns", "neurons",
            "attn", "mlp" (what they add), "blocks" (both), "resid_pre", "resid_mid", "resid_post"; "patches", "images" (rows of
            image tokens as they enter block 0); or a list of names as in the result, "L3H2"; a list or "L3H2 & L5H0" within it is
            changed as one.
        layers: blocks, for units given by kind; all by default.
        mode: "zero"; "mean" of the unit over `reference`; "resample", the unit in another of the `reference` prompts; a number
            that the unit is multiplied by; or a tensor that takes its place, broadcasting over its `[batch pos ...]`.
        positions: where the unit is changed: "all", "last" (each row's last real token), "each" (one at a time), ints, a slice or
            a mask `[batch pos]`.
        reference: prompts that "mean" and "resample" take values from; by default the prompts themselves.
        per_position: "mean" by position, over prompts of the same padded length, in place of one mean over all positions.
        skip_first: leave each row's first token (BOS) out of a mean over positions. Pads are always left out.
        draws, seed: how many times "resample" draws a prompt for each, and from where; values are averaged.
        within: directions `[k d]` of the unit's last axis: only the part in their span is changed, so that "zero" projects it out.
    Returns:
        A `SweepResult`, variants in the order of the blocks, "L0H0", "L0H1", ...; with "each", "L0H0 @ 0", ...; for several
        metrics a dictionary of results.
    Raises:
        ValueError: no such unit, mode or position, or a reference that does not fit.

    >>> from lens_gemma4 import HookedModel, logit_difference
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ids = [model.to_single_token(word) for word in (" Paris", " Rome")]
    >>> found = ablate(model, "The capital of France is", logit_difference(*ids))
    >>> found.values.shape == (model.cfg.n_layers * model.cfg.n_heads, 1)
    True
    """
    tensors = model.prepare(prompts, **inputs)
    times = draws if isinstance(mode, str) and mode == "resample" else 1
    if times < 1:
        raise ValueError(f"draws is {draws}; at least one is needed")
    how = {"reference": reference, "per_position": per_position, "skip_first": skip_first}
    variants = []
    for draw in range(times):
        variants += changes(
            *(model, tensors, units, layers, mode, positions),
            **how,
            seed=seed + draw,
            within=within,
        )
    arguments = {
        **_asked(units, layers, positions),
        "mode": mode if isinstance(mode, (str, int, float)) else "tensor",
        "per_position": per_position,
        "skip_first": skip_first,
        "draws": draws,
        "seed": seed,
        "within": None if within is None else "directions",
        "reference": None if reference is None else "given",
    }
    found = sweep.sweep(
        model,
        None,
        variants,
        metric,
        batch_size=batch_size,
        save_to=save_to,
        arguments=arguments,
        **tensors,
    )
    return found if times == 1 else _each(found, lambda one: _averaged(one, times))


def changes(
    model: HookedModel,
    tensors: Mapping[str, Any],
    units: str | Sequence[Any] = "heads",
    layers: Sequence[int] | None = None,
    mode: str | float | Tensor = "zero",
    positions: Any = "all",
    *,
    reference: Any = None,
    per_position: bool = False,
    skip_first: bool = True,
    seed: int = 0,
    within: Float[Tensor, "*k d"] | None = None,
) -> list[Intervention]:
    """What `ablate` runs, one intervention for each unit (and position): to be joined by `&`, or run by `sweep`.

    Args:
        tensors: a prepared call's, `model.prepare(...)`.
        units, layers, mode, positions, reference, per_position, skip_first, seed, within: as in `ablate`.
    """
    chosen = _places(model, tensors, units, layers, positions)
    given = _Reference(model, tensors, reference, per_position, skip_first, seed)
    basis = None if within is None else _basis(within, chosen)
    change = _change(given, mode, chosen, basis, draw=0)
    return _everywhere(chosen, change, tensors, positions)


def patch(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    metric: Metrics,
    *,
    units: str | Sequence[Any] = "resid_pre",
    layers: Sequence[int] | None = None,
    positions: Any = "each",
    direction: Literal["denoise", "noise"] = "denoise",
    within: Float[Tensor, "*k d"] | None = None,
    batch_size: int | None = None,
    save_to: Any = None,
) -> Any:
    """A metric of one run with each unit taken from another: where is what makes the difference?

    Both prompts must have the same number of tokens: a position's value is put into the same position.

    Args:
        clean, corrupted: what `forward` takes.
        direction: "denoise" runs the corrupted prompts with values of the clean ones, "noise" the other way round.
        units, layers, positions, within, metric, batch_size, save_to: as in `ablate`.
    Returns:
        A `SweepResult` as of `ablate`; its `recovered()` says how much of the way each goes to the other run.
    Raises:
        ValueError: prompts of unlike lengths, or another direction.
    """
    if direction not in ("denoise", "noise"):
        raise ValueError(f"direction is {direction!r}; use 'denoise' or 'noise'")
    given, base = model.prepare(clean), model.prepare(corrupted)
    if direction == "noise":
        given, base = base, given
    _same_shape(given, base)
    chosen = _places(model, base, units, layers, positions)
    basis = None if within is None else _basis(within, chosen)
    kept, source = sweep.run_once(model, given, metric, _hooks(chosen))
    variants = _everywhere(
        chosen, lambda unit, at: interventions.replaced(unit, kept, at, basis), base, positions
    )
    arguments = {
        **_asked(units, layers, positions),
        "direction": direction,
        "from": given["input_ids"].tolist(),
        "within": None if within is None else "directions",
    }
    found = sweep.sweep(
        model,
        None,
        variants,
        metric,
        batch_size=batch_size,
        save_to=save_to,
        arguments=arguments,
        **base,
    )
    return _each(found, lambda one: replace(one, source=source[one.metric]))


def knockout(
    model: HookedModel,
    prompts: Any,
    metric: Metrics,
    *,
    sources: Any = "each",
    queries: Any = "all",
    units: Literal["heads", "attn"] = "heads",
    layers: Sequence[int] | None = None,
    window: int = 1,
    renormalise: bool = True,
    batch_size: int | None = None,
    save_to: Any = None,
    **inputs: Any,
) -> Any:
    """A metric when some positions cannot be read from others: attention knockout.

    Args:
        sources: positions that are not read: "each" (one at a time), "all", ints, a slice or a mask `[batch pos]`.
        queries: positions that cannot read them, likewise, or "last".
        units: "heads", each by itself, or "attn", every head of a block together.
        layers: blocks; all by default.
        window: so many blocks from each on are cut together ("attn" only).
        renormalise: what remains of the pattern sums to 1, as scores of minus infinity would have it; else the entries are set to
            zero, which takes away what was read there and leaves the rest as it was.
        model, prompts, metric, batch_size, save_to, inputs: as in `ablate`.
    Returns:
        A `SweepResult` with axes `layer`, `head`, and `source` or `pos` where these are taken one at a time. Where a query does not
        see a source, nothing is cut.
    Raises:
        ValueError: a query would see nothing at all (renormalised, it has no pattern), or a position is none.
    Source: attention knockout, Geva et al. 2023, arXiv 2304.14767.
    """
    if units not in ("heads", "attn"):
        raise ValueError(f"units is {units!r}; a knockout is of 'heads' or 'attn'")
    if window < 1 or (window > 1 and units == "heads"):
        raise ValueError(f"window is {window}; it is 1, or more with units='attn'")
    tensors = model.prepare(prompts, **inputs)
    real = _real(tensors)
    cuts = _cuts(sources, queries, real)
    kinds = _sighted(model, tensors, cuts) if renormalise else {}
    chosen = _attention_units(model, units, layers, window)
    variants = [
        _cut(model, unit, i, kinds, cuts, renormalise) for unit in chosen for i in range(len(cuts))
    ]
    arguments = {
        "sources": _word(sources),
        "queries": _word(queries),
        "units": units,
        "layers": None if layers is None else list(layers),
        "window": window,
        "renormalise": renormalise,
    }
    return sweep.sweep(
        model,
        None,
        variants,
        metric,
        batch_size=batch_size,
        save_to=save_to,
        arguments=arguments,
        **tensors,
    )


# -- units --------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """A unit, and the positions that it consists of, where it does."""

    unit: Unit
    where: Bool[Tensor, "batch pos"] | None = None


def _places(
    model: HookedModel, tensors: Mapping[str, Any], units: Any, layers: Any, positions: Any
) -> list[Chosen]:
    """Units of a kind or by name that this model and these prompts have."""
    if isinstance(units, str) and units in PICTURES:
        if layers is not None or not (isinstance(positions, str) and positions == "all"):
            raise ValueError(
                f"{units} stand at positions of their own, before block 0: leave out layers and positions"
            )
        return list(picture_units(model, tensors, units))
    found = interventions.units_from(units, model.cfg, layers)
    for unit in found:
        for place in unit.places:
            model.hook_point(place.hook)
    if not found:
        raise ValueError("units is empty: there is nothing to change")
    return [Chosen(unit) for unit in found]


def picture_units(model: HookedModel, tensors: Mapping[str, Any], kind: str) -> Iterator[Chosen]:
    """Rows of image tokens as they enter block 0: by patch, "image[0] (x, y)", or by image; images are counted in each prompt.

    Raises:
        ValueError: there is no image in the prompts.
    """
    ids, grid = tensors["input_ids"], tensors.get("image_position_ids")
    if grid is None:
        raise ValueError(f"units is {kind!r}; the prompts hold no image")
    tokens = (
        ids == model.cfg.image_token_id
    ).nonzero()  # [token (row, position)], in the features' order
    real = (grid != -1).all(-1)  # [image patch]
    image = torch.arange(len(grid), device=grid.device).repeat_interleave(real.sum(1))
    first: dict[int, int] = {}  # each row's first image
    where: dict[tuple[int, ...], Tensor] = {}
    for (row, position), i, (x, y) in zip(
        tokens.tolist(), image.tolist(), grid[real].tolist(), strict=True
    ):
        number = i - first.setdefault(row, i)
        key: tuple[int, ...] = (number, x, y) if kind == "patches" else (number,)
        mask = where.setdefault(key, torch.zeros_like(ids, dtype=torch.bool))
        mask[row, position] = True
    for key, mask in sorted(where.items(), key=lambda one: _reading_order(one[0])):
        name = f"image[{key[0]}]" + (f" ({key[1]}, {key[2]})" if len(key) > 1 else "")
        axes = dict(zip(("image", "x", "y"), key, strict=False))
        yield Chosen(Unit(name, (Place(0, "hook_resid_pre"),), axes), mask)


def _reading_order(key: tuple[int, ...]) -> tuple[int, ...]:
    """By image, then row by row."""
    return (key[0], key[2], key[1]) if len(key) > 1 else key


def _everywhere(
    chosen: Sequence[Chosen], change: Change, tensors: Mapping[str, Any], positions: Any
) -> list[Intervention]:
    """Each unit changed at the positions meant, or at each in turn."""
    real = _real(tensors)
    each = isinstance(positions, str) and positions == "each"
    at = None if each else interventions.position_mask(positions, real)
    changed = [change(unit, at if where is None else where) for unit, where in chosen]
    if not each:
        return changed
    return interventions.at_each_position(changed, len(real), real.shape[1], real.device)


def _basis(within: Tensor, chosen: Sequence[Chosen]) -> Float[Tensor, "k d"]:
    squares = [c.unit.name for c in chosen for p in c.unit.places if p.point in SQUARES]
    if squares:
        raise ValueError(f"within is of directions in activations; {squares[0]} is a pattern")
    return interventions.span(within)


# -- what takes a unit's place ------------------------------------------------------------------------


class _Reference:
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

    def means(self, chosen: Sequence[Chosen]) -> dict[str, Tensor]:
        """Each point's mean, `[1 1 ...]` or by position `[1 pos ...]`."""
        squares = {p.hook for c in chosen for p in c.unit.places if p.point in SQUARES}
        if squares and not self.per_position:
            raise ValueError(
                "a mean of patterns over positions would read what comes later: use per_position=True"
            )
        weight = self._counted(chosen)
        if self.per_position:
            _same_length(self.given, self.tensors, "a mean by position")
            weight = _real(self.given).bool()
        dims = (0,) if self.per_position else (0, 1)
        count = weight.sum(dims)
        if not bool((count > 0).all()):
            raise ValueError(
                "a mean needs tokens to go over: pads are left out, and each first token unless skip_first=False"
            )
        total: dict[str, Tensor] = {}
        for rows, part in self._chunks():
            for name, value in _kept(self.model, part, chosen).items():
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

    def _counted(self, chosen: Sequence[Chosen]) -> Bool[Tensor, "batch pos"]:
        """The tokens that a mean over positions goes over: of patches, those of images."""
        real = _real(self.given).bool()
        if any(c.where is not None for c in chosen):
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
                {n: v[rows] if isinstance(v, Tensor) else v for n, v in self.given.items()},
            )

    def drawn(self, chosen: Sequence[Chosen], draw: int) -> dict[str, Tensor]:
        """Each point in another prompt, at the same position, one for each prompt."""
        _same_length(self.given, self.tensors, "resampling")
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
        lost = _real(self.tensors).bool() & ~_real(self.given).bool()[rows]
        if bool(lost.any()):
            raise ValueError(
                f"resampling puts a position's value into the same position: prompts {lost.any(1).nonzero()[:, 0].tolist()} have "
                "tokens where those drawn for them have padding; use prompts of one length"
            )
        return {name: value[rows] for name, value in _kept(self.model, self.given, chosen).items()}


def _change(
    given: _Reference, mode: Any, chosen: Sequence[Chosen], basis: Tensor | None, draw: int
) -> Change:
    """How a unit is changed, for a mode."""
    if isinstance(mode, str):
        if mode not in ("zero", "mean", "resample"):
            raise ValueError(
                f"mode is {mode!r}; use 'zero', 'mean', 'resample', a number to multiply by or a tensor"
            )
        if mode == "zero":
            return lambda unit, at: interventions.scaled(unit, 0.0, at, basis)
        values = given.means(chosen) if mode == "mean" else given.drawn(chosen, draw)
        return lambda unit, at: interventions.replaced(unit, values, at, basis)
    if isinstance(mode, Tensor) and mode.ndim:
        return lambda unit, at: interventions.replaced(unit, mode, at, basis)
    return lambda unit, at: interventions.scaled(unit, float(mode), at, basis)


def _kept(
    model: HookedModel, tensors: Mapping[str, Any], chosen: Sequence[Chosen]
) -> Mapping[str, Tensor]:
    last = max(place.layer for c in chosen for place in c.unit.places)
    return model.run_and_store(**tensors, names_filter=_hooks(chosen), stop_at_layer=last + 1)[1]


def _hooks(chosen: Sequence[Chosen]) -> list[str]:
    return sorted({place.hook for c in chosen for place in c.unit.places})


def _real(tensors: Mapping[str, Any]) -> Int[Tensor, "batch pos"]:
    mask = tensors.get("attention_mask")
    return torch.ones_like(tensors["input_ids"]) if mask is None else mask


def _same_shape(given: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    sizes = [list(t["input_ids"].shape) for t in (given, base)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"one is {sizes[0]} and the other {sizes[1]} [batch pos]: patching puts a position into the same position, so "
            "they must have the same shape"
        )


def _same_length(given: Mapping[str, Any], base: Mapping[str, Any], what: str) -> None:
    sizes = [t["input_ids"].shape[1] for t in (given, base)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{what} needs prompts of one length: the reference has {sizes[0]} positions, the prompts {sizes[1]}"
        )


# -- attention knockout -------------------------------------------------------------------------------


class Cut(NamedTuple):
    """Queries that do not see sources."""

    queries: Bool[Tensor, "batch pos"] | None
    sources: Bool[Tensor, "batch kv_pos"] | None
    axes: dict[str, int]


def _cuts(sources: Any, queries: Any, real: Tensor) -> list[Cut]:
    found = []
    for query, at in _each_or(queries, real):
        for source, of in _each_or(sources, real):
            axes = {} if query is None else {"pos": query}
            found.append(Cut(at, of, axes | ({} if source is None else {"source": source})))
    return found


def _each_or(positions: Any, real: Tensor) -> Iterator[tuple[int | None, Tensor | None]]:
    if isinstance(positions, str) and positions == "each":
        for p in range(real.shape[1]):
            yield p, interventions.position_mask(p, real)
    else:
        yield None, interventions.position_mask(positions, real)


def _sighted(
    model: HookedModel, tensors: Mapping[str, Any], cuts: Sequence[Cut]
) -> dict[str, list[Cut]]:
    """Cuts that leave every query something to see, for each block type: a single source that is all that a query sees stays."""
    ids, real = tensors["input_ids"], _real(tensors).bool()
    stream = torch.empty(*ids.shape, model.cfg.d_model, device=ids.device, dtype=model.dtype)
    known = ("attention_mask", "position_ids", "mm_token_type_ids")
    masks, _ = model.sight(stream, ids, *(tensors.get(name) for name in known))
    found: dict[str, list[Cut]] = {}
    for kind, mask in masks.items():
        seen = mask.seen(ids.device)[:, 0]  # [rows pos kv_pos]
        for cut in cuts:
            cut_off = seen if cut.sources is None else seen & cut.sources[:, None]
            blind = real & (seen == cut_off).all(-1)
            asked = blind if cut.queries is None else blind & cut.queries
            if "source" not in cut.axes and bool(asked.any()):
                row, position = asked.nonzero()[0].tolist()
                raise ValueError(
                    f"position {position} of prompt {row} would see nothing in {kind} blocks: renormalised, it has no pattern. "
                    "Leave it out of queries, leave a source, or use renormalise=False"
                )
            queries = ~blind if cut.queries is None else cut.queries & ~blind
            found.setdefault(kind, []).append(cut._replace(queries=queries))
    return found


def _attention_units(
    model: HookedModel, units: str, layers: Any, window: int
) -> list[tuple[Unit, list[Place]]]:
    """What is cut together: a head, or the heads of some blocks."""
    found = []
    for unit in interventions.units_of(
        "patterns" if units == "heads" else "attn", model.cfg, layers
    ):
        layer = unit.axes["layer"]
        if units == "heads":
            name, blocks = f"L{layer}H{unit.axes['head']}", [layer]
        else:
            blocks = list(range(layer, min(layer + window, model.cfg.n_layers)))
            name = f"{layer}_attn" if len(blocks) == 1 else f"{layer}-{blocks[-1]}_attn"
        head = unit.places[0].unit if units == "heads" else None
        found.append(
            (Unit(name, (), unit.axes), [Place(b, "attn.hook_pattern", head) for b in blocks])
        )
    return found


def _cut(
    model: HookedModel,
    what: tuple[Unit, list[Place]],
    number: int,
    kinds: Mapping[str, Sequence[Cut]],
    cuts: Sequence[Cut],
    renormalise: bool,
) -> Intervention:
    (unit, places), axes = what, cuts[number].axes
    name = unit.name
    name += f" @ {axes['pos']}" if "pos" in axes else ""
    name += f" <- {axes['source']}" if "source" in axes else ""
    unseen = torch.tensor(torch.finfo(model.dtype).min)
    edits = []
    for place in places:
        cut = kinds[model.cfg.layer(place.layer).kind][number] if renormalise else cuts[number]
        point = "attn.hook_attn_scores" if renormalise else "attn.hook_pattern"
        add = unseen if renormalise else None
        edits.append(Edit(place._replace(point=point), cut.queries, 0.0, add, cut.sources))
    return Intervention(name, tuple(edits), unit.axes | axes)


# -- results ------------------------------------------------------------------------------------------


def _each(found: Any, change: Callable[[SweepResult], Any]) -> Any:
    """A change made to one result, or to that of each metric."""
    if isinstance(found, SweepResult):
        return change(found)
    return {name: change(one) for name, one in found.items()}


def _averaged(found: SweepResult, times: int) -> SweepResult:
    """One result of several draws, one after another."""
    n = len(found.names) // times
    values = found.values.unflatten(0, (times, n)).mean(0)
    return replace(found, names=found.names[:n], at=found.at[:n], values=values)


def _asked(units: Any, layers: Any, positions: Any) -> dict[str, Any]:
    return {
        "units": units if isinstance(units, str) else [str(unit) for unit in units],
        "layers": None if layers is None else list(layers),
        "positions": _word(positions),
    }


def _word(positions: Any) -> Any:
    """Positions as JSON takes them."""
    if isinstance(positions, Tensor):
        return positions.tolist()
    return str(positions) if isinstance(positions, slice) else positions
