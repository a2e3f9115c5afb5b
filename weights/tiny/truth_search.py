"""Which heads and MLPs solve a task: found from the weights, with the package's own tools, and confirmed by ablation.

What is taken out is put at its mean over the prompts, position by position: what is the same in all
prompts stays, what tells one from another goes.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lens_gemma4 import HookedModel, knockout, patch
from lens_gemma4.changes import changes
from lens_gemma4.ground_truth import Head, Mlp, Task
from lens_gemma4.interventions import Intervention, replaced, unit_named
from lens_gemma4.selection import joined
from lens_gemma4.sweep import run_once, sweep

ORDERS, LONG_ORDERS, LONG = (
    16,
    8,
    32,
)  # in which units are put back, each also the other way round; of longer prompts
FEW = 12  # prompts that these are run on
SHARE, RESTORED = 0.03, 0.03  # a head that reaches either matters
MINOR_SHARE, MINOR_RESTORED = 0.004, 0.008  # one that reaches neither does not
DRAWS = 10  # of as many heads as matter, among the others
READ = 0.35  # of its attention at a place: there a head reads
CLOSER = 0.1  # by so much more of it goes to a distance than to a place where a head looks so far back wherever it stands
ELSEWHERE = "other places"
OF_THE_COUNTERPART = (
    "other's",
    "exchanged",
    "the other shapes'",
)  # these are read there for the answer


class Search:
    """A task's prompts in a model, and what is measured on them."""

    def __init__(self, model: HookedModel, task: Task) -> None:
        self.model, self.task = model, task
        self.inputs, self.corrupted = task.inputs(model), task.corrupted(model)
        self.metrics = {"difference": task.metric(model), "score": task.score(model)}
        self.places = {place: task.where(place) for place in task.places}
        named = torch.stack(list(self.places.values())).any(0)
        if not named.all():
            self.places[ELSEWHERE] = ~named

    def means(self, units: str, **where: Any) -> dict[str, Intervention]:
        """Each unit at its mean."""
        found = changes(self.model, self.inputs, units, None, "mean", per_position=True, **where)
        return {one.name: one for one in found}

    @cached_property
    def patterns(self) -> Mapping[str, Tensor]:
        names = ["blocks.*.attn.hook_pattern"]
        return run_once(self.model, self.inputs, self.metrics, names)[0]

    @cached_property
    def taken(self) -> Mapping[str, Tensor]:
        """What heads make of the counterparts."""
        names = ["blocks.*.attn.hook_z"]
        return run_once(self.model, self.corrupted, self.metrics, names)[0]

    def exchanged(self, head: str) -> Intervention:
        """A head with its value in the counterpart."""
        return replaced(unit_named(head, self.model.cfg), self.taken)

    def scores(self, variants: Sequence[Intervention], metric: str = "score") -> list[float]:
        """The mean over prompts under each intervention; without any, where it has no edits."""
        real = [one for one in variants if one.edits]
        plain = run_once(self.model, self.inputs, self.metrics, [])[1][metric].mean().item()
        if not real:
            return [plain] * len(variants)
        found = sweep(self.model, None, real, self.metrics[metric], **self.inputs)
        values = iter(found.values.mean(1).tolist())
        return [next(values) if one.edits else plain for one in variants]


# ------------------------------------------------------------------------------------------ one by one


def shares(search: Search, units: str, seed: int = 0) -> dict[str, float]:
    """What each unit adds to the logit difference when units are put back one after another, averaged over orders.

    Shapley values, as a share of what all of them add: heads that do the same share it, heads that need
    each other share what they do together.
    """
    mean = search.means(units)
    names = list(mean)
    rng, count = random.Random(seed), ORDERS if search.task.length <= LONG else LONG_ORDERS
    orders = [rng.sample(names, len(names)) for _ in range(count)]
    orders += [order[::-1] for order in orders]
    sets = {frozenset(order[:k]): 0.0 for order in orders for k in range(len(names) + 1)}
    variants = [joined("", (mean[n] for n in names if n not in kept)) for kept in sets]
    sets = dict(zip(sets, search.scores(variants, "difference"), strict=True))
    whole = sets[frozenset(names)] - sets[frozenset()]
    totals = dict.fromkeys(names, 0.0)
    for order in orders:
        for k, name in enumerate(order):
            totals[name] += sets[frozenset(order[: k + 1])] - sets[frozenset(order[:k])]
    return {name: total / len(orders) / whole for name, total in totals.items()}


