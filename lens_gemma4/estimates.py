"""Attribution patching: what a map would give, to first order, for every unit at once at the cost of a few runs.

The effect of putting another value into a unit is about the gradient of the metric there times the difference of the two
values. One backward pass has the gradients of all units; `verify` runs the largest estimates exactly.
Sources: attribution patching, Nanda 2023 and Syed et al. 2023, arXiv 2310.10348; gradients averaged on the way from one
run to the other, Hanna et al. 2024, arXiv 2403.17806.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_gemma4 import changes, interventions, maps, metrics, plans, sweep
from lens_gemma4.changes import Chosen
from lens_gemma4.gradients import (
    START,
    GradientRun,
    baselines,
    by_prompt,
    readings_of,
    shares,
    two_runs,
    wide,
)
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import SQUARES, Intervention, Place
from lens_gemma4.metrics import Metrics, Reading
from lens_gemma4.results import SweepResult


@dataclass(frozen=True, repr=False)
class Estimate(SweepResult):
    """A map's first-order estimate: a `SweepResult` whose `values` are `baseline` plus the estimated effects.

    Args:
        exact: the engine's result for the variants that were run exactly, largest estimate first; None if none was. A file of
            its own: `save` keeps the estimates alone.
        verified: which of this result's variants these are.
    """

    exact: SweepResult | None = None
    verified: tuple[int, ...] = ()

    def part(self, chosen: slice) -> Estimate:
        """Some of the variants; what was verified is of all of them, and is left out."""
        found = super().part(chosen)
        assert isinstance(found, Estimate)
        return replace(found, exact=None, verified=())

    @property
    def pairs(self) -> tuple[Float[Tensor, " variant"], Float[Tensor, " variant"]]:
        """Estimated and exact mean effects of the verified variants.

        Raises:
            ValueError: nothing was verified.
        """
        if self.exact is None:
            raise ValueError('nothing was run exactly: ask for it with verify="top 50"')
        exact = self.exact.mean()
        return self.mean()[list(self.verified)].to(exact), exact

    @property
    def spearman(self) -> float:
        """Rank correlation of estimated and exact mean effects; nan if either does not vary."""
        return _correlation(*(_ranks(values) for values in self.pairs))

    @property
    def pearson(self) -> float:
        """Correlation of estimated and exact mean effects; nan if either does not vary."""
        return _correlation(*self.pairs)

    @property
    def overlap(self) -> float:
        """Of the half of the verified variants with the largest exact |mean effect|, the share that is in the estimate's half."""
        estimated, exact = self.pairs
        half = (len(exact) + 1) // 2
        chosen = [set(v.abs().argsort(descending=True)[:half].tolist()) for v in (estimated, exact)]
        return len(chosen[0] & chosen[1]) / half

    def report(self) -> str:
        """How well the estimate ranked what was run exactly, and where it was furthest off."""
        estimated, exact = self.pairs
        worst = int((estimated - exact).abs().argmax())
        half = (len(exact) + 1) // 2
        return (
            f"{len(exact)} of {len(self.names)} variants, those with the largest estimates, were run exactly: rank correlation "
            f"{self.spearman:.2f}, correlation {self.pearson:.2f}; of the {half} largest exact effects among them "
            f"{round(self.overlap * half)} are among the {half} largest estimates. Furthest off: "
            f"{self.names[self.verified[worst]]}, estimated {estimated[worst]:+.3g}, exact {exact[worst]:+.3g}. "
            "What was not run may have large effects that the estimate missed."
        )

    def __repr__(self) -> str:
        n, batch = self.values.shape
        best = ", ".join(f"{name} {value:+.3g}" for name, value in self.top(3))
        return f"Estimate of {n} variants, {batch} prompt(s): {self.metric}; largest {best}; {len(self.verified)} run exactly"


