"""What solves each task of the shipped checkpoint, and how well a tool finds it.

`load("tiny")` has prompts of each task, with answers, wrong answers, counterparts of the same length and the positions of what
matters in them; and the heads that were found to matter, each by how much. `score` compares a map of yours with these.
`weights/tiny/ground_truth.py` found them, and says how.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lens_gemma4 import loading, plans
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.loading import CheckpointError
from lens_gemma4.metrics import Metric, Read
from lens_gemma4.results import SweepResult

FILE = "ground_truth.json"


class Head(NamedTuple):
    """A head that matters to a task.

    Args:
        at, reads: the places of the prompt (`Task.places`) where it matters, and that it attends to from there.
        pattern: how much of its attention goes there, 0 to 1.
        share: of the logit difference: what the head adds when heads are put back one after another, averaged over orders
            (its Shapley value), all heads together being 1.
        alone: the task's score with this head alone at its mean.
        restored: how far the counterpart's run comes to the prompt's own when it gets this head's values from it, 0 to 1.
        role: the same in words.
    """

    layer: int
    head: int
    at: str
    reads: str
    pattern: float
    share: float
    alone: float
    restored: float
    role: str

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"


class Mlp(NamedTuple):
    """What an MLP gives to a task; `share`, `alone` and `restored` as of a head."""

    layer: int
    share: float
    alone: float
    restored: float


@dataclass(frozen=True, repr=False)
class Task:
    """A task's prompts, and what solves them.

    Args:
        name: "repeats", "gifts", ...
        prompts, corrupt: texts, each prompt beside one of as many tokens that asks for another answer.
        answers: for each prompt the tokens that are right after it: one, or of years all that are later.
        versus: those that are right after `corrupt`, or of years all others.
        places: positions of each prompt by name: "the code", "the last token", ...
        statement: what solves the task, in words.
        heads: those that matter, the largest share first.
        minor: heads that do a little or work against the answer; `score` leaves them out.
        mlps: every block's.
        measured: further figures, by name; see weights/tiny/ground_truth.py.
        recovered_by: how well the tools of this package found `heads` when the file was made.
        by_probability: the task's score is the probability of its answers, not whether one is likeliest.
        pictures, corrupt_pictures: PNG files, one for each prompt.
    """

    name: str
    prompts: list[str]
    corrupt: list[str]
    answers: list[list[str]]
    versus: list[list[str]]
    places: dict[str, list[list[int]]]
    statement: str = ""
    heads: list[Head] = field(default_factory=list)
    minor: list[tuple[int, int]] = field(default_factory=list)
    mlps: list[Mlp] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    recovered_by: dict[str, Any] = field(default_factory=dict)
    by_probability: bool = False
    pictures: list[bytes] | None = None
    corrupt_pictures: list[bytes] | None = None
    image_tokens: int | None = None
    weights: str | None = None

    def inputs(self, model: HookedModel) -> Any:
        """The prompts as `forward`, `ablate` and the others take them.

        Raises:
            CheckpointError: a model of other weights than those that this is the truth about.
        """
        return self._prepared(model, self.prompts, self.pictures)

    def corrupted(self, model: HookedModel) -> Any:
        """The counterparts, likewise."""
        return self._prepared(model, self.corrupt, self.corrupt_pictures)

    def _prepared(self, model: HookedModel, texts: list[str], pictures: list[bytes] | None) -> Any:
        check(model, self.weights)
        if pictures is None:
            return model.prepare(texts)
        images = [[opened(picture)] for picture in pictures]
        return model.prepare(texts, images=images, image_tokens=self.image_tokens)

    def some(self, count: int) -> Task:
        """The first `count` prompts alone, for a quicker look; all, where there are fewer.

        Raises:
            ValueError: fewer than one.
        """
        if count < 1:
            raise ValueError(
                f"some({count}) asks for no prompt; {self.name} has {len(self.prompts)}"
            )
        pictures, other = self.pictures, self.corrupt_pictures
        return replace(
            self,
            prompts=self.prompts[:count],
            corrupt=self.corrupt[:count],
            answers=self.answers[:count],
            versus=self.versus[:count],
            places={place: rows[:count] for place, rows in self.places.items()},
            pictures=None if pictures is None else pictures[:count],
            corrupt_pictures=None if other is None else other[:count],
        )

    def metric(self, model: HookedModel) -> Metric:
        """Mean logit of `answers` minus mean logit of `versus` at the last position, after the softcap."""
        weights = self._contrast(model)

        def of(read: Read) -> Float[Tensor, " row"]:
            return (read.whole * _rows(weights, read)).sum(-1)

        return Metric("logit difference", of)

    def score(self, model: HookedModel) -> Metric:
        """Whether an answer is the likeliest token, 0 or 1; of years the probability of all answers."""
        right = _chosen(model, self.answers)

        def of(read: Read) -> Float[Tensor, " row"]:
            rows = _rows(right, read)
            if self.by_probability:
                return (read.log_probs.exp() * rows).sum(-1)
            return rows.gather(1, read.whole.argmax(-1)[:, None])[:, 0].to(read.whole)

        return Metric("probability of answers" if self.by_probability else "accuracy", of)

    def direction(self, model: HookedModel) -> Float[Tensor, "batch 1 d_model"]:
        """What `metric` reads, before the softcap, in the final norm's output: for `attribution.Target(direction=...)`."""
        return (self._contrast(model).to(model.W_U) @ model.W_U.T)[:, None]

    def _contrast(self, model: HookedModel) -> Float[Tensor, "batch d_vocab"]:
        """Weights of each prompt's tokens: answers against the others."""
        right, wrong = (_chosen(model, words) for words in (self.answers, self.versus))
        return right / right.sum(1, keepdim=True) - wrong / wrong.sum(1, keepdim=True)

    def where(self, place: str) -> Bool[Tensor, "batch pos"]:
        """True at a place of each prompt.

        Raises:
            ValueError: no such place.
        """
        if place not in self.places:
            raise ValueError(f"{self.name} has no place {place!r}; it has {', '.join(self.places)}")
        mask = torch.zeros(len(self.prompts), self.length, dtype=torch.bool)
        for row, positions in enumerate(self.places[place]):
            mask[row, positions] = True
        return mask

    @property
    def length(self) -> int:
        """Of a prompt, in tokens; all have the same."""
        return 1 + max(p for rows in self.places.values() for row in rows for p in row)

    def truth(self, heads: Sequence[Head] | None = None) -> Float[Tensor, "layer head"]:
        """1 on heads that matter, 0 on others, nan on those in between; with `heads`, some of this task's, nan on its others too.

        Raises:
            ValueError: one of `heads` is none of this task's.
        """
        mine = [one.name for one in self.heads]
        strangers = [one.name for one in heads or () if one.name not in mine]
        if strangers:
            raise ValueError(
                f"{', '.join(strangers)}: not among the heads of {self.name!r}, which are {', '.join(mine)}"
            )
        layers = [mlp.layer for mlp in self.mlps]
        n_heads = self.measured["heads in a block"]
        mask = torch.zeros(len(layers), n_heads)
        for layer, head in [*self.minor, *((one.layer, one.head) for one in self.heads)]:
            mask[layer, head] = torch.nan
        for one in self.heads if heads is None else heads:
            mask[one.layer, one.head] = 1
        return mask

    def at(self, place: str) -> list[Head]:
        """The heads that matter at a place."""
        return [head for head in self.heads if head.at == place]

    def reading(self, place: str) -> list[Head]:
        """The heads that read a place."""
        return [head for head in self.heads if head.reads == place]

    @property
    def sources(self) -> dict[str, list[str]]:
        """What is read, and the names of the heads that read it."""
        reads = dict.fromkeys(head.reads for head in self.heads)
        return {place: [head.name for head in self.reading(place)] for place in reads}

    def __repr__(self) -> str:
        named = ", ".join(head.name for head in self.heads)
        return f"Task {self.name!r}, {len(self.prompts)} prompts: {self.statement} Heads: {named}"


