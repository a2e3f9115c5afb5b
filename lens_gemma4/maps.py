"""Ablation and patching maps: every unit of a kind changed by itself, and what that does to a metric.

`ablate` changes units of a run, `patch` puts one prompt's values into another's run. They make interventions; `sweep` runs
them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from lens_gemma4 import interventions, sweep
from lens_gemma4.changes import (
    Chosen,
    asked,
    basis_of,
    changes,
    everywhere,
    hooks_of,
    lacking,
    places,
    same_patches,
    same_shape,
    word,
)
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.metrics import Metrics
from lens_gemma4.results import SweepResult

Result = TypeVar("Result", bound=SweepResult)


def ablate(
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
    draws: int = 1,
    seed: int = 0,
    within: Any = None,
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
            a mask `[batch pos]`. Patches, images and regions are changed where they stand ("all" or "each").
        reference: prompts that "mean" and "resample" take values from; by default the prompts themselves.
        per_position: "mean" by position, over prompts of the same padded length, in place of one mean over all positions.
        skip_first: leave each row's first token (BOS) out of a mean over positions. Pads are always left out.
        draws, seed: how many times "resample" draws a prompt for each, and from where; values are averaged.
        within: directions `[k d]` of the unit's last axis: only the part in their span is changed, so that "zero" projects it out.
    Returns:
        A `SweepResult`, variants in the order of the blocks, "L0H0", "L0H1", ...; with "each", "L0H0 @ 0", ...; for several
        metrics a dictionary of results. Prompts that lack a patch, an image or a region are nan, and left out of averages.
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
    given = None if reference is None else model.prepare(reference)
    how: dict[str, Any] = {
        "reference": given,
        "per_position": per_position,
        "skip_first": skip_first,
    }
    variants = []
    for draw in range(times):
        variants += changes(
            *(model, tensors, units, layers, mode, positions),
            **how,
            seed=seed + draw,
            within=within,
        )
    arguments = {
        **asked(units, layers, positions),
        "mode": word(mode),
        "per_position": per_position,
        "skip_first": skip_first,
        "draws": draws,
        "seed": seed,
        "within": word(within),
        "reference": None if given is None else given["input_ids"].tolist(),
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
    chosen = places(model, tensors, units, layers, positions)
    found = each_of(found, lambda one: without_lacking(one, chosen))
    return found if times == 1 else each_of(found, lambda one: _averaged(one, times))


def patch(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    metric: Metrics,
    *,
    units: str | Sequence[Any] = "resid_pre",
    layers: Any = None,
    positions: Any = "each",
    direction: Literal["denoise", "noise"] = "denoise",
    within: Any = None,
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

    >>> from lens_gemma4 import HookedModel, logit_difference
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = logit_difference(*(model.to_single_token(word) for word in (" Paris", " Rome")))
    >>> found = patch(model, "The capital of France is", "The capital of Italy is", ask)
    >>> list(found.axes), round(found.recovered()[found.names.index("0_resid_pre @ 4")].item(), 3)
    (['layer', 'pos'], 1.0)
    """
    if direction not in ("denoise", "noise"):
        raise ValueError(f"direction is {direction!r}; use 'denoise' or 'noise'")
    given, base = model.prepare(clean), model.prepare(corrupted)
    if direction == "noise":
        given, base = base, given
    same_shape(given, base)
    chosen = places(model, base, units, layers, positions)
    same_patches(model, given, base, chosen)
    basis = None if within is None else basis_of(model, within, chosen)
    kept, source = sweep.run_once(model, given, metric, hooks_of(chosen))
    variants = everywhere(
        chosen, lambda one, at: interventions.replaced(one.unit, kept, at, basis), base, positions
    )
    arguments = {
        **asked(units, layers, positions),
        "direction": direction,
        "from": given["input_ids"].tolist(),
        "within": word(within),
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
    return each_of(
        found, lambda one: without_lacking(replace(one, source=source[one.metric]), chosen)
    )


def each_of(found: Any, change: Callable[[SweepResult], Any]) -> Any:
    """A change made to one result, or to that of each metric."""
    if isinstance(found, SweepResult):
        return change(found)
    return {name: change(one) for name, one in found.items()}


def _averaged(found: SweepResult, times: int) -> SweepResult:
    """One result of several draws, one after another."""
    n = len(found.names) // times
    values = found.values.unflatten(0, (times, n)).mean(0)
    lacks = None if found.lacks is None else found.lacks[:n]
    return replace(found, names=found.names[:n], at=found.at[:n], values=values, lacks=lacks)


def without_lacking(found: Result, chosen: Sequence[Chosen]) -> Result:
    """A result that knows which prompts lack what a variant changes."""
    lacks = lacking(chosen, found.names, found.values.shape[1])
    if lacks is None:
        return found
    values = found.values.masked_fill(lacks.to(found.values.device), torch.nan)
    return replace(found, values=values, lacks=lacks)