@torch.inference_mode(False)
def attribution_patch(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    metric: Metrics,
    *,
    units: str | Sequence[Any] = "heads",
    layers: Any = None,
    positions: Any = "each",
    direction: Literal["denoise", "noise"] = "denoise",
    steps: int = 1,
    within: Any = None,
    verify: str | int | None = None,
    batch_size: int | None = None,
) -> Any:
    """First-order estimate of `patch` with the same arguments: gradient times (other run's value - base run's).

    A run of each prompt and one backward pass for each metric, however many units there are.

    Args:
        model, clean, corrupted, metric, units, layers, positions, direction, within, batch_size: as in `patch`. A
            function's number for a prompt is taken to depend on that prompt alone, unless it gives one number for all. Units
            joined by "&" or in a list are taken as the sum of their estimates.
        steps: 1 takes the gradient in the base run; more average it over so many runs whose block-0 input lies between the
            base run's and the other's, at the midpoints of equal parts of the way (integrated gradients).
        verify: "top 50" or 50 reruns exactly those with the largest |mean estimate|, for each metric.
    Returns:
        An `Estimate` (a `SweepResult`, names and axes those of `patch`), or a dictionary of them. Equal prompts give exactly 0.
    Raises:
        ValueError: a metric without a gradient (a rank; with one step, a divergence from the base run, which is at its
            minimum there), or what `patch` refuses.
    Source: arXiv 2310.10348; with steps, arXiv 2403.17806.

    >>> from lens_gemma4 import HookedModel, logit_difference
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = logit_difference(*(model.to_single_token(word) for word in (" Paris", " Rome")))
    >>> prompts = "The capital of France is", "The capital of Italy is"
    >>> found = attribution_patch(model, *prompts, ask, verify="top 10")
    >>> len(found.exact.names), found.names[0]
    (10, 'L0H0 @ 0')
    """
    count = 0 if verify is None else count_of(verify)
    given, base = two_runs(model, clean, corrupted, direction)
    job = _Job(model, base, metric, units, layers, positions, batch_size)
    job.basis = None if within is None else changes.basis_of(model, within, job.chosen)
    job.replaces = within is None
    changes.same_patches(model, given, base, job.chosen)
    hooks = sorted({*job.hooks, START}) if steps > 1 else job.hooks
    other = GradientRun(model, given, hooks).freed()
    source = baselines(model, given, other, job.measured)

    def change(one: Chosen, at: Tensor | None) -> Intervention:
        return interventions.replaced(one.unit, other.values, at, job.basis)

    gradients = job.gradients(steps, other.values.get(START))

    def difference(one: Chosen, hook: str) -> Tensor:
        return wide(other.values[hook]) - wide(gradients.values[hook])

    arguments = {
        **changes.asked(units, layers, positions),
        "estimate": f"first order, {steps} step(s)",
        "direction": direction,
        "from": given["input_ids"].tolist(),
        "within": changes.word(within),
    }
    found = job.estimates(gradients, difference, change, arguments, count)
    found = {name: _from_source(one, source[name]) for name, one in found.items()}
    return next(iter(found.values())) if metrics.is_one(metric) else found