class GroundTruth(Mapping[str, Task]):
    """Every task of a checkpoint, by name.

    Args:
        tasks: them.
        checkpoint: sha256 of the weights' file.
    """

    def __init__(self, tasks: dict[str, Task], checkpoint: str) -> None:
        self.tasks, self.checkpoint = tasks, checkpoint

    def __getitem__(self, name: str) -> Task:
        if name not in self.tasks:
            raise KeyError(f"no task {name!r}; there are {', '.join(self.tasks)}")
        return self.tasks[name]

    def __iter__(self) -> Any:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {task.statement}" for name, task in self.tasks.items())


# -- the file -----------------------------------------------------------------------------------------


def load(name_or_path: str | Path = "tiny") -> GroundTruth:
    """The ground truth that lies beside a checkpoint's weights.

    Args:
        name_or_path: "tiny", or a folder.
    Raises:
        FileNotFoundError: the folder has none.
        CheckpointError: it is about other weights than those beside it.

    >>> truth = load("tiny")
    >>> len(truth["code"].prompts) == len(truth["code"].corrupt)
    True
    """
    folder = loading.resolve(name_or_path)
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {FILE}: what solves its tasks is not known")
    about = json.loads((folder / FILE).read_text(encoding="utf-8"))
    found = sha256(folder / "model.safetensors")
    if found != about["checkpoint"]:
        raise CheckpointError(
            f"{FILE} is about weights with sha256 {about['checkpoint'][:12]}..., those in {folder} have {found[:12]}...: heads "
            "differ from training to training, so make it again (python weights/tiny/ground_truth.py)"
        )
    pictures = [base64.b64decode(text) for text in about["pictures"]]
    tasks = {name: _task(name, row, pictures, about) for name, row in about["tasks"].items()}
    return GroundTruth(tasks, about["checkpoint"])


