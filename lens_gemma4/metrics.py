"""What a sweep measures: numbers of the logits at the positions that they are read from, and no logits elsewhere.

A `Metric` is read at some positions of each prompt and averaged over them; any function of `Logits` will do as well.
Units: logits are after the softcap unless `raw`; probabilities and divergences in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4 import interventions, lenses
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.identities import fingerprint, plain
from lens_gemma4.model import softcap

MAX_BYTES = 2**28  # of whole rows of logits at a time


class Logits(Tensor):
    """The logits of one variant, computed where they are indexed: `logits[:, -1, 100]`.

    A tensor `[batch pos d_vocab]` to whoever asks. An index computes what it names, a whole last axis whole rows; its shape
    costs nothing; used otherwise (arithmetic, methods, torch functions) it is the whole tensor, computed once.
    """

    model: HookedModel
    stream: Tensor

    def __new__(cls, model: HookedModel, stream: Float[Tensor, "batch pos d_model"]) -> Logits:
        # One NaN behind every entry: what read it past `__torch_function__` could not be taken for logits.
        nothing = stream.detach().new_full((), torch.nan)
        view = nothing.expand(*stream.shape[:2], model.cfg.d_vocab).as_subclass(cls)
        view.model, view.stream = model, stream
        return view

    def __getitem__(self, key: Any) -> Tensor:
        key = key if isinstance(key, tuple) else (key,)
        if not _picks_rows_and_columns(key):
            return self.whole[key]
        places, words = key[:2], key[2] if len(key) == 3 else slice(None)
        if isinstance(words, slice) and words == slice(None):
            return lenses.project(self.model, self.stream[places])
        paired = _is_list(words) and any(_is_list(part) for part in places)
        return some_logits(self.model, self.stream[places], words, paired)

    @cached_property
    def whole(self) -> Float[Tensor, "batch pos d_vocab"]:
        return lenses.project(self.model, self.stream)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _OF_SHAPE:
            return super().__torch_function__(function, types, args, kwargs or {})
        return function(*_tensors(args), **_tensors(kwargs or {}))


_OF_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__),
}


def _tensors(value: Any) -> Any:
    """Views as the tensors they stand for, wherever they are among arguments."""
    if isinstance(value, Logits):
        return value.whole
    if isinstance(value, (list, tuple)):
        return type(value)(_tensors(part) for part in value)
    if isinstance(value, dict):
        return {key: _tensors(part) for key, part in value.items()}
    return value


def _picks_rows_and_columns(key: tuple[Any, ...]) -> bool:
    """Whether an index takes streams first and words of these after; others torch itself sorts out."""
    lists = [torch.as_tensor(part) if _is_list(part) else None for part in key]
    odd = (
        part is Ellipsis or part is None or isinstance(part, (bool, tuple, range)) for part in key
    )
    if len(key) > 3 or any(odd):
        return False
    if any(part is not None and part.dtype == torch.bool and part.ndim > 1 for part in lists):
        return False  # a mask stands for several axes
    if len(key) < 3 or lists[2] is None:
        return True
    if lists[0] is not None and isinstance(key[1], slice):
        return False  # lists on both sides of a slice come out before it
    return lists[2].ndim < 2 or lists[0] is not None or lists[1] is not None


def _is_list(index: Any) -> bool:
    """Whether an index has an axis: a number in a tensor has none."""
    return isinstance(index, list) or getattr(index, "ndim", 0) > 0


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
    if raw:
        return found
    return softcap(found[..., None], model.cfg.output_logits_soft_cap, own=True)[..., 0]


# -- metrics ------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """Places that metrics read: a position of a prompt each.

    Args:
        prompt, position: where it is.
        clean: the clean run's last stream there.
        next_id: the token that follows; -1 at the end.
        first, total: the number of prompt 0 among all prompts, and how many these are, where tokens are given by prompt.
    """

    prompt: Int[Tensor, " slot"]
    position: Int[Tensor, " slot"]
    clean: Float[Tensor, "slot d_model"]
    next_id: Int[Tensor, " slot"]
    first: int = 0
    total: int = 1

    def some(self, chosen: Int[Tensor, " n"]) -> Slots:
        return self._replace(
            prompt=self.prompt[chosen],
            position=self.position[chosen],
            clean=self.clean[chosen],
            next_id=self.next_id[chosen],
        )


class Read:
    """Last streams in which metrics read, and what follows from them, made once.

    Args:
        streams: `[row d_model]`.
        slots, slot: where they stand, and which of these each row is.
    """

    def __init__(self, model: HookedModel, streams: Tensor, slots: Slots, slot: Tensor) -> None:
        self.model, self.streams, self.slots, self.slot = model, streams, slots, slot

    def per_row(self, token: Any) -> Int[Tensor, " row"]:
        """An id for each row, from one for all or one for each prompt."""
        if isinstance(token, str):
            raise ValueError(
                f"a token is an id, got {token!r}: give model.to_single_token({token!r})"
            )
        ids = torch.as_tensor(token, device=self.slot.device)
        prompt = self.slots.prompt[self.slot] + self.slots.first
        if ids.is_floating_point() or ids.ndim > 1:
            raise ValueError(f"a token is an id, or ids [batch], got {token!r}")
        if bool((ids < 0).any()) or bool((ids >= self.model.cfg.d_vocab).any()):
            raise ValueError(f"a token is an id below {self.model.cfg.d_vocab}, got {token!r}")
        if ids.ndim and len(ids) not in (1, self.slots.total):
            raise ValueError(
                f"there are {len(ids)} ids of tokens and {self.slots.total} prompts: give one, or one each"
            )
        return ids.expand(prompt.shape) if ids.ndim == 0 or len(ids) == 1 else ids[prompt]

    def logits(self, token: Any, raw: bool = False) -> Float[Tensor, " row"]:
        return some_logits(self.model, self.streams, self.per_row(token), paired=True, raw=raw)

    @cached_property
    def whole(self) -> Float[Tensor, "row d_vocab"]:
        return _wide(lenses.project(self.model, self.streams))

    @cached_property
    def log_probs(self) -> Float[Tensor, "row d_vocab"]:
        return self.whole.log_softmax(-1)

    @cached_property
    def clean_log_probs(self) -> Float[Tensor, "row d_vocab"]:
        used, back = self.slot.unique(return_inverse=True)
        clean = lenses.project(self.model, self.slots.clean[used])
        return _wide(clean).log_softmax(-1)[back]


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


@dataclass(frozen=True)
class Metric:
    """A number for each prompt: the mean over the positions it is read at.

    Args:
        name: what it is, with its unit.
        of: a number for each row of a `Read`.
        positions: where it is read: "last" (each prompt's last real token), an int, ints, a mask `[batch pos]`, "all" (every
            real token) or "targets" (those that a real token follows).
        arguments: what it was made with, for the record.
    """

    name: str
    of: Callable[[Read], Float[Tensor, " row"]]
    positions: Any = "last"
    arguments: Mapping[str, Any] = field(default_factory=dict)


def logit_difference(
    answer: Any, versus: Any, positions: Any = "last", raw: bool = False
) -> Metric:
    """Logit of one token minus another's, after the softcap (or before it, `raw`). Ids: one for all, or one for each prompt.

    >>> from lens_gemma4 import HookedModel, ablate
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = logit_difference(*(model.to_single_token(word) for word in (" Paris", " Rome")))
    >>> bool(ablate(model, "The capital of France is", ask, layers=[0]).baseline > 0)
    True
    """
    return Metric(
        "logit difference" + " before the softcap" * raw,
        lambda read: read.logits(answer, raw) - read.logits(versus, raw),
        positions,
        {"answer": answer, "versus": versus, "raw": raw},
    )


def logit(answer: Any, positions: Any = "last", raw: bool = False) -> Metric:
    """Logit of a token, after the softcap (or before it, `raw`).

    >>> logit(7, positions="last", raw=True).name
    'logit before the softcap'
    """
    return Metric(
        "logit" + " before the softcap" * raw,
        lambda read: read.logits(answer, raw),
        positions,
        {"answer": answer, "raw": raw},
    )


def log_prob(answer: Any, positions: Any = "last") -> Metric:
    """Log-probability of a token, in nats.

    >>> from lens_gemma4 import HookedModel, ablate
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = log_prob(model.to_single_token(" Paris"))
    >>> bool(ablate(model, "The capital of France is", ask, layers=[0]).baseline > -1)
    True
    """
    return Metric(
        "log-probability (nats)",
        lambda read: _picked(read.log_probs, read.per_row(answer)),
        positions,
        {"answer": answer},
    )


def prob(answer: Any, positions: Any = "last") -> Metric:
    """Probability of a token.

    >>> from lens_gemma4 import HookedModel, ablate
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = prob(model.to_single_token(" Paris"))
    >>> bool(ablate(model, "The capital of France is", ask, layers=[0]).baseline > 0.5)
    True
    """
    return Metric(
        "probability",
        lambda read: _picked(read.log_probs, read.per_row(answer)).exp(),
        positions,
        {"answer": answer},
    )


def rank(answer: Any, positions: Any = "last") -> Metric:
    """How many tokens are likelier; 0 is the first choice.

    >>> from lens_gemma4 import HookedModel, ablate
    >>> model = HookedModel.from_pretrained("tiny")
    >>> ask = rank(model.to_single_token(" Paris"))
    >>> ablate(model, "The capital of France is", ask, layers=[0]).baseline.tolist()
    [0.0]
    """

    def of(read: Read) -> Tensor:
        own = _picked(read.whole, read.per_row(answer))
        return (read.whole > own[:, None]).sum(-1).to(read.whole.dtype)

    return Metric("rank", of, positions, {"answer": answer})


def kl_to_clean(positions: Any = "last") -> Metric:
    """KL(clean || variant) of the next-token distributions, in nats: 0 when nothing changed.

    >>> from lens_gemma4 import HookedModel, ablate
    >>> model = HookedModel.from_pretrained("tiny")
    >>> same = ablate(model, "The capital of France is", kl_to_clean(), layers=[0], mode=1.0)
    >>> bool(same.effect.abs().max() < 1e-4)
    True
    """

    def of(read: Read) -> Tensor:
        clean = read.clean_log_probs
        return (clean.exp() * (clean - read.log_probs)).sum(-1)

    return Metric("KL to clean (nats)", of, positions)


def loss() -> Metric:
    """Mean next-token loss of each prompt, in nats, over the targets that `model(..., return_type="loss")` counts.

    >>> from lens_gemma4 import HookedModel, ablate
    >>> model = HookedModel.from_pretrained("tiny")
    >>> text = "The capital of France is Paris."
    >>> found = ablate(model, text, loss(), layers=[0])
    >>> bool((found.baseline - model(text, return_type="loss")).abs().max() < 1e-4)
    True
    """
    return Metric(
        "loss (nats)",
        lambda read: -_picked(read.log_probs, read.slots.next_id[read.slot]),
        "targets",
    )


def _picked(values: Float[Tensor, "row d_vocab"], ids: Int[Tensor, " row"]) -> Tensor:
    return values.gather(-1, ids[:, None])[:, 0]


Measure = Metric | Callable[[Logits], Any]
Metrics = Measure | Sequence[Measure] | Mapping[str, Measure]


def named(metric: Metrics) -> dict[str, Measure]:
    """Metrics by name: one, a list, or a dictionary with names of your own.

    Raises:
        ValueError: two of one name, or none.
    """
    if isinstance(metric, str):
        raise ValueError(f"metric is {metric!r}: give the metric itself, as log_prob(7)")
    if isinstance(metric, Mapping):
        found = dict(metric)
    else:
        each = [metric] if isinstance(metric, Metric) or callable(metric) else list(metric)
        found = {name_of(one): one for one in each}
        if len(found) < len(each):
            raise ValueError(
                f"metrics need names that differ, got {[name_of(one) for one in each]}: give a dictionary"
            )
    for name, one in found.items():
        if not isinstance(one, Metric) and not callable(one):
            raise ValueError(f"metric {name!r} is neither a Metric nor a function, but {one!r}")
    if not found:
        raise ValueError("there is no metric to measure")
    return found


def is_one(metric: Metrics) -> bool:
    """Whether it is one metric, not several."""
    return isinstance(metric, Metric) or callable(metric)


def name_of(metric: Measure) -> str:
    if isinstance(metric, Metric):
        return metric.name
    return getattr(metric, "__name__", type(metric).__name__)


def identity(metric: Measure) -> dict[str, Any]:
    """What tells a metric from others, as JSON takes it: a function by what it does and what it does it with.

    Without a `code`, where something it uses cannot be told from another.
    """
    if isinstance(metric, Metric):
        given = {name: plain(value) for name, value in metric.arguments.items()}
        return {
            "name": metric.name,
            "positions": plain(metric.positions),
            "code": "ours" if metric.of.__module__ == __name__ else fingerprint(metric.of),
            **given,
        }
    return {"name": name_of(metric), "code": fingerprint(metric)}


# -- reading ------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Metrics that are read at the same places."""

    slots: Slots
    metrics: dict[int, Metric]  # by their place among all