@torch.inference_mode(False)
def attribution_ablate(
    model: HookedModel,
    prompts: Any,
    metric: Metrics,
    *,
    units: str | Sequence[Any] = "heads",
    layers: Any = None,
    mode: Any = "zero",
    positions: Any = "all",
    reference: Any = None,
    per_position: bool = False,
    skip_first: bool = True,
    within: Any = None,
    verify: str | int | None = None,
    batch_size: int | None = None,
    **inputs: Any,
) -> Any:
    """First-order estimate of `ablate` with the same arguments: gradient times (what takes its place - the value).

    A run, one backward pass for each metric, and for "mean" a run of the reference.

    Args:
        model, prompts, inputs, metric, units, layers, positions, reference, per_position, skip_first, within, batch_size: as in
            `ablate`.
        mode: "zero", "mean", or a number that the unit is multiplied by.
        verify: as in `attribution_patch`.
    Returns:
        An `Estimate`, or for several metrics a dictionary of them.
    Raises:
        ValueError: another mode, a metric without a gradient, or what `ablate` refuses.

    >>> from lens_gemma4 import HookedModel, log_prob
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = log_prob(model.to_single_token(" Paris"))
    >>> attribution_ablate(model, "The capital of France is", ask, units="mlp").names[:2]
    ['0_mlp_out', '1_mlp_out']
    """
    if mode not in ("zero", "mean") and not isinstance(mode, (int, float)):
        raise ValueError(
            f"mode is {mode!r}; an estimate is of 'zero', 'mean' or a number to multiply by: for a resample use `attribution_patch`"
        )
    count = 0 if verify is None else count_of(verify)
    job = _Job(
        model, model.prepare(prompts, **inputs), metric, units, layers, positions, batch_size
    )
    job.basis = None if within is None else changes.basis_of(model, within, job.chosen)
    taken = changes.Reference(model, job.tensors, reference, per_position, skip_first, seed=0)
    means = taken.means(job.chosen) if mode == "mean" else None
    factor = float(mode) if isinstance(mode, (int, float)) else 0.0
    job.replaces = within is None and factor == 0.0

    def change(one: Chosen, at: Tensor | None) -> Intervention:
        if means is not None:
            return interventions.replaced(one.unit, means[str(one)], at, job.basis)
        return interventions.scaled(one.unit, factor, at, job.basis)

    gradients = job.gradients()

    def difference(one: Chosen, hook: str) -> Tensor:
        value = wide(gradients.values[hook])
        return (factor - 1) * value if means is None else wide(means[str(one)][hook]) - value

    arguments = {
        **changes.asked(units, layers, positions),
        "estimate": "first order",
        "mode": mode,
        "per_position": per_position,
        "skip_first": skip_first,
        "reference": None if reference is None else taken.given["input_ids"].tolist(),
        "within": changes.word(within),
    }
    found = job.estimates(gradients, difference, change, arguments, count)
    return next(iter(found.values())) if metrics.is_one(metric) else found


Difference = Callable[[Chosen, str], Tensor]  # by how much a unit's point would change


@dataclass
class _Gradients:
    """Of each metric at each point (`of`), and the base run's values there and metrics."""

    values: dict[str, Tensor]
    readings: dict[str, Reading]
    of: dict[str, dict[str, Tensor]]


# -- a map's estimates --------------------------------------------------------------------------------


