"""The sweep engine: a metric under each of many interventions, in a few runs' time.

What is the same in many variants is computed once (`variants`): answers agree with one `run_with_hooks` each to
rounding. `maps` makes the interventions of ablation and patching maps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lens_gemma4 import metrics, plans
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Intervention
from lens_gemma4.metrics import Measure, Metrics, Reading
from lens_gemma4.results import SweepResult
from lens_gemma4.spans import spans_of, token_labels
from lens_gemma4.variants import Clean, Runner, clean_run

BY_ROW = ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids")
MAX_BYTES = (
    2**29
)  # of a batch of variants' largest tensors, and of what is kept of a clean run, on a CPU
# A pass of a few rows through a block's weights costs as much as this many rows more: measured at 512 and 2048 wide on
# two cores, and a guess for cards.
PASS_ROWS = {"cpu": 12, "cuda": 512}


@torch.no_grad()
def sweep(
    model: HookedModel,
    prompts: Any,
    variants: Sequence[Intervention],
    metric: Metrics,
    *,
    batch_size: int | None = None,
    save_to: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    **inputs: Any,
) -> Any:
    """A metric under each of some interventions.

    Args:
        prompts, inputs: what `forward` takes: texts, ids, a processor's output. All rows are of one padded length.
        variants: see `interventions`.
        metric: a `Metric`, or a function of `Logits` that gives a number, or one for each prompt; or several of these.
        batch_size: variants that run together; by default what fits.
        save_to: a folder that keeps what is done: started again with it, a sweep that was stopped goes on, and ends with the
            same table to the last bit. A sweep of anything else refuses the folder.
        arguments: what the variants were made with, for the record.
    Returns:
        A `SweepResult`; for several metrics a dictionary of them.
    Raises:
        ValueError: no variants; hooks or skipped blocks on the model; a folder of another sweep.
        HookNameError: a point that this model does not have.
    """
    check(model, variants)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; a batch has one variant at least")
    measured = metrics.named(metric)
    tensors = model.prepare(prompts, **inputs)
    if tensors.get("input_ids") is None:
        raise ValueError("a sweep needs prompts with ids: give text, ids or a processor's output")
    plan = plans.record(model, tensors, measured, arguments or {})
    values, baseline = _by_prompts(model, tensors, variants, measured, plan, batch_size, save_to)
    tokens = tokens_of(model, tensors)
    results = {
        name: SweepResult(
            [one.name for one in variants],
            [dict(one.axes) for one in variants],
            values[i],
            baseline[i],
            name,
            tokens=tokens,
            plan=plan,
        )
        for i, name in enumerate(measured)
    }
    return next(iter(results.values())) if metrics.is_one(metric) else results


def _by_prompts(
    model: HookedModel,
    tensors: Mapping[str, Any],
    variants: Sequence[Intervention],
    measured: Mapping[str, Measure],
    plan: Mapping[str, Any],
    batch_size: int | None,
    save_to: str | Path | None,
) -> tuple[Float[Tensor, "metric variant batch"], Float[Tensor, "metric batch"]]:
    """Values and baselines, for as many prompts at a time as there is room for the clean run of."""
    points = sorted({edit.where.point for one in variants for edit in one.edits})
    prompts = metrics.prompts_of(model, tensors)
    chunks = _chunks(model, tensors, measured, points)
    if save_to is not None:
        unnamed = [name for name, one in plan["metrics"].items() if one["code"] is None]
        if unnamed:
            raise ValueError(
                f"{unnamed[0]!r} uses something that cannot be told from another, so a stopped sweep could not be told from "
                "another: use a metric of this package, a function of plain values, or no save_to"
            )
        bounds = [[rows.start, rows.stop] for rows in chunks]
        chunks = [slice(*b) for b in plans.settled(save_to, plans.CHUNKS, bounds)]
        if chunks[-1].stop != len(prompts.real):
            raise ValueError(
                f"{save_to} holds another sweep: of {chunks[-1].stop} prompts, here are {len(prompts.real)}. Give another folder"
            )
    values, baselines = [], []
    for rows in chunks:
        part, some, folder = tensors, variants, save_to
        if len(chunks) > 1:
            part = of_rows(tensors, rows)
            some = [one.rows(rows, len(prompts.real)) for one in variants]
            folder = None if save_to is None else Path(save_to) / f"prompts-{rows.start:06}"
        clean = clean_run(model, part, points)
        reading = Reading(model, measured, clean.final, prompts.rows(rows))
        about = {**plan, "rows": [rows.start, rows.stop]}
        values.append(_Sweep(model, clean, reading, some, batch_size).run(about, folder))
        baselines.append(reading.baseline)
    return torch.cat(values, 2), torch.cat(baselines, 1)


def of_rows(tensors: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """Some prompts of a call's; what is one for all stays."""
    batch = len(tensors["input_ids"])
    return {
        name: value[rows] if isinstance(value, Tensor) and len(value) == batch else value
        for name, value in tensors.items()
    }