def _task(
    name: str, row: Mapping[str, Any], pictures: Sequence[bytes], about: Mapping[str, Any]
) -> Task:
    prompts = row["prompts"]

    def shown(key: str) -> list[bytes] | None:
        return [pictures[i] for i in prompts[key]] if key in prompts else None

    return Task(
        name=name,
        prompts=prompts["texts"],
        corrupt=prompts["corrupt"],
        answers=prompts["answers"],
        versus=prompts["versus"],
        places=prompts["places"],
        statement=row["statement"],
        heads=[Head(**head) for head in row["heads"]],
        minor=[(layer, head) for layer, head in row["minor"]],
        mlps=[Mlp(**mlp) for mlp in row["mlps"]],
        measured=row["measured"],
        recovered_by=row["recovered_by"],
        by_probability=row["by_probability"],
        pictures=shown("pictures"),
        corrupt_pictures=shown("corrupt_pictures"),
        image_tokens=prompts.get("image_tokens"),
        weights=about["weights"],
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(model: HookedModel, weights: str | None) -> None:
    """Refuse a model of other weights; None takes any. Dtypes that hold float32 exactly are the same weights."""
    if weights is None:
        return
    found = plans.of_weights(model, torch.float32)
    if found != weights:
        raise CheckpointError(
            f"this model's weights are not those that this is the truth about (their hash is {found[:12]}..., not "
            f'{weights[:12]}...): use HookedModel.from_pretrained("tiny") of this installation, in float32 or float64'
        )


def opened(picture: bytes) -> Any:
    """A PNG file as a PIL image."""
    from PIL import Image

    return Image.open(io.BytesIO(picture)).convert("RGB")


def _chosen(model: HookedModel, words: Sequence[Sequence[str]]) -> Float[Tensor, "batch d_vocab"]:
    """1 at each prompt's tokens."""
    chosen = torch.zeros(len(words), model.cfg.d_vocab, device=model.device)
    for row, some in enumerate(words):
        chosen[row, [model.to_single_token(word) for word in some]] = 1
    return chosen


def _rows(values: Float[Tensor, "batch d_vocab"], read: Read) -> Float[Tensor, "row d_vocab"]:
    """Each row's prompt's."""
    if len(values) != read.slots.total:
        raise ValueError(
            f"this metric is of a task's {len(values)} prompts, and the run has {read.slots.total}: take inputs and metric of one task, "
            "with as many prompts"
        )
    prompts: Int[Tensor, " row"] = read.slots.prompt[read.slot] + read.slots.first
    return values[prompts]


# -- how well a tool finds it -------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """How well a map, or a list, finds the heads that matter.

    Args:
        auc: the probability that a head that matters comes before one that does not; 0.5 by luck.
        auc_spread: standard deviation of `auc` by luck.
        precision: of the first `k` heads, the share that matters; among equals, as by luck.
        k: as many as matter, or as the list holds.
        chance: `precision` by luck.
        missed: heads that matter and are not among the first `k`; `wrong`: the other way round. Equals in the order of the blocks.
    """

    auc: float
    auc_spread: float
    precision: float
    k: int
    chance: float
    missed: list[str]
    wrong: list[str]


def score(
    found: Any, task: Task | str, heads: Sequence[Head] | None = None, largest: str = "any"
) -> Recovery:
    """How well a tool's answer agrees with what is known to solve a task.

    Args:
        found: a map `[layer head]` of importance, or a `SweepResult` of heads, ranked by size; or heads, the most important first:
            `[(3, 2), ...]`, `["L3H2", ...]` or such as `task.heads` holds.
        task: one of `load("tiny")`, or its name.
        heads: those to be found, where a tool looks for some of `task.heads` alone: `task.reading("the code")`; the others
            then do not count either way.
        largest: what is important in a map: numbers of either sign ("any"), or the highest ("highest").
    Raises:
        ValueError: a map of another shape, with numbers that are none, or an empty list; `heads` of another task.

    >>> truth = load("tiny")["code"]
    >>> score([(head.layer, head.head) for head in truth.heads], truth).precision
    1.0
    """
    task = load("tiny")[task] if isinstance(task, str) else task
    truth = task.truth(heads)
    if largest not in ("any", "highest"):
        raise ValueError(f"largest is {largest!r}; use 'any' or 'highest'")
    strength, listed = _strength(found, truth, largest)
    counted = ~truth.isnan()
    if not bool((truth == 1).any()) or not bool((truth == 0).any()):
        raise ValueError(f"{task.name} has no head to find, or no other: there is nothing to rank")
    yes, no = strength[truth == 1], strength[truth == 0]
    wins = (yes[:, None] > no).double() + 0.5 * (yes[:, None] == no).double()
    some = [at for at in listed if counted[at]] if listed is not None else None
    k = min(len(yes), len(some)) if some is not None else len(yes)
    first = _first(strength, counted, k)
    matter = {tuple(at) for at in (truth == 1).nonzero().tolist()}
    n_yes, n_no = len(yes), len(no)
    return Recovery(
        auc=wins.mean().item(),
        auc_spread=math.sqrt((n_yes + n_no + 1) / (12 * n_yes * n_no)),
        precision=_share_first(strength, truth, k),
        k=k,
        chance=n_yes / (n_yes + n_no),
        missed=[f"L{i}H{j}" for i, j in sorted(matter - set(first))],
        wrong=[f"L{i}H{j}" for i, j in first if (i, j) not in matter],
    )


def _strength(
    found: Any, truth: Float[Tensor, "layer head"], largest: str
) -> tuple[Float[Tensor, "layer head"], list[tuple[int, int]] | None]:
    """A number for each head, the largest the most important; and the heads, where a list was given."""
    if isinstance(found, SweepResult):
        if list(found.axes) != ["layer", "head"]:
            raise ValueError(f"a map of heads has axes layer and head, this one {list(found.axes)}")
        found = found.grid()
    if isinstance(found, Tensor) or hasattr(found, "__array__"):
        values = torch.as_tensor(found).detach().double().cpu()
        if values.shape != truth.shape:
            raise ValueError(f"a map is {list(truth.shape)} [layer head], got {list(values.shape)}")
        if not bool(values[~truth.isnan()].isfinite().all()):
            raise ValueError("the map has numbers that are not finite: they cannot be ranked")
        return (values.abs() if largest == "any" else values), None
    places = [_place(one, truth) for one in found]
    if not places or len(set(places)) < len(places):
        raise ValueError("the list of heads is empty, or holds one twice")
    values = torch.zeros(truth.shape, dtype=torch.float64)
    for number, at in enumerate(places):
        values[at] = len(places) - number
    return values, places


def _place(head: Any, truth: Tensor) -> tuple[int, int]:
    if isinstance(head, Head):
        head = (head.layer, head.head)
    try:
        if isinstance(head, str):
            layer, _, number = head.removeprefix("L").partition("H")
            head = (int(layer), int(number))
        i, j = map(operator.index, head)
    except (TypeError, ValueError):
        raise ValueError(
            f"a head is (layer, head) or 'L3H2', got {head!r}; a map is a tensor or an array"
        ) from None
    if not (0 <= i < truth.shape[0] and 0 <= j < truth.shape[1]):
        raise ValueError(f"there is no head {i, j} among {list(truth.shape)} [layer head]")
    return i, j


def _share_first(
    strength: Float[Tensor, "layer head"], truth: Float[Tensor, "layer head"], k: int
) -> float:
    """Of the k strongest heads that count the share that matters, averaged over the orders of equals."""
    if k == 0:
        return 0.0
    last = strength[~truth.isnan()].sort(descending=True).values[k - 1]
    before, equal = strength > last, strength == last
    matter, counted = truth == 1, ~truth.isnan()
    left = k - int((before & counted).sum())
    share = (equal & matter).sum() / (equal & counted).sum()
    return (int((before & matter).sum()) + left * share.item()) / k


def _first(
    strength: Float[Tensor, "layer head"], counted: Bool[Tensor, "layer head"], k: int
) -> list[tuple[int, int]]:
    """The k strongest heads that count; equals in the order of the blocks."""
    flat = strength.masked_fill(~counted, -math.inf).flatten()
    order = flat.argsort(descending=True, stable=True)[:k].tolist()
    return [divmod(i, strength.shape[1]) for i in order]


__all__ = ["GroundTruth", "Head", "Mlp", "Recovery", "Task", "load", "score"]
