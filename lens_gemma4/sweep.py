"""Ablation and patching maps: every unit, one variant each, in a few runs' time.

`ablate` changes units of a run and `patch` puts one prompt's values into another's run; both measure a metric of the
logits under each change. What is the same in many variants is computed once (`variants`): answers agree with one
`run_with_hooks` each to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lens_gemma4 import interventions, lenses
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.interventions import Intervention, Place
from lens_gemma4.model import softcap
from lens_gemma4.variants import Clean, Runner, clean_run

MAX_BYTES = 2**29  # of a batch of variants' largest tensors, where free memory is not known
VOCAB_ROWS = 64  # streams whose whole logits stand at a time


class Logits:
    """The logits of one variant, computed where they are indexed: `logits[:, -1, 100]`.

    Indexed like a tensor `[batch pos d_vocab]`; a whole last axis computes whole rows.
    """

    def __init__(self, model: HookedModel, stream: Float[Tensor, "batch pos d_model"]) -> None:
        self.model, self.stream = model, stream
        self.shape = (*stream.shape[:2], model.cfg.d_vocab)

    def __getitem__(self, key: Any) -> Tensor:
        key = key if isinstance(key, tuple) else (key,)
        if any(part is Ellipsis or part is None for part in key) or len(key) > 3:
            return self.all()[key]
        places, words = key[:2], key[2] if len(key) == 3 else slice(None)
        if isinstance(words, slice) and words == slice(None):
            return lenses.project(self.model, self.stream[places])
        paired = _is_list(words) and any(_is_list(part) for part in places)
        return some_logits(self.model, self.stream[places], words, paired)

    def all(self) -> Float[Tensor, "batch pos d_vocab"]:
        return lenses.project(self.model, self.stream)


def _is_list(index: Any) -> bool:
    return isinstance(index, (list, Tensor)) or hasattr(index, "__array__")


def some_logits(
    model: HookedModel,
    stream: Float[Tensor, "... d_model"],
    words: Any,
    paired: bool,
    raw: bool = False,
) -> Tensor:
    """Logits of some words: of one for each stream (`paired`), or of all of them for every stream; `raw`, before the softcap."""
    read = model.ln_final.plain(stream)
    columns = model.unembedding[words]
    found = (read * columns).sum(-1) if paired or columns.ndim == 1 else read @ columns.T
    return found if raw else softcap(found, model.cfg.output_logits_soft_cap, own=True)


# -- metrics ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A number for each prompt, read at its last real token (or `positions`).

    Args:
        name: what it is, with its unit.
        of: from the model, streams `[row d_model]`, each row's prompt, and the clean streams `[batch d_model]`.
        positions: where it is read: "last", an int, or a mask `[batch pos]` with one True a row.
    """

    name: str
    of: Callable[[HookedModel, Tensor, Tensor, Tensor], Float[Tensor, " row"]]
    positions: Any = "last"


def logit_difference(
    answer: Any, versus: Any, positions: Any = "last", raw: bool = False
) -> Metric:
    """Logit of one token minus another's, after the softcap (or before it, `raw`). Ids: one for all, or one for each prompt."""

    def of(model: HookedModel, streams: Tensor, rows: Tensor, clean: Tensor) -> Tensor:
        ids = [_per_row(token, rows) for token in (answer, versus)]
        logits = [some_logits(model, streams, i, paired=True, raw=raw) for i in ids]
        return logits[0] - logits[1]

    return Metric("logit difference" + " before the softcap" * raw, of, positions)


def log_prob(answer: Any, positions: Any = "last") -> Metric:
    """Log-probability of a token, in nats."""

    def of(model: HookedModel, streams: Tensor, rows: Tensor, clean: Tensor) -> Tensor:
        return (
            _whole(model, streams).log_softmax(-1).gather(-1, _per_row(answer, rows)[:, None])[:, 0]
        )

    return Metric("log-probability (nats)", of, positions)