class Prompts(NamedTuple):
    """What metrics must know of a batch of prompts.

    Args:
        real: True on tokens that are no padding.
        next_id, is_target: the token after each, and whether a loss counts it.
        first, total: the first of them among all prompts, and how many these are.
    """

    real: Bool[Tensor, "batch pos"]
    next_id: Int[Tensor, "batch pos"]
    is_target: Bool[Tensor, "batch pos"]
    first: int = 0
    total: int | None = None

    def rows(self, rows: slice) -> Prompts:
        return Prompts(
            self.real[rows], self.next_id[rows], self.is_target[rows], rows.start, len(self.real)
        )


class Reading:
    """Some metrics of a batch of prompts: where they read, and their values in the clean run.

    Args:
        final: the clean run's last stream `[batch pos d_model]`.
    """

    def __init__(
        self, model: HookedModel, metrics: Mapping[str, Measure], final: Tensor, prompts: Prompts
    ) -> None:
        self.model, self.final, self.metrics = model, final, list(metrics.items())
        self.dtype = torch.promote_types(final.dtype, torch.float32)
        self.groups = self._grouped(prompts)
        self.asks_all = any(not isinstance(metric, Metric) for _, metric in self.metrics)
        whole = torch.arange(final.shape[1], device=final.device).expand(len(final), -1)
        self._clean = [self._values(group, final[None], whole) for group in self.groups]
        self.baseline = self.measure(final[None], whole)[:, 0]  # [metric batch]

    def _grouped(self, prompts: Prompts) -> list[Group]:
        groups: list[tuple[Tensor, Group]] = []
        for i, (_, metric) in enumerate(self.metrics):
            if not isinstance(metric, Metric):
                continue
            where = self._where(metric, prompts)
            for known, group in groups:
                if torch.equal(known, where):
                    group.metrics[i] = metric
                    break
            else:
                prompt, position = where.nonzero(as_tuple=True)
                at = (prompt, position)
                total = prompts.total or len(prompts.real)
                slots = Slots(
                    prompt, position, self.final[at], prompts.next_id[at], prompts.first, total
                )
                groups.append((where, Group(slots, {i: metric})))
        return [group for _, group in groups]

    def _where(self, metric: Metric, prompts: Prompts) -> Bool[Tensor, "batch pos"]:
        if isinstance(metric.positions, str) and metric.positions == "targets":
            where: Tensor | None = prompts.is_target
        else:
            positions = metric.positions
            if (
                isinstance(positions, Tensor)
                and positions.ndim == 2
                and len(positions) == prompts.total
            ):
                positions = positions[prompts.first : prompts.first + len(prompts.real)]
            where = interventions.position_mask(positions, prompts.real.long())
        where = prompts.real if where is None else where
        empty = (~where.any(1)).nonzero()[:, 0].tolist()
        if empty:
            raise ValueError(
                f"{metric.name} is read nowhere in prompts {empty}: it has no value there"
            )
        return where

    def columns(self, start: int) -> Int[Tensor, "batch n"] | None:
        """Positions from `start` on whose last stream is needed, some of them twice where prompts differ; None, if none is."""
        batch, pos = self.final.shape[:2]
        every = torch.arange(start, pos, device=self.final.device)
        if self.asks_all:
            return every.expand(batch, -1)
        wanted = torch.zeros(batch, pos, dtype=torch.bool, device=self.final.device)
        for group in self.groups:
            wanted[group.slots.prompt, group.slots.position] = True
        wanted[:, :start] = False
        width = int(wanted.sum(1).max())
        if not width:
            return None
        order = (
            (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        )  # wanted ones first
        return torch.where(wanted.gather(1, order), order, order[:, :1].clamp(min=start))

    def measure(
        self, streams: Float[Tensor, "variant batch n d_model"], at: Int[Tensor, "batch n"]
    ) -> Float[Tensor, "metric variant batch"]:
        """Metrics of variants whose last streams stand at positions `at`, and are the clean run's at earlier ones."""
        out = streams.new_empty(len(self.metrics), *streams.shape[:2], dtype=self.dtype)
        for group, clean in zip(self.groups, self._clean, strict=True):
            found = self._values(group, streams, at, clean)
            for row, i in enumerate(group.metrics):
                out[i] = self._averaged(found[row], group.slots)
        for i, (name, metric) in enumerate(self.metrics):
            if not isinstance(metric, Metric):
                out[i] = torch.stack([self._asked(name, metric, one, at) for one in streams])
        return out

    def _values(
        self, group: Group, streams: Tensor, at: Tensor, clean: Tensor | None = None
    ) -> Float[Tensor, "metric variant slot"]:
        """Each metric at each slot; before the first position of `at` they are the clean run's."""
        slots, variants = group.slots, len(streams)
        column = at.new_zeros(self.final.shape[:2]).scatter_(
            1, at, torch.arange(at.shape[1], device=at.device).expand_as(at)
        )
        live = (slots.position >= at.min()).nonzero()[:, 0]
        if clean is not None and not len(live):
            return clean.expand(-1, variants, -1)
        chosen = slots.some(live)
        x = streams[:, chosen.prompt, column[chosen.prompt, chosen.position]].transpose(0, 1)
        rows = torch.arange(len(live), device=at.device).repeat_interleave(variants)
        size = max(1, MAX_BYTES // (4 * self.model.cfg.d_vocab * x.element_size()))
        parts = [
            torch.stack([metric.of(read).to(self.dtype) for metric in group.metrics.values()])
            for read in (
                Read(self.model, part, chosen, row)
                for part, row in zip(x.flatten(0, 1).split(size), rows.split(size), strict=True)
            )
        ]
        found = torch.cat(parts, 1).unflatten(1, (-1, variants)).transpose(1, 2)
        if clean is None or len(live) == len(slots.prompt):
            return found
        out = clean.expand(-1, variants, -1).clone()
        out[:, :, live] = found
        return out

    def _averaged(
        self, values: Float[Tensor, "variant slot"], slots: Slots
    ) -> Float[Tensor, "variant batch"]:
        total = values.new_zeros(len(values), len(self.final)).index_add(1, slots.prompt, values)
        return total / slots.prompt.bincount(minlength=len(self.final))

    def _asked(
        self, name: str, metric: Callable[[Logits], Any], stream: Tensor, at: Tensor
    ) -> Float[Tensor, " batch"]:
        stream = torch.cat([self.final[:, : int(at[0, 0])], stream], 1)
        value = metric(Logits(self.model, stream))
        if value is None:
            raise ValueError(f"{name} gave None; a metric gives a number, or one for each prompt")
        value = torch.as_tensor(value, device=stream.device)
        if value.shape not in ((), (len(stream),)):
            raise ValueError(
                f"{name} gave {list(value.shape)}; a metric gives a number, or one for each of the {len(stream)} prompts"
            )
        return value.to(self.dtype).expand(len(stream))


def prompts_of(model: HookedModel, tensors: Mapping[str, Any]) -> Prompts:
    """From a prepared call's tensors."""
    ids = tensors["input_ids"]
    mask = tensors.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    is_target = torch.zeros_like(real)
    is_target[:, :-1] = model.loss_targets(ids, mask)
    next_id = torch.full_like(ids, -1)
    next_id[:, :-1] = ids[:, 1:]
    return Prompts(real, next_id, is_target)