def _chunks(
    model: HookedModel,
    tensors: Mapping[str, Any],
    measured: Mapping[str, Measure],
    points: Sequence[str],
) -> list[slice]:
    """Which prompts run together: all of them where pictures or a function of all logits belong to no single prompt."""
    batch, pos = tensors["input_ids"].shape
    by_row = all(name in BY_ROW for name, value in tensors.items() if value is not None)
    if not by_row or any(not isinstance(metric, metrics.Metric) for metric in measured.values()):
        return [slice(0, batch)]
    cfg = model.cfg
    kept = sum(
        cfg.d_model * (2 + len(points))
        + 2 * layer.n_key_value_heads * layer.d_head
        + ("attn.hook_z" in points) * layer.n_heads * layer.d_head
        + ("mlp.hook_post" in points) * layer.d_mlp
        for layer in cfg.layers
    )
    size = max(1, room(model.device) // (kept * pos * torch.finfo(model.dtype).bits // 8))
    return [slice(i, min(i + size, batch)) for i in range(0, batch, size)]


@torch.no_grad()
def run_once(
    model: HookedModel, tensors: Mapping[str, Any], metric: Any, names: Sequence[str]
) -> tuple[Mapping[str, Tensor], dict[str, Float[Tensor, " batch"]]]:
    """A prepared call's values under some names, and what the metrics give for it, without changes."""
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    kept = model.run_and_store(
        **tensors, names_filter=[*names, last], stop_at_layer=model.cfg.n_layers
    )[1]
    measured = metrics.named(metric)
    reading = Reading(model, measured, kept[last], metrics.prompts_of(model, tensors))
    return kept, dict(zip(measured, reading.baseline, strict=True))


def check(model: HookedModel, variants: Sequence[Intervention]) -> None:
    """Refuse what would be half applied, or at a point that is not there."""
    if not variants:
        raise ValueError("there are no variants to run")
    hooked = [name for name, _, _ in model.list_hooks()]
    if hooked or model._skipped:
        what = (
            f"hooks on {', '.join(hooked[:3])}"
            if hooked
            else f"blocks {sorted(model._skipped)} skipped"
        )
        raise ValueError(
            f"the model has {what}, which a sweep would apply to the clean run alone: remove them (`reset_hooks`, the end of a "
            "`with` block), or make them edits of every variant"
        )
    for hook in {edit.where.hook for one in variants for edit in one.edits}:
        model.hook_point(hook)


def tokens_of(model: HookedModel, tensors: Mapping[str, Any]) -> list[list[str]] | None:
    """Each prompt's tokens as text, where there is a tokenizer or pictures, of which each patch has a name."""
    named = model.tokenizer is not None or bool(spans_of(model, tensors))
    return token_labels(model, tensors) if named else None


class _Batch(NamedTuple):
    """Variants that run together, from a position on."""

    start: int
    members: list[int]


class _Sweep:
    """Every variant of one batch of prompts."""

    def __init__(
        self,
        model: HookedModel,
        clean: Clean,
        reading: Reading,
        variants: Sequence[Intervention],
        batch_size: int | None,
    ) -> None:
        self.model, self.clean, self.reading, self.variants = model, clean, reading, variants
        first = functools.cache(clean.first_changed)
        self.start = [first(one.first_position()) for one in variants]
        self.batch_size = batch_size
        self.batches = self._planned()

    def _planned(self) -> plans.Batches:
        """Variants that run together: from late positions to early ones, within one from low blocks up, as many as fit."""
        batches: plans.Batches = {}
        batch: list[int] = []
        most, taken = room(self.clean.final.device), 0
        for i in self._ordered():
            full = len(batch) == self.batch_size or taken + self._bytes([i]) > most
            if batch and full:
                batches[f"{len(batches):06}"] = batch
                batch, taken = [], 0
            batch.append(i)
            taken += self._bytes([i])
        return batches | {f"{len(batches):06}": batch}

    def _ordered(self) -> list[int]:
        """Variants group by group; decides from which position each is run.

        That may be an earlier one than its own, where it costs less than attention of its own.
        """
        by_start: dict[int, list[int]] = {}
        for i, start in enumerate(self.start):
            by_start.setdefault(start, []).append(i)
        worth, n_layers = PASS_ROWS.get(self.clean.final.device.type, 512), self.model.cfg.n_layers
        first = None
        for start, members in sorted(by_start.items()):
            blocks = [n_layers - self.variants[i].stage[0] for i in members]
            if first is None or (start - first) * self.clean.shape[0] * sum(blocks) >= worth * max(
                blocks
            ):
                first = start
            for i in members:
                self.start[i] = first
        every = range(len(self.variants))
        return sorted(every, key=lambda i: (-self.start[i], self.variants[i].stage))

    def _bytes(self, members: Sequence[int]) -> int:
        """Of the largest tensors of some variants that run together."""
        batch, pos = self.clean.shape
        rows = batch * sum(pos - self.start[i] for i in members)
        return rows * self._widest * self.clean.final.element_size()

    @functools.cached_property
    def _widest(self) -> int:
        """Numbers that a row takes."""
        cfg, pos = self.model.cfg, self.clean.shape[1]
        return max(
            4 * layer.d_mlp + 6 * cfg.d_model + 2 * layer.n_heads * pos for layer in cfg.layers
        )

    # -- running ----------------------------------------------------------------------------------------

    def run(
        self, plan: Mapping[str, Any], save_to: str | Path | None
    ) -> Float[Tensor, "metric variant batch"]:
        journal = None
        if save_to is not None:
            whole = {
                **plan,
                "weights": plans.of_weights(self.model),
                "variants": plans.of_variants(self.variants),
                "batch_size": None if self.batch_size is None else int(self.batch_size),
                "threads": torch.get_num_threads(),
            }
            journal = plans.Journal(save_to, whole, self.batches)
            self.batches = journal.batches
        baseline = self.reading.baseline
        values = baseline[:, None].expand(-1, len(self.variants), -1).clone()
        work = {name: self._work(members) for name, members in self.batches.items()}
        bar_format = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        with tqdm(
            total=sum(work.values()), desc="variants", disable=None, bar_format=bar_format
        ) as bar:
            done, queue = 0, list(self.batches)
            while queue:
                name = queue.pop(0)
                members = self.batches[name]
                shape = (len(self.reading.metrics), len(members), self.clean.shape[0])
                found = journal.done(name, shape) if journal else None
                if found is None:
                    found = self._measured(members)
                    if found is None:  # it did not fit
                        halves = self._halve(name, journal)
                        work |= {half: self._work(self.batches[half]) for half in self.batches}
                        queue = [one for one in self.batches if one in {*halves, *queue}]
                        continue
                    if journal:
                        journal.add(name, found)
                values[:, members] = found.to(values)
                done += len(members)
                bar.set_postfix_str(f", {done} of {len(self.variants)}", refresh=False)
                bar.update(work[name])
        return values

    def _work(self, members: Sequence[int]) -> int:
        """Rows times blocks: what the time left is estimated by."""
        n_layers, pos = self.model.cfg.n_layers, self.clean.shape[1]
        return sum((pos - self.start[i]) * (n_layers - self.variants[i].stage[0]) for i in members)

    def _measured(self, members: Sequence[int]) -> Float[Tensor, "metric variant batch"] | None:
        """A batch's values; None if there is no memory for it and it can be halved."""
        try:
            return self._together(members)
        except RuntimeError as error:
            if len(members) == 1 or not out_of_memory(error):
                raise
        if self.clean.final.is_cuda:  # outside the handler, whose traceback holds what was made
            torch.cuda.empty_cache()
        return None

    def _together(self, members: Sequence[int]) -> Float[Tensor, "metric variant batch"]:
        """Values of some variants; what is read before anything changes is the clean run's."""
        baseline = self.reading.baseline
        values = baseline[:, None].expand(-1, len(members), -1).clone()
        runner = Runner(self.model, self.clean)
        groups, places = [], []
        for start in dict.fromkeys(self.start[i] for i in members):
            place = [k for k, i in enumerate(members) if self.start[i] == start]
            at = self.reading.columns(start)
            if at is not None:
                groups.append(runner.group([self.variants[members[k]] for k in place], start, at))
                places.append(place)
        if groups:
            for group, place, streams in zip(groups, places, runner.run(groups), strict=True):
                values[:, place] = self.reading.measure(streams, group.read)
        return values

    def _halve(self, name: str, journal: plans.Journal | None) -> list[str]:
        """Batches as large as this one, and larger, as halves: what did not fit once would not fit again."""
        size, halves = self._bytes(self.batches[name]), []
        batches: plans.Batches = {}
        for other, members in self.batches.items():
            done = journal is not None and journal.has(other)
            if other < name or done or self._bytes(members) < size or len(members) == 1:
                batches[other] = members
                continue
            half = (len(members) + 1) // 2
            parts = {f"{other}a": members[:half], f"{other}b": members[half:]}
            batches |= parts
            halves += list(parts)
        self.batches = batches
        if journal is not None:
            journal.replan(batches)
        return halves


def room(device: torch.device) -> int:
    """Bytes that a batch of variants may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 3
    return min(MAX_BYTES, _available() // 4)


def _available() -> int:
    """Free memory in bytes where the system says (Linux), else plenty."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 * MAX_BYTES


def out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out, on a card or (where torch has no class for it) on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