def prob(answer: Any, positions: Any = "last") -> Metric:
    """Probability of a token."""

    def of(model: HookedModel, streams: Tensor, rows: Tensor, clean: Tensor) -> Tensor:
        return log_prob(answer).of(model, streams, rows, clean).exp()

    return Metric("probability", of, positions)


def rank(answer: Any, positions: Any = "last") -> Metric:
    """How many tokens are likelier; 0 is the first choice."""

    def of(model: HookedModel, streams: Tensor, rows: Tensor, clean: Tensor) -> Tensor:
        logits = _whole(model, streams)
        own = logits.gather(-1, _per_row(answer, rows)[:, None])
        return (logits > own).sum(-1).to(logits.dtype)

    return Metric("rank", of, positions)


def kl_to_clean(positions: Any = "last") -> Metric:
    """KL(clean || variant) of the next-token distributions, in nats: 0 when nothing changed."""

    def of(model: HookedModel, streams: Tensor, rows: Tensor, clean: Tensor) -> Tensor:
        own, other = (_whole(model, x).log_softmax(-1) for x in (clean[rows], streams))
        return (own.exp() * (own - other)).sum(-1)

    return Metric("KL to clean (nats)", of, positions)


def _whole(model: HookedModel, streams: Tensor) -> Tensor:
    logits = lenses.project(model, streams)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _per_row(token: Any, rows: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
    ids = torch.as_tensor(token, device=rows.device)
    if ids.is_floating_point() or ids.ndim > 1:
        raise ValueError(f"a token is an id, or ids [batch], got {token!r}")
    return ids.expand(rows.shape) if ids.ndim == 0 or len(ids) == 1 else ids[rows]


# -- what comes back ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepResult:
    """A metric under each variant.

    Args:
        names: of the variants: "L3H2", "L3H2 @ 5", ...
        values: `[variant batch]`, in the metric's unit.
        baseline: `[batch]`, without any change.
        metric: its name.
        places: what each variant changed first.
    """

    names: list[str]
    values: Float[Tensor, "variant batch"]
    baseline: Float[Tensor, " batch"]
    metric: str
    places: list[Place]

    @property
    def effect(self) -> Float[Tensor, "variant batch"]:
        """`values - baseline`."""
        return self.values - self.baseline

    def mean(self) -> Float[Tensor, " variant"]:
        """Effects averaged over prompts."""
        return self.effect.mean(1)

    def interval(
        self, level: float = 0.95, draws: int = 1000, seed: int = 0
    ) -> Float[Tensor, "2 variant"]:
        """Bootstrap interval of `mean` over prompts: lower and upper end.

        Raises:
            ValueError: there is one prompt, which says nothing of others.
        """
        batch = self.values.shape[1]
        if batch < 2:
            raise ValueError("an interval over prompts needs several; there is one")
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(batch, (draws, batch), generator=generator)
        means = torch.stack([self.effect.cpu()[:, rows].mean(1) for rows in chosen])
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=means.dtype)
        return means.quantile(ends, dim=0)

    def grid(self) -> Float[Tensor, "layer unit"]:
        """Mean effects by block and unit, when each block has as many.

        Raises:
            ValueError: blocks differ in their number of units.
        """
        by_layer: dict[int, list[float]] = {}
        for place, value in zip(self.places, self.mean().tolist(), strict=True):
            by_layer.setdefault(place.layer, []).append(value)
        sizes = {layer: len(row) for layer, row in by_layer.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"blocks have different numbers of variants, so there is no grid: {sizes}"
            )
        return torch.tensor([by_layer[layer] for layer in sorted(by_layer)])

    def top(self, k: int = 10) -> list[tuple[str, float]]:
        """The k largest mean effects, whichever their sign."""
        named = zip(self.names, self.mean().tolist(), strict=True)
        return sorted(named, key=lambda one: -abs(one[1]))[:k]

    def to_dataframe(self) -> Any:
        """A pandas row for each variant and prompt: `variant layer point unit prompt value baseline effect`."""
        import pandas as pd

        rows = [
            (name, place.layer, place.point, place.unit, j, value, base, value - base)
            for name, place, row in zip(self.names, self.places, self.values.tolist(), strict=True)
            for j, (value, base) in enumerate(zip(row, self.baseline.tolist(), strict=True))
        ]
        columns = ["variant", "layer", "point", "unit", "prompt", "value", "baseline", "effect"]
        return pd.DataFrame(rows, columns=columns)

    def plot(self, k: int = 30) -> Any:
        """A plotly map of blocks and units where each block has as many of them, else the k largest as bars."""
        from lens_gemma4 import plots

        unit = f"change of {self.metric}"
        try:
            grid = self.grid()
        except ValueError:
            grid = None
        if grid is None or grid.shape[1] == 1:
            best = self.top(k)
            return plots.bars([value for _, value in best], [name for name, _ in best], unit=unit)
        rows, columns = ([str(i) for i in range(n)] for n in grid.shape)
        return plots.heatmap(
            grid.tolist(), rows, columns, row_title="block", column_title="variant", unit=unit
        )