def alone(search: Search, units: str) -> dict[str, float]:
    """The score with each unit by itself at its mean."""
    mean = search.means(units)
    return dict(zip(mean, search.scores(list(mean.values())), strict=True))


def restored(search: Search, units: str) -> dict[str, float]:
    """How far the counterpart's run comes to the prompt's when it gets a unit's values."""
    found = patch(
        *(search.model, search.inputs, search.corrupted, search.metrics["difference"]),
        units=units,
        positions="all",
    )
    return dict(zip(found.names, found.recovered().tolist(), strict=True))


def matters(share: float, back: float) -> bool:
    return share >= SHARE or (back >= RESTORED and share > -SHARE)


def is_minor(share: float, back: float) -> bool:
    return abs(share) >= MINOR_SHARE or abs(back) >= MINOR_RESTORED


# ------------------------------------------------------------------------------------------------ roles


def where_it_matters(search: Search, names: Sequence[str]) -> dict[str, str]:
    """The place of each head: where its value restores most, or its mean costs most."""
    own = run_once(search.model, search.inputs, search.metrics, ["blocks.*.attn.hook_z"])[0]
    units = [unit_named(name, search.model.cfg) for name in names]
    mean = [search.means([name])[name] for name in names]
    places = [name for name in search.places if not any(o in name for o in OF_THE_COUNTERPART)]
    masks = [search.places[name] for name in places]
    back = [replaced(unit, own, mask) for unit in units for mask in masks]
    out = [one.at(mask) for one in mean for mask in masks]
    clean, far = (
        run_once(search.model, some, search.metrics, [])[1]["difference"].mean()
        for some in (search.inputs, search.corrupted)
    )
    metric = search.metrics["difference"]
    gained = sweep(search.model, None, back, metric, **search.corrupted).values.mean(1) - far
    lost = clean - sweep(search.model, None, out, metric, **search.inputs).values.mean(1)
    effect = torch.maximum(gained, lost).view(len(names), len(masks))
    return {name: places[int(row.argmax())] for name, row in zip(names, effect, strict=True)}


def what_it_reads(search: Search, head: str, at: str) -> tuple[str, float]:
    """Where a head's attention goes from a place: the place that gets most, or how far back it looks."""
    place = unit_named(head, search.model.cfg).places[0]
    pattern = search.patterns[f"blocks.{place.layer}.attn.hook_pattern"][:, place.unit]
    rows = pattern[search.places[at]]  # [query kv_pos]
    prompt, query = search.places[at].nonzero(as_tuple=True)
    paid = {
        name: rows[mask[prompt]].sum().item() / len(rows) for name, mask in search.places.items()
    }
    paid.pop(ELSEWHERE, None)
    if paid.get(at, 0) > 0:  # its own place counts where it is one token
        paid[at] = rows[torch.arange(len(rows)), query].mean().item()
    back = {
        OFFSETS[k]: torch.where(query >= k, rows[torch.arange(len(rows)), (query - k).clamp(0)], 0)
        .mean()
        .item()
        for k in OFFSETS
    }
    best = max(paid, key=lambda name: paid[name])
    far = max(back, key=lambda name: back[name])
    if back[far] > paid[best] + CLOSER:
        best, paid = far, back
    return (best if paid[best] >= READ else "no one place"), paid[best]


WITHOUT_BLOCK = "without these of block {}"
OFFSETS = {
    0: "the token itself",
    1: "the token before",
    2: "the second token before",
    3: "the third token before",
    4: "the fourth token before",
}


# --------------------------------------------------------------------------------------------- together


