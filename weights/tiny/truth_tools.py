"""The package's tools on a task's prompts, each as a map `[layer head]` to be held against the ground truth."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lens_gemma4 import (
    HookedModel,
    Target,
    ablate,
    attribution_ablate,
    attribution_patch,
    detect_head,
    edge_attribution,
    knockout,
    patch,
)
from lens_gemma4.attribution import by_head, needed
from lens_gemma4.ground_truth import Head, Recovery, Task, score

NOTICED = 0.7  # the score falls below this when nothing reads a place that can be told from others by a knockout
CARRIES = 0.01  # of the way to the prompt's run: less is restored by heads that do the same in its counterpart


class Prepared(NamedTuple):
    """What every tool takes."""

    model: HookedModel
    task: Task
    inputs: dict
    corrupted: dict


def prepared(model: HookedModel, task: Task) -> Prepared:
    return Prepared(model, task, task.inputs(model), task.corrupted(model))


def attribution(run: Prepared) -> Tensor:
    """What each head wrote towards the answer at the last position."""
    names = needed("head", run.model.cfg)
    _, cache = run.model.run_with_cache(run.inputs, names_filter=names)
    found = by_head(cache, Target(direction=run.task.direction(run.model)))
    return found.values.mean((2, 3))


def ablation(mode: str) -> Callable[[Prepared], Tensor]:
    def tool(run: Prepared) -> Tensor:
        by_position = mode == "mean"
        metric = run.task.metric(run.model)
        return ablate(run.model, run.inputs, metric, mode=mode, per_position=by_position).grid()

    return tool


def estimated_ablation(run: Prepared) -> Tensor:
    metric = run.task.metric(run.model)
    return attribution_ablate(run.model, run.inputs, metric, mode="mean", per_position=True).grid()


def patching(run: Prepared) -> Tensor:
    metric = run.task.metric(run.model)
    both = (run.inputs, run.corrupted)
    return patch(run.model, *both, metric, units="heads", positions="all").grid()


def estimated_patching(run: Prepared) -> Tensor:
    metric = run.task.metric(run.model)
    both = (run.inputs, run.corrupted)
    return attribution_patch(run.model, *both, metric, units="heads", positions="all").grid()


def edges(run: Prepared) -> Tensor:
    """What the edges that leave each head add up to, whichever their sign."""
    metric, cfg = run.task.metric(run.model), run.model.cfg
    found = edge_attribution(run.model, run.inputs, run.corrupted, metric)
    sums = found.mean().nan_to_num().abs().sum(1)  # [sender]
    of = dict(zip(found.senders, sums, strict=True))
    return torch.stack(
        [torch.stack([of[f"L{i}H{j}"] for j in range(cfg.n_heads)]) for i in range(cfg.n_layers)]
    )


def cut_from(place: str) -> Callable[[Prepared], Tensor]:
    """What it does that a head cannot read a place."""

    def tool(run: Prepared) -> Tensor:
        where, metric = run.task.where(place), run.task.metric(run.model)
        cut = {"sources": where, "queries": ~where}
        return knockout(run.model, None, metric, **cut, **run.inputs).grid()

    return tool


def detected(pattern: str) -> Callable[[Prepared], Tensor]:
    def tool(run: Prepared) -> Tensor:
        return detect_head(run.model, run.task.prompts[:8], pattern)

    return tool


TOOLS: dict[str, Callable[[Prepared], Tensor]] = {
    "attribution": attribution,
    "ablation, zero": ablation("zero"),
    "ablation, mean": ablation("mean"),
    "ablation, resample": ablation("resample"),
    "ablation, estimated": estimated_ablation,
    "patching": patching,
    "patching, estimated": estimated_patching,
    "edges": edges,
}


def found_by(task: Task) -> dict[str, tuple[Callable[[Prepared], Tensor], Sequence[Head]]]:
    """Each tool that applies to a task, and the heads that it can find.

    Patching finds heads that carry what prompt and counterpart differ in; attribution those that write it at the last position;
    a knockout of a place the heads that read it.
    """
    carrying = [head for head in task.heads if head.restored >= CARRIES]
    found = {name: (tool, task.heads) for name, tool in TOOLS.items()}
    for name in ("patching", "patching, estimated", "edges"):
        found[name] = TOOLS[name], carrying
    found["attribution"] = attribution, [head for head in carrying if head.at == "the last token"]
    for place, left in task.measured["score when nothing reads"].items():
        heads = task.reading(place)
        if left < NOTICED and len(heads) > 1:
            found[f"knockout, {place}"] = cut_from(place), heads
    if task.name == "repeats":
        before, after = "the last token, the first time", "what followed it"
        found["detect_head, previous token"] = (
            detected("previous_token_head"),
            [*task.reading(before), *task.reading("the token before")],
        )
        found["detect_head, induction"] = detected("induction_head"), task.reading(after)
    return found


def recovery(run: Prepared, tool: Callable[[Prepared], Tensor], heads: Sequence[Head]) -> Recovery:
    return score(tool(run), run.task, heads)