# -- sweeps -------------------------------------------------------------------------------------------


@torch.no_grad()
def sweep(
    model: HookedModel,
    prompts: Any,
    variants: Sequence[Intervention],
    metric: Metric | Callable[[Logits], Any],
    *,
    batch_size: int | None = None,
    **inputs: Any,
) -> SweepResult:
    """A metric under each of some interventions.

    Args:
        prompts, inputs: what `forward` takes: texts, ids, a processor's output. All rows are of one padded length.
        variants: see `interventions`.
        metric: a `Metric`, or a function of `Logits` that gives a number, or one for each prompt.
        batch_size: variants that run together; by default what fits.
    Raises:
        ValueError: no variants; hooks or skipped blocks on the model.
        HookNameError: a point that this model does not have.
    """
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
    for one in variants:
        for edit in one.edits:
            model.hook_point(edit.where.hook)
    tensors = model.prepare(prompts, **inputs)
    if tensors.get("input_ids") is None:
        raise ValueError("a sweep needs prompts with ids: give text, ids or a processor's output")
    points = {edit.where.point for one in variants for edit in one.edits}
    clean = clean_run(model, tensors, sorted(points))
    reader = _Reader(model, clean, metric, _real(tensors))
    values = torch.empty(
        len(variants), clean.shape[0], dtype=reader.dtype, device=clean.final.device
    )
    groups: dict[int, list[int]] = {}
    for i, one in enumerate(variants):
        groups.setdefault(clean.first_changed(one.first_position()), []).append(i)
    with tqdm(total=len(variants), desc="variants", disable=None) as bar:
        for start, members in groups.items():
            runner = Runner(model, clean, start, reader.positions)
            size = batch_size or _fitting(model, clean, start)
            for chosen in _batches(sorted(members, key=lambda i: variants[i].stage), size):
                _run(runner, reader, variants, chosen, values)
                bar.update(len(chosen))
    places = [min((e.where for e in one.edits), key=lambda place: place.stage) for one in variants]
    return SweepResult(
        [one.name for one in variants], values, reader.baseline(), reader.name, places
    )


def _run(
    runner: Runner,
    reader: _Reader,
    variants: Sequence[Intervention],
    chosen: list[int],
    values: Tensor,
) -> None:
    """Fill in some variants; where memory runs out, half of them at a time."""
    try:
        streams = runner.run([variants[i] for i in chosen])
        values[torch.tensor(chosen, device=values.device)] = reader.measure(streams, runner.start)
    except torch.OutOfMemoryError:
        if len(chosen) == 1:
            raise
        half = len(chosen) // 2
        for part in (chosen[:half], chosen[half:]):
            _run(runner, reader, variants, part, values)


def _batches(members: list[int], size: int) -> Iterator[list[int]]:
    for i in range(0, len(members), size):
        yield members[i : i + size]


