"""Circuits from maps: the strongest units of a map kept or changed together, and units changed one after another.

Each is a sweep, or one for each step: sets of units are interventions joined into one. `pairs` has every two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lens_gemma4 import changes, interventions, maps, sweep
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Intervention
from lens_gemma4.metrics import Metrics
from lens_gemma4.pairs import how_changed, one_metric
from lens_gemma4.results import SweepResult


def joined(
    name: str, parts: Iterable[Intervention], axes: dict[str, int] | None = None
) -> Intervention:
    """Interventions made together."""
    return Intervention(name, tuple(edit for one in parts for edit in one.edits), axes or {})


# -- the strongest of a map ---------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Curves:
    """A metric with only the strongest units of a map in place, and with only these changed.

    Args:
        ks: how many.
        order: the units of the map, the strongest first.
        kept: `[k batch]`, the metric when all but the k strongest are changed; None if not asked for.
        removed: `[k batch]`, when the k strongest alone are.
        baseline: `[batch]`, without any change.
        empty: `[batch]`, with every unit of the map changed.
        metric: its name.
    """

    ks: list[int]
    order: list[str]
    kept: Float[Tensor, "k batch"] | None
    removed: Float[Tensor, "k batch"] | None
    baseline: Float[Tensor, " batch"]
    empty: Float[Tensor, " batch"]
    metric: str

    def share(self, values: Float[Tensor, "k batch"]) -> Float[Tensor, " k"]:
        """How much of the way from every unit changed (0) to none (1), averaged over prompts.

        Of `kept` it is faithfulness: near 1, these units are enough. Of `removed`, near 0, the rest does not do without them.

        Raises:
            ValueError: changing every unit of the map does not move the metric.
        """
        way = (self.baseline - self.empty).mean()
        if way == 0:
            raise ValueError(
                f"{self.metric} is the same with every unit of the map changed: there is nothing to recover"
            )
        return (values - self.empty).mean(1) / way

    def _curves(self) -> dict[str, Tensor]:
        both = {"kept": self.kept, "removed": self.removed}
        return {name: values for name, values in both.items() if values is not None}

    def to_dataframe(self) -> Any:
        """A pandas row for each curve and k, averaged over prompts: `curve k value share`."""
        import pandas as pd

        rows = [
            (name, k, value, share)
            for name, values in self._curves().items()
            for k, value, share in zip(
                self.ks, values.mean(1).tolist(), self.share(values).tolist(), strict=True
            )
        ]
        return pd.DataFrame(rows, columns=["curve", "k", "value", "share"])

    def plot(self) -> Any:
        """Shares by k, as a plotly figure."""
        from lens_gemma4 import plots

        curves = {name: self.share(values).tolist() for name, values in self._curves().items()}
        return plots.lines(self.ks, curves, x_title="units", unit=f"share of {self.metric}")

    def __repr__(self) -> str:
        told = "; ".join(
            f"{name} " + ", ".join(f"{v:.3g}" for v in values.mean(1).tolist())
            for name, values in self._curves().items()
        )
        return (
            f"Curves of {self.metric}, k = {', '.join(map(str, self.ks))}: {told} "
            f"(baseline {self.baseline.mean():.3g}, every unit changed {self.empty.mean():.3g})"
        )


def top_k(
    model: HookedModel,
    prompts: Any,
    metric: Metrics,
    found: SweepResult,
    ks: Sequence[int],
    *,
    keep: bool | None = None,
    goal: str = "any",
    mode: Any = "zero",
    positions: Any = None,
    reference: Any = None,
    per_position: bool = False,
    skip_first: bool = True,
    seed: int = 0,
    within: Any = None,
    batch_size: int | None = None,
    save_to: Any = None,
    **inputs: Any,
) -> Any:
    """A metric when only the k strongest units of a map are left as they are, and when only these are changed. One sweep.

    Args:
        found: a map of units of one kind, of `ablate`, `patch` or an estimate; its units are what is ranked, and "all others" are
            the others of this map.
        ks: how many units, from 0 to all of the map.
        keep: True for the first curve alone, False for the second; None for both.
        goal: what strong means: the largest mean effects of either sign ("any"), the lowest ("decrease") or the highest
            ("increase"). Equals stay in the map's order.
        positions: where units are changed; None, where the map changed them.
        model, prompts, metric, mode, reference, ..., inputs: as in `maps.ablate`; "resample" draws once.
    Returns:
        `Curves`; for several metrics a dictionary of them.
    Raises:
        ValueError: a k beyond the map, a map of something else than units, or what `ablate` refuses.

    >>> from lens_gemma4 import HookedModel, ablate, logit_difference
    >>> model = HookedModel.from_pretrained("tiny")
    >>> prompt, ids = "The capital of France is", [model.to_single_token(w) for w in (" Paris", " Rome")]
    >>> heads = ablate(model, prompt, logit_difference(*ids))
    >>> curves = top_k(model, prompt, logit_difference(*ids), heads, [0, 4, len(heads.names)])
    >>> [round(share) for share in curves.share(curves.kept)[[0, 2]].tolist()]
    [0, 1]
    """
    ks = [int(k) for k in ks]
    n, order = len(found.names), _ranked(found, goal)
    if not ks or any(not 0 <= k <= n for k in ks):
        raise ValueError(f"ks is {list(ks)}; each is from 0 to {n}, the units of this map")
    tensors = model.prepare(prompts, **inputs)
    how = how_changed(reference, per_position, skip_first, seed, within)
    single = _again(model, tensors, found, mode, positions, how)
    sets = _changed(order, ks, keep)
    # What is one and the same runs once: all but the 0 strongest, and as many strongest as there are.
    runs = {some: f"top {k} {word}" for (word, k), some in sets.items() if some}
    runs[frozenset(order)] = "none kept"
    variants = [joined(name, [single[i] for i in sorted(some)]) for some, name in runs.items()]
    swept = sweep.sweep(
        *(model, None, variants, metric),
        batch_size=batch_size,
        save_to=save_to,
        arguments={"top_k": list(ks), "of": found.plan.get("arguments", {})},
        **tensors,
    )

    def curves(one: SweepResult) -> Curves:
        rows = dict(zip(runs, one.values, strict=True))
        curve = {
            word: torch.stack([rows.get(sets[word, k], one.baseline) for k in ks])
            for word in {word for word, _ in sets}
        }
        names, empty = [found.names[i] for i in order], rows[frozenset(order)]
        kept, removed = curve.get("kept"), curve.get("removed")
        return Curves(list(ks), names, kept, removed, one.baseline, empty, one.metric)

    return maps.each_of(swept, curves)


def _changed(
    order: Sequence[int], ks: Sequence[int], keep: bool | None
) -> dict[tuple[str, int], frozenset[int]]:
    """The units that are changed at each place of the curves."""
    kept = {("kept", k): frozenset(order[k:]) for k in ks if keep is not False}
    return kept | {("removed", k): frozenset(order[:k]) for k in ks if keep is not True}


def _ranked(found: SweepResult, goal: str) -> list[int]:
    """Variants of a map, the strongest first."""
    effect = found.mean()
    if not bool(effect.isfinite().all()):
        raise ValueError("the map has effects that are not finite: they cannot be ranked")
    return _strength(effect, goal).argsort(descending=True, stable=True).tolist()


def _strength(effect: Tensor, goal: str) -> Tensor:
    signed = {"any": effect.abs(), "decrease": -effect, "increase": effect}
    if goal not in signed:
        raise ValueError(f"goal is {goal!r}; use {', '.join(map(repr, signed))}")
    return signed[goal]


def _again(
    model: HookedModel,
    tensors: Mapping[str, Any],
    found: SweepResult,
    mode: Any,
    positions: Any,
    how: Mapping[str, Any],
) -> list[Intervention]:
    """The units of a map, each changed by itself where the map changed it."""
    if "sources" in found.plan.get("arguments", {}) or any("source" in at for at in found.at):
        raise ValueError(
            "this is a map of what attention reads, not of units: there is nothing to keep"
        )
    placed = any("image" in at for at in found.at)
    each = any("pos" in at for at in found.at)
    if positions is None:
        positions = "all" if each or placed else _positions_of(found)
    units = [name.split(" @ ")[0] for name in found.names]
    asked = list(dict.fromkeys(units))
    if regions := [unit for unit in asked if " in (" in unit]:
        raise ValueError(
            f"the map holds {regions[0]}, a region, which its name alone does not make again: rank patches"
        )
    made = changes.changes(model, tensors, asked, None, mode, positions, **how)
    by_name, real = {one.name: one for one in made}, changes.real_of(tensors)
    missing = [unit for unit in units if unit not in by_name]
    if missing:
        raise ValueError(f"the map has {missing[0]!r}, which these prompts do not have")
    if not each:
        return [by_name[unit] for unit in units]
    return [
        by_name[unit].at(interventions.position_mask(at["pos"], real), name, pos=at["pos"])
        if "pos" in at
        else by_name[unit]
        for unit, name, at in zip(units, found.names, found.at, strict=True)
    ]


def _positions_of(found: SweepResult) -> Any:
    """Where a map changed its units, from its record."""
    known = found.plan.get("arguments", {}).get("positions", "all")
    if isinstance(known, str) and known not in ("all", "last"):
        raise ValueError(f"the map was made at positions {known}: give them again, positions=...")
    nested = isinstance(known, list) and known and isinstance(known[0], (list, bool))
    return torch.tensor(known) if nested else known


# -- one after another --------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Steps:
    """Units changed one after another, each with those before it.

    Args:
        names: of the unit that each step added.
        values: `[step batch]`, the metric after it.
        baseline: `[batch]`, before the first.
        metric: its name.
        maps: what each step chose from.
    """

    names: list[str]
    values: Float[Tensor, "step batch"]
    baseline: Float[Tensor, " batch"]
    metric: str
    maps: list[SweepResult] = field(repr=False)

    def to_dataframe(self) -> Any:
        """A pandas row for each step, averaged over prompts: `step unit value effect gain`, the last against the step before."""
        import pandas as pd

        mean, start = self.values.mean(1), self.baseline.mean()
        before = torch.cat([start[None], mean[:-1]])
        return pd.DataFrame(
            {
                "step": range(1, len(self.names) + 1),
                "unit": self.names,
                "value": mean.tolist(),
                "effect": (mean - start).tolist(),
                "gain": (mean - before).tolist(),
            }
        )

    def plot(self) -> Any:
        """The metric by the number of units changed, as a plotly figure."""
        from lens_gemma4 import plots

        means = [self.baseline.mean().item(), *self.values.mean(1).tolist()]
        return plots.lines(
            range(len(means)), {self.metric: means}, x_title="units changed", unit=self.metric
        )

    def __repr__(self) -> str:
        told = ", ".join(
            f"{name} {value:.3g}"
            for name, value in zip(self.names, self.values.mean(1).tolist(), strict=True)
        )
        return f"Steps: {self.metric} from {self.baseline.mean():.3g}: {told}"


def greedy(
    model: HookedModel,
    prompts: Any,
    metric: Metrics,
    *,
    units: str | Sequence[Any] = "heads",
    layers: Any = None,
    k: int = 5,
    goal: str = "any",
    mode: Any = "zero",
    positions: Any = "all",
    reference: Any = None,
    per_position: bool = False,
    skip_first: bool = True,
    seed: int = 0,
    within: Any = None,
    batch_size: int | None = None,
    save_to: Any = None,
    **inputs: Any,
) -> Steps:
    """Step by step the unit whose change, with those already changed, moves the metric most. A sweep of the rest for each step.

    Args:
        metric: one; averaged over prompts, it is what units are chosen by.
        k: steps.
        goal: "decrease" or "increase" the metric, or take it furthest from its baseline, whichever way ("any"). The first of equals is taken.
        save_to: a folder that keeps each step's sweep, as in `sweep.sweep`.
        model, prompts, units, ..., inputs: as in `maps.ablate`; "resample" draws once.
    Raises:
        ValueError: k is not from 1 to the number of units, or what `ablate` refuses.

    >>> from lens_gemma4 import HookedModel, logit_difference
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ids = [model.to_single_token(word) for word in (" Paris", " Rome")]
    >>> found = greedy(model, "The capital of France is", logit_difference(*ids), units="mlp", k=2, goal="decrease")
    >>> bool(found.values[1] < found.values[0] < found.baseline)
    True
    """
    one_metric(metric)
    _strength(torch.zeros(1), goal)  # refuse another word before anything runs
    tensors = model.prepare(prompts, **inputs)
    how = how_changed(reference, per_position, skip_first, seed, within)
    single = changes.changes(model, tensors, units, layers, mode, positions, **how)
    if not 1 <= k <= len(single):
        raise ValueError(f"k is {k}; it is from 1 to {len(single)}, the number of units")
    chosen: list[Intervention] = []
    steps: list[SweepResult] = []
    rest, values = list(single), []
    for step in tqdm(range(k), desc="steps", disable=None):
        swept = sweep.sweep(
            *(model, None, [joined(one.name, [*chosen, one], one.axes) for one in rest], metric),
            batch_size=batch_size,
            save_to=None if save_to is None else Path(save_to) / f"{step:03}",
            arguments={
                **changes.asked(units, layers, positions),
                "after": [c.name for c in chosen],
            },
            **tensors,
        )
        best = _ranked(swept, goal)[0]
        steps.append(swept)
        values.append(swept.values[best])
        chosen.append(rest.pop(best))
    names = [one.name for one in chosen]
    return Steps(names, torch.stack(values), steps[0].baseline, steps[0].metric, steps)