class _Job:
    """Units of a base run, and what is estimated for them."""

    def __init__(
        self,
        model: HookedModel,
        tensors: Mapping[str, Any],
        metric: Metrics,
        units: Any,
        layers: Any,
        positions: Any,
        batch_size: int | None,
    ) -> None:
        self.model, self.tensors, self.batch_size = model, tensors, batch_size
        self.measured = metrics.named(metric)
        self.chosen: list[Chosen] = changes.places(model, tensors, units, layers, positions)
        self.hooks = changes.hooks_of(self.chosen)
        self.basis: Tensor | None = None
        self.replaces = True  # with values of their own, not multiples of what is there
        real = changes.real_of(tensors)
        self.batch, self.pos = real.shape
        each = isinstance(positions, str) and positions == "each"
        self.at = None if each else interventions.position_mask(positions, real)
        # Each variant's unit by its number, and the one position where it is changed, if it is one at a time.
        self.spots: list[tuple[int, int | None]] = [
            (number, position)
            for number, one in enumerate(self.chosen)
            for position in (range(self.pos) if each and one.where is None else [None])
        ]
        sweep.check(model, [Intervention("", ())])

    def gradients(self, steps: int = 1, toward: Tensor | None = None) -> _Gradients:
        """In the base run, or averaged on the way to another."""
        run = GradientRun(self.model, self.tensors, self.hooks)
        values = run.values
        readings = readings_of(self.model, self.tensors, run.final.detach(), self.measured, steps)
        total: dict[str, dict[str, Tensor]] = {}
        for share in shares(steps):
            if steps > 1:
                run = GradientRun(self.model, self.tensors, self.hooks, toward, share)
            for left, (name, reading) in enumerate(readings.items(), 1 - len(readings)):
                found, _ = run.gradients(reading, self.hooks, keep_graph=left < 0)
                sums = total.setdefault(name, {})
                for hook, gradient in found.items():
                    gradient = wide(gradient) / steps
                    sums[hook] = sums[hook] + gradient if hook in sums else gradient
        return _Gradients(values, readings, total)

    def estimates(
        self,
        gradients: _Gradients,
        difference: Difference,
        change: changes.Change,
        arguments: Mapping[str, Any],
        count: int,
    ) -> dict[str, Estimate]:
        """For each metric, from the gradients and by how much each unit's points would change, by `change`."""
        plan = plans.record(self.model, self.tensors, self.measured, arguments)
        tokens = sweep.tokens_of(self.model, self.tensors)
        names, at = self._labels()
        found = {}
        for name, reading in gradients.readings.items():
            effect = self._effects(gradients.of[name], difference)
            baseline = reading.baseline[0]
            values = baseline + by_prompt(effect, reading).to(baseline)
            one = Estimate(names, at, values, baseline, name, None, tokens, plan)
            one = maps.without_lacking(one, self.chosen)
            found[name] = self._verified(one, change, count, arguments) if count else one
        return found

    def _labels(self) -> tuple[list[str], list[dict[str, int]]]:
        spots = [(self.chosen[number].unit, p) for number, p in self.spots]
        names = [unit.name if p is None else f"{unit.name} @ {p}" for unit, p in spots]
        return names, [u.axes | ({} if p is None else {"pos": p}) for u, p in spots]

    def _effects(
        self, gradient: Mapping[str, Tensor], difference: Difference
    ) -> Float[Tensor, "variant batch"]:
        """Gradient times difference, summed over what each variant changes."""
        by_unit = next(iter(gradient.values())).new_zeros(len(self.chosen), self.batch, self.pos)
        places: dict[tuple[str, str, bool], list[tuple[int, Place]]] = {}
        for number, chosen in enumerate(self.chosen):
            for place in chosen.unit.places:
                key = place.hook, self._felt(place, chosen.unit), chosen.where is not None
                places.setdefault(key, []).append((number, place))
        for (hook, felt, _), there in places.items():
            whole = all(place.unit is None for _, place in there)
            change = difference(self.chosen[there[0][0]], hook)  # the same for all that are there
            table = _products(gradient[felt], change, there[0][1], self.basis, whole)
            parts = [
                (n, part) for n, place in there for part in _parts(place.unit, table.shape[-1])
            ]
            rows, columns = torch.tensor(parts, device=table.device).T
            by_unit.index_add_(0, rows, table.permute(2, 0, 1)[columns])
        return self._at_positions(by_unit)

    def _felt(self, place: Place, unit: interventions.Unit) -> str:
        """Whose gradient a place's change is felt by: of a block replaced as a whole, what the attention adds does not reach the
        stream through the MLP, whose output is given, but beside it."""
        beside = Place(place.layer, "hook_mlp_out")
        if self.replaces and place == Place(place.layer, "hook_attn_out") and beside in unit.places:
            return beside.hook
        return place.hook

    def _at_positions(self, by_unit: Float[Tensor, "unit batch pos"]) -> Tensor:
        if all(position is not None for _, position in self.spots):
            return by_unit.transpose(1, 2).flatten(0, 1)  # [variant batch], position after position
        masks = [self._mask(chosen) for chosen in self.chosen]
        if all(mask is masks[0] for mask in masks):
            summed = by_unit if masks[0] is None else torch.where(masks[0], by_unit, 0.0)
        else:
            every = torch.ones_like(by_unit[0], dtype=torch.bool)
            kept = torch.stack([every if mask is None else mask for mask in masks])
            summed = torch.where(kept, by_unit, 0.0)
        summed = summed.sum(-1)
        if len(self.spots) == len(self.chosen):
            return summed
        return torch.stack(
            [summed[unit] if p is None else by_unit[unit, :, p] for unit, p in self.spots]
        )

    def _mask(self, chosen: Chosen) -> Bool[Tensor, "batch pos"] | None:
        return self.at if chosen.where is None else chosen.where

    def _verified(
        self,
        found: Estimate,
        change: changes.Change,
        count: int,
        arguments: Mapping[str, Any],
    ) -> Estimate:
        picked = largest(found.mean(), count)
        variants = [self._variant(i, change) for i in picked]
        metric = {found.metric: self.measured[found.metric]}
        exact = sweep.sweep(
            self.model,
            None,
            variants,
            metric,
            batch_size=self.batch_size,
            arguments=arguments,
            **self.tensors,
        )
        run = maps.without_lacking(exact[found.metric], self.chosen)
        return replace(found, exact=run, verified=tuple(picked))

    def _variant(self, number: int, change: changes.Change) -> Intervention:
        """The intervention that a number of the map stands for."""
        unit, p = self.spots[number]
        chosen = self.chosen[unit]
        if p is None:
            return change(chosen, self._mask(chosen))
        mask = torch.zeros(
            self.batch, self.pos, dtype=torch.bool, device=self.tensors["input_ids"].device
        )
        mask[:, p] = True
        one = change(chosen, mask)
        return replace(one, name=f"{one.name} @ {p}", axes=one.axes | {"pos": p})