def _real(tensors: Mapping[str, Any]) -> Int[Tensor, "batch pos"]:
    mask = tensors.get("attention_mask")
    return torch.ones_like(tensors["input_ids"]) if mask is None else mask


def _fitting(model: HookedModel, clean: Clean, start: int) -> int:
    """Variants whose largest tensors fit into a share of the free memory."""
    cfg, (batch, pos) = model.cfg, clean.shape
    tail = pos - start
    widest = max(
        4 * layer.d_mlp + 6 * cfg.d_model + 2 * layer.n_heads * pos for layer in cfg.layers
    )
    each = batch * tail * widest * clean.final.element_size()
    room = MAX_BYTES
    if clean.final.is_cuda:
        room = torch.cuda.mem_get_info(clean.final.device)[0] // 3
    return max(1, room // each)


class _Reader:
    """Measures variants, and the clean run, by a metric."""

    def __init__(self, model: HookedModel, clean: Clean, metric: Any, real: Tensor) -> None:
        self.model, self.clean, self.metric = model, clean, metric
        self.dtype = torch.promote_types(model.dtype, torch.float32)
        self.positions = None
        if isinstance(metric, Metric):
            where = interventions.position_mask(metric.positions, real)
            if where is None or not bool((where.sum(1) == 1).all()):
                raise ValueError(
                    f"{metric.name} is read at one position a prompt, got {metric.positions!r}"
                )
            self.positions = where.long().argmax(1)[:, None]  # [batch 1]
            self.name = metric.name
            rows = torch.arange(len(real), device=real.device)
            self.own = clean.final[rows, self.positions[:, 0]]  # [batch d_model]
        else:
            self.name = getattr(metric, "__name__", type(metric).__name__)

    def measure(
        self, streams: Float[Tensor, "variant batch n d_model"], start: int
    ) -> Float[Tensor, "variant batch"]:
        if not isinstance(self.metric, Metric):
            before = self.clean.final[:, :start]
            return torch.stack([self._asked(torch.cat([before, one], 1)) for one in streams])
        n, batch = streams.shape[:2]
        flat = streams[:, :, 0].flatten(0, 1)
        rows = torch.arange(batch, device=flat.device).repeat(n)
        parts = zip(flat.split(VOCAB_ROWS), rows.split(VOCAB_ROWS), strict=True)
        found = [self.metric.of(self.model, x, r, self.own) for x, r in parts]
        return torch.cat(found).view(n, batch).to(self.dtype)

    def _asked(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, " batch"]:
        value = torch.as_tensor(self.metric(Logits(self.model, stream)), device=stream.device)
        if value.shape not in ((), (len(stream),)):
            raise ValueError(
                f"{self.name} gave {list(value.shape)}; a metric gives a number, or one for each of the {len(stream)} prompts"
            )
        return value.to(self.dtype).expand(len(stream))

    def baseline(self) -> Float[Tensor, " batch"]:
        if isinstance(self.metric, Metric):
            return self.measure(self.own[None, :, None], 0)[0]
        return self.measure(self.clean.final[None], 0)[0]


def ablate(
    model: HookedModel,
    prompts: Any,
    metric: Metric | Callable[[Logits], Any],
    *,
    units: str = "heads",
    mode: str | float = "zero",
    positions: Any = "all",
    reference: Any = None,
    batch_size: int | None = None,
    **inputs: Any,
) -> SweepResult:
    """A metric without each unit.

    Args:
        model, prompts, inputs, batch_size: as in `sweep`.
        metric: `logit_difference(...)`, `log_prob(...)`, `kl_to_clean()`, ..., or a function of `Logits`.
        units: "heads" (z), "queries", "keys", "values" (by key/value head), "neurons", "attn", "mlp" (what they add), "resid_pre",
            "resid_mid", "resid_post".
        mode: "zero"; "mean", of the unit over `reference`; or a number that the unit is multiplied by.
        positions: where the unit is changed: "all", "last", "each" (one at a time), ints, a slice or a mask `[batch pos]`.
        reference: prompts over which "mean" is taken, all positions together, pads and the first token left out; by default the
            prompts themselves.
    Returns:
        Variants in the order of the blocks, "L0H0", "L0H1", ...; with "each", "L0H0 @ 0", ...
    Raises:
        ValueError: no such unit, mode or position.

    >>> from lens_gemma4 import HookedModel
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ids = [model.to_single_token(word) for word in (" Paris", " Rome")]
    >>> found = ablate(model, "The capital of France is", logit_difference(*ids))
    >>> found.values.shape == (model.cfg.n_layers * model.cfg.n_heads, 1)
    True
    """
    tensors = model.prepare(prompts, **inputs)
    places = _existing(model, units)
    if isinstance(mode, str) and mode not in ("zero", "mean"):
        raise ValueError(f"mode is {mode!r}; use 'zero', 'mean' or a number to multiply by")
    real = _real(tensors)
    at = (
        None
        if isinstance(positions, str) and positions == "each"
        else interventions.position_mask(positions, real)
    )
    if mode == "mean":
        means = _means(model, tensors if reference is None else model.prepare(reference), units)
        chosen = [
            interventions.replaced(name, place, _unit(means[place.hook], place), at)
            for name, place in places
        ]
    else:
        factor = 0.0 if isinstance(mode, str) else float(mode)
        chosen = [interventions.scaled(name, place, factor, at) for name, place in places]
    if isinstance(positions, str) and positions == "each":
        chosen = interventions.at_each_position(chosen, len(real), real.shape[1], real.device)
    return sweep(model, None, chosen, metric, batch_size=batch_size, **tensors)


def patch(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Logits], Any],
    *,
    units: str = "resid_pre",
    positions: Any = "each",
    batch_size: int | None = None,
) -> SweepResult:
    """A metric of the corrupted run with each unit taken from the clean run: where is what makes the difference?

    Swap the two prompts for the other direction (noising). Both must have the same number of tokens.

    Args:
        clean, corrupted: what `forward` takes.
        units, positions, metric, batch_size: as in `ablate`.
    Raises:
        ValueError: prompts of unlike lengths.
    """
    given, base = model.prepare(clean), model.prepare(corrupted)
    sizes = [list(t["input_ids"].shape) for t in (given, base)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"clean is {sizes[0]} and corrupted {sizes[1]} [batch pos]: patching puts a position into the same position, so "
            "they must have the same shape"
        )
    names = [place.hook for _, place in _existing(model, units)]
    kept = model.run_and_store(**given, names_filter=sorted(set(names)))[1]
    real = _real(base)
    each = isinstance(positions, str) and positions == "each"
    at = None if each else interventions.position_mask(positions, real)
    chosen = [
        interventions.replaced(name, place, _unit(kept[place.hook], place), at)
        for name, place in _existing(model, units)
    ]
    if each:
        chosen = interventions.at_each_position(chosen, len(real), real.shape[1], real.device)
    return sweep(model, None, chosen, metric, batch_size=batch_size, **base)


def _existing(model: HookedModel, units: str) -> list[tuple[str, Place]]:
    """Units of a kind that this model has: a borrower has no keys of its own, say."""
    return [
        one for one in interventions.units_of(units, model.cfg) if one[1].hook in model.hook_dict
    ]


def _unit(value: Tensor, place: Place) -> Tensor:
    return value if place.unit is None else value[:, :, place.unit]


def _means(model: HookedModel, tensors: Mapping[str, Any], units: str) -> dict[str, Tensor]:
    """Each point's mean over real tokens but the first of each row, `[1 1 ...]`."""
    point, _ = interventions.UNITS[units]
    kept = model.run_and_store(**tensors, names_filter=f"blocks.*.{point}")[1]
    real = _real(tensors).bool()
    real = real & (real.long().cumsum(1) > 1)
    if not bool(real.any()):
        raise ValueError(
            "a mean needs prompts of more than one token: pads and each first token are left out"
        )
    return {name: value[real].mean(0)[None, None] for name, value in kept.items()}
