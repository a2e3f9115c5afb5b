"""Runs whose values can be differentiated by: what first-order estimates are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_gemma4 import changes, metrics
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.metrics import Logits, Measure, Metric, Reading

START = "blocks.0.hook_resid_pre"  # what averaged gradients go along


def two_runs(
    model: HookedModel, clean: Any, corrupted: Any, direction: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prepared calls: the one that values are taken from, and the one that they are put into.

    Raises:
        ValueError: another direction, or prompts of unlike shapes.
    """
    if direction not in ("denoise", "noise"):
        raise ValueError(f"direction is {direction!r}; use 'denoise' or 'noise'")
    given, base = model.prepare(clean), model.prepare(corrupted)
    if direction == "noise":
        given, base = base, given
    for tensors in (given, base):
        if tensors.get("input_ids") is None:
            raise ValueError(
                "patching needs prompts with ids: give text, ids or a processor's output"
            )
    changes.same_shape(given, base)
    return given, base


def wide(value: Tensor) -> Tensor:
    """In float32 at least: products of gradients and differences are sums of many."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


class GradientRun:
    """A run of a prepared call that keeps the graph from its first point of `hooks` on.

    Args:
        toward, share: the block-0 input is moved this share of the way to `toward` first.
    """

    def __init__(
        self,
        model: HookedModel,
        tensors: Mapping[str, Any],
        hooks: Sequence[str],
        toward: Float[Tensor, "batch pos d_model"] | None = None,
        share: float = 0.0,
    ) -> None:
        self.taps: dict[str, Tensor] = {}
        moved: list[tuple[Any, Any]] = []
        if toward is not None:
            moved = [(START, lambda value, hook: value + share * (toward - value))]
        with torch.enable_grad():
            self.final: Float[Tensor, "batch pos d_model"] = model.run_with_hooks(
                **tensors,
                fwd_hooks=[*moved, *((hook, self._tap) for hook in hooks)],
                stop_at_layer=model.cfg.n_layers,  # metrics unembed what they read
            )

    def _tap(self, value: Tensor, hook: Any) -> Tensor:
        """A node of this point's own. A returned tensor counts as an edit: patterns are then really used."""
        value = value.view_as(value) if value.requires_grad else value.detach().requires_grad_(True)
        self.taps[hook.name] = value
        return value

    @property
    def values(self) -> dict[str, Tensor]:
        return {hook: value.detach() for hook, value in self.taps.items()}

    def freed(self) -> GradientRun:
        """The same without the graph: values alone."""
        self.taps, self.final = self.values, self.final.detach()
        return self

    def gradients(
        self, reading: Reading, hooks: Sequence[str], keep_graph: bool = False
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Of the sum over prompts of a reading's one metric: with respect to points' values, and to the last stream.

        Raises:
            ValueError: the metric has no gradient.
        """
        whole = torch.arange(self.final.shape[1], device=self.final.device)
        with torch.enable_grad():
            value = reading.measure(self.final[None], whole.expand(len(self.final), -1)).sum()
        if not value.requires_grad:
            raise ValueError(
                f"{reading.metrics[0][0]} has no gradient (it counts or compares, or leaves torch): a first-order estimate needs "
                "one; use a difference of logits, a log-probability or a loss, or the exact `patch` and `ablate`"
            )
        wanted = [*(self.taps[hook] for hook in hooks), self.final]
        *found, final = torch.autograd.grad(
            value, wanted, retain_graph=keep_graph, allow_unused=True, materialize_grads=True
        )
        return dict(zip(hooks, found, strict=True)), final


def readings_of(
    model: HookedModel,
    tensors: Mapping[str, Any],
    final: Float[Tensor, "batch pos d_model"],
    measured: Mapping[str, Measure],
    steps: int,
) -> dict[str, Reading]:
    """A reading of each metric by itself, as the base run's.

    Raises:
        ValueError: a metric whose gradient is zero in the base run whatever the units do; fewer steps than one.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; one is the fewest")
    for name, one in measured.items():
        if steps == 1 and isinstance(one, Metric) and one.name == metrics.kl_to_clean().name:
            raise ValueError(
                f"{name} is at its minimum, 0, in the run that is changed, so its gradient is zero there: use another metric, the exact "
                "`patch` and `ablate`, or gradients on the way to another run (steps=5 or so, where there is one)"
            )
    prompts = metrics.prompts_of(model, tensors)
    with torch.no_grad():
        return {name: Reading(model, {name: one}, final, prompts) for name, one in measured.items()}


@torch.no_grad()
def baselines(
    model: HookedModel,
    tensors: Mapping[str, Any],
    run: GradientRun,
    measured: Mapping[str, Measure],
) -> dict[str, Float[Tensor, " batch"]]:
    """Each metric in a run."""
    prompts = metrics.prompts_of(model, tensors)
    reading = Reading(model, measured, run.final.detach(), prompts)
    return dict(zip(measured, reading.baseline, strict=True))


def shares(steps: int) -> list[float]:
    """How far along the way from the base run to the other each gradient is taken."""
    return [0.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]


@torch.no_grad()
def is_joint(reading: Reading) -> bool:
    """Whether a metric is one number for all prompts, which changes in any of them move."""
    _, metric = reading.metrics[0]
    if isinstance(metric, Metric) or len(reading.final) == 1:
        return False
    return torch.as_tensor(metric(Logits(reading.model, reading.final))).ndim == 0


def by_prompt(found: Float[Tensor, "*units batch"], reading: Reading) -> Tensor:
    """Products of the summed metric's gradient, as each prompt's estimate."""
    return found.mean(-1, keepdim=True).expand_as(found) if is_joint(reading) else found