def _products(
    gradient: Tensor, difference: Tensor, place: Place, basis: Tensor | None, whole: bool
) -> Float[Tensor, "batch pos part"]:
    """Gradient times difference at a point, by head or coordinate; over the whole of it where nobody asks for parts."""
    if basis is not None:
        basis = basis.to(difference)
        difference = (difference @ basis.T) @ basis
    product = wide(gradient) * difference
    if place.point in SQUARES:
        product = product.transpose(1, 2)  # [batch pos head kv_pos]
    if product.ndim == 4:
        product = product.sum(-1)
    return product.sum(-1, keepdim=True) if whole else product


def _parts(unit: int | slice | None, n: int) -> list[int]:
    """Which of `n` parts a place is made of."""
    if isinstance(unit, int):
        return [unit]
    return list(range(n) if unit is None else range(n)[unit])


def _from_source(found: Estimate, source: Float[Tensor, " batch"]) -> Estimate:
    exact = None if found.exact is None else replace(found.exact, source=source)
    return replace(found, source=source, exact=exact)


# -- how well it ranked -------------------------------------------------------------------------------


def count_of(verify: str | int) -> int:
    """How many to run exactly: 50, or "top 50".

    Raises:
        ValueError: anything else.
    """
    if isinstance(verify, str):
        text = re.fullmatch(r"\s*top\s+(\d+)\s*", verify)
        count = int(text[1]) if text else 0
    else:
        count = 0 if isinstance(verify, bool) else verify
    if count < 1:
        raise ValueError(f"verify is {verify!r}; say how many to run exactly, as 50 or 'top 50'")
    return count


def largest(values: Float[Tensor, " variant"], count: int) -> list[int]:
    """Where the largest are, whichever their sign; all of them if there are no more."""
    return values.abs().argsort(descending=True, stable=True)[:count].tolist()


def _ranks(values: Float[Tensor, " variant"]) -> Float[Tensor, " variant"]:
    """From the lowest up; equal values share the mean of their ranks."""
    _, back, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[back].double()


def _correlation(a: Float[Tensor, " variant"], b: Float[Tensor, " variant"]) -> float:
    a, b = (value.double() - value.double().mean() for value in (a, b))
    norms = a.norm() * b.norm()
    return float((a @ b) / norms) if norms > 0 else float("nan")