def together(search: Search, heads: Sequence[str], minor: Sequence[str]) -> dict[str, float]:
    """Scores with the heads that matter taken out, and with all others."""
    mean = search.means("heads")
    others = [name for name in mean if name not in heads]
    rng = random.Random(0)
    draws = [rng.sample(others, min(len(heads), len(others))) for _ in range(DRAWS)]

    def out(names: Iterable[str]) -> Intervention:
        return joined("", (mean[name] for name in names))

    def swapped(names: Iterable[str]) -> Intervention:
        return joined("", (search.exchanged(name) for name in names))

    rest = [name for name in others if name not in minor]
    by_block: dict[str, list[str]] = {}
    for name in sorted(heads):
        by_block.setdefault(WITHOUT_BLOCK.format(name[1:].split("H")[0]), []).append(name)
    variants = {
        "as it is": joined("", ()),
        "without any head": out(mean),
        "without these": out(heads),
        "with these alone": out(others),
        "with these and the minor ones alone": out(rest),
        "with these of the counterpart": swapped(heads),
        "with all others of the counterpart": swapped(others),
        **{block: out(some) for block, some in by_block.items()},
    }
    found = dict(zip(variants, search.scores(list(variants.values())), strict=True))
    found["without as many others, at worst"] = min(search.scores([out(some) for some in draws]))
    far = run_once(search.model, search.corrupted, search.metrics, [])[1]
    return {**found, "of the counterparts": far["score"].mean().item()}


def without_reading(search: Search) -> dict[str, float]:
    """The score when nothing but itself reads a place, by place."""
    found = {}
    for name, mask in search.places.items():
        if name == "the last token" or mask[:, 0].any():
            continue
        cut = knockout(
            *(search.model, None, search.metrics["score"]),
            sources=mask,
            queries=~mask,
            units="attn",
            layers=[0],
            window=search.model.cfg.n_layers,
            **search.inputs,
        )
        found[name] = cut.values.mean().item()
    return found


def without_mlps(search: Search) -> dict[str, float]:
    """The score when every MLP is at its mean at a place, by place."""
    mean = list(search.means("mlp").values())
    variants = {
        name: joined("", (one.at(mask) for one in mean)) for name, mask in search.places.items()
    }
    variants["everywhere"] = joined("", mean)
    return dict(zip(variants, search.scores(list(variants.values())), strict=True))


def by_block_and_place(search: Search) -> dict[str, list[float]]:
    """How far the counterpart's run comes when the stream that enters a block at a place is the prompt's, by place and block."""
    names = ["blocks.*.hook_resid_pre"]
    own, clean = run_once(search.model, search.inputs, search.metrics, names)
    units = [
        unit_named(f"{i}_resid_pre", search.model.cfg) for i in range(search.model.cfg.n_layers)
    ]
    variants = [replaced(unit, own, mask) for mask in search.places.values() for unit in units]
    found = sweep(search.model, None, variants, search.metrics["difference"], **search.corrupted)
    way = (clean["difference"] - found.baseline).mean()
    values = (found.mean() / way).view(-1, len(units)).tolist()
    return dict(zip(search.places, values, strict=True))


# --------------------------------------------------------------------------------------------- the whole


def solve(model: HookedModel, task: Task) -> Task:
    """The task with its heads, MLPs and figures."""
    whole = Search(model, task)
    few = Search(model, task.some(FEW))
    share, back, by_itself = shares(few, "heads"), restored(whole, "heads"), alone(whole, "heads")
    names = sorted((n for n in share if matters(share[n], back[n])), key=lambda n: -share[n])
    minor = [n for n in share if n not in names and is_minor(share[n], back[n])]
    at = where_it_matters(few, names)
    heads = []
    for name in names:
        reads, pattern = what_it_reads(whole, name, at[name])
        place = unit_named(name, model.cfg).axes
        role = f"from {at[name]} it reads {reads}"
        numbers = (pattern, share[name], by_itself[name], back[name])
        heads.append(Head(place["layer"], place["head"], at[name], reads, *numbers, role))
    mlp_numbers = zip(
        shares(few, "mlp").values(),
        alone(whole, "mlp").values(),
        restored(whole, "mlp").values(),
        strict=True,
    )
    measured = {
        "heads in a block": model.cfg.n_heads,
        "full blocks": [layer.index for layer in model.cfg.layers if layer.kind == "full"],
        "window": min(layer.window for layer in model.cfg.layers if layer.window),
        "score": together(whole, names, minor),
        "score when nothing reads": without_reading(whole),
        "score without MLPs at": without_mlps(whole),
        "restored by the stream": by_block_and_place(whole),
    }
    return replace(
        task,
        heads=heads,
        minor=[tuple(unit_named(name, model.cfg).axes.values()) for name in minor],
        mlps=[Mlp(i, *numbers) for i, numbers in enumerate(mlp_numbers)],
        measured=measured,
    )
