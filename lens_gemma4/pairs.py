"""Units changed two at a time: which do what another does too, and which need each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lens_gemma4 import changes, sweep
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Intervention, Unit
from lens_gemma4.maps import without_lacking
from lens_gemma4.metrics import Metrics
from lens_gemma4.results import SweepResult

One = TypeVar("One", Unit, Intervention)


def pairs(what: Sequence[One]) -> list[One]:
    """Every two of some units or interventions, as one: "L0H0 & L0H1", ...

    >>> from lens_gemma4 import HookedModel
    >>> from lens_gemma4.interventions import units_of
    >>> heads = units_of("heads", HookedModel.from_pretrained("tiny").cfg, layers=[0])
    >>> [pair.name for pair in pairs(heads[:3])]
    ['L0H0 & L0H1', 'L0H0 & L0H2', 'L0H1 & L0H2']
    """
    return [one & other for one, other in itertools.combinations(what, 2)]


@dataclass(frozen=True, repr=False)
class PairEffects:
    """What units do alone and two at a time.

    Args:
        alone: a result with each unit's own change.
        together: one with that of every two, in the order of `pairs`.
    """

    alone: SweepResult
    together: SweepResult

    def _members(self) -> tuple[Tensor, Tensor]:
        first, second = torch.triu_indices(len(self.alone.names), len(self.alone.names), 1)
        return first, second

    @property
    def interaction(self) -> Float[Tensor, "pair batch"]:
        """The effect of both less the effects of each: 0 where they add up, against their sign where one does for the other; nan
        of a prompt that lacks one of them."""
        first, second = self._members()
        effect = self.alone.effect
        return self.together.effect - effect[first] - effect[second]

    def mean(self) -> Float[Tensor, " pair"]:
        """Interactions averaged over the prompts that have both units."""
        return self.together.averaged(self.interaction)

    def grid(self) -> Float[Tensor, "unit unit"]:
        """Interactions averaged over prompts, the same both ways; nan on the diagonal."""
        n, (first, second) = len(self.alone.names), self._members()
        mean = self.mean()
        out = mean.new_full((n, n), torch.nan)
        out[first, second] = out[second, first] = mean
        return out

    def top(self, k: int = 10) -> list[tuple[str, float]]:
        """The k largest mean interactions, whichever their sign."""
        named = zip(self.together.names, self.mean().tolist(), strict=True)
        return sorted(named, key=lambda one: -abs(one[1]) if one[1] == one[1] else 0.0)[:k]

    def to_dataframe(self) -> Any:
        """A pandas row for each pair, averaged over prompts: `first second effect_first effect_second effect interaction`."""
        import pandas as pd

        (first, second), effect = self._members(), self.alone.mean()
        names = self.alone.names
        return pd.DataFrame(
            {
                "first": [names[i] for i in first],
                "second": [names[i] for i in second],
                "effect_first": effect[first].cpu().numpy(),
                "effect_second": effect[second].cpu().numpy(),
                "effect": self.together.mean().cpu().numpy(),
                "interaction": self.mean().cpu().numpy(),
            }
        )

    def plot(self) -> Any:
        """A plotly map of interactions."""
        from lens_gemma4 import plots

        unit = f"interaction in {self.alone.metric}"
        return plots.heatmap(self.grid().tolist(), self.alone.names, self.alone.names, unit=unit)

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {value:+.3g}" for name, value in self.top(3))
        return f"PairEffects of {len(self.together.names)} pairs: {self.alone.metric}; largest interactions {best}"


def pair_effects(
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
    seed: int = 0,
    within: Any = None,
    batch_size: int | None = None,
    save_to: Any = None,
    **inputs: Any,
) -> PairEffects:
    """A metric without each unit, and without every two: which do what another does too?

    n units make n(n-1)/2 pairs: choose them, as by `found.top(20)`.

    Args:
        metric: one.
        model, prompts, units, ..., inputs: as in `maps.ablate`.
    Raises:
        ValueError: there is one unit, or what `ablate` refuses.

    >>> from lens_gemma4 import HookedModel, logit_difference
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ids = [model.to_single_token(word) for word in (" Paris", " Rome")]
    >>> found = pair_effects(model, "The capital of France is", logit_difference(*ids), layers=[2, 3])
    >>> found.grid().shape == (2 * model.cfg.n_heads, 2 * model.cfg.n_heads)
    True
    """
    one_metric(metric)
    tensors = model.prepare(prompts, **inputs)
    how = how_changed(reference, per_position, skip_first, seed, within)
    single = changes.changes(model, tensors, units, layers, mode, positions, **how)
    if len(single) < 2:
        raise ValueError(f"{single[0].name} is the only unit: a pair takes two")
    found = sweep.sweep(
        *(model, None, [*single, *pairs(single)], metric),
        batch_size=batch_size,
        save_to=save_to,
        arguments={**changes.asked(units, layers, positions), "pairs": True},
        **tensors,
    )
    n = len(single)
    alone, together = found.part(slice(0, n)), found.part(slice(n, None))
    alone = without_lacking(alone, changes.places(model, tensors, units, layers, positions))
    if alone.lacks is not None:
        first, second = torch.triu_indices(n, n, 1)
        lacks = alone.lacks[first] | alone.lacks[second]
        values = together.values.masked_fill(lacks.to(together.values.device), torch.nan)
        together = replace(together, values=values, lacks=lacks)
    return PairEffects(alone, together)


def how_changed(
    reference: Any, per_position: bool, skip_first: bool, seed: int, within: Tensor | None
) -> dict[str, Any]:
    return {
        "reference": reference,
        "per_position": per_position,
        "skip_first": skip_first,
        "seed": seed,
        "within": within,
    }


def one_metric(metric: Any) -> None:
    if isinstance(metric, (Mapping, list, tuple)):
        raise ValueError("one metric is what units are compared by; got several")
