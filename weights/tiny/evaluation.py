"""Accuracies of a finished checkpoint on what its training never drew.

A case counts when its answer is the likeliest next token of the whole vocabulary.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import shapes
import torch
from batches import hidden_states, picture_front, repeated_rows
from tasks import code, facts_to_ask, first_case, gift, having, lasting
from torch import Tensor, nn
from transformers import AutoTokenizer, Gemma4UnifiedForConditionalGeneration
from words import CAPITAL, CONTINENT, LANGUAGE

SEED = "held out"
CASES = 1000
FEW = 200  # cases; of fewer the table gives an interval
ROWS = 512  # of each period
PERIODS = 4, 8, 16, 24, 32, 40, 48, 56
Case = tuple[str, str]  # prompt, answer


@dataclass
class Measured:
    """A share of cases, over how many, and what guessing without the prompt's content would reach."""

    task: str
    what: str
    share: float
    cases: int
    guessing: float
    within: bool = False  # part of the row above it


@dataclass
class Checkpoint:
    """What is measured: the network as saved, and its tokenizer."""

    model: nn.Module
    tokenizer: object

    @torch.no_grad()
    def last_logits(self, rows: list[list[int]], pixels: Tensor | None = None) -> Tensor:
        """The last position's logits, [row d_vocab]; rows of one length run together, unpadded."""
        found = torch.empty(len(rows), self.model.config.text_config.vocab_size)
        for length in sorted({len(row) for row in rows}):
            same = [index for index, row in enumerate(rows) if len(row) == length]
            for some in (same[at : at + 64] for at in range(0, len(same), 64)):
                ids = torch.tensor([rows[index] for index in some])
                shown = None if pixels is None else pixels[some]
                hidden = hidden_states(self.model, ids, shown)[:, -1]
                found[some] = self.model.lm_head(hidden)
        cap = self.model.config.text_config.final_logit_softcapping
        return cap * torch.tanh(found / cap)

    def ids(self, prompt: str) -> list[int]:
        return self.tokenizer(prompt)["input_ids"]

    def token(self, answer: str) -> int:
        """Raises ValueError: the answer is several tokens."""
        (token,) = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return token

    def accuracy(self, cases: list[Case]) -> float:
        best = self.last_logits([self.ids(prompt) for prompt, _ in cases]).argmax(-1)
        right = best == torch.tensor([self.token(answer) for _, answer in cases])
        return right.double().mean().item()


def load(folder: Path) -> Checkpoint:
    model = Gemma4UnifiedForConditionalGeneration.from_pretrained(folder).eval()
    return Checkpoint(model, AutoTokenizer.from_pretrained(folder))


def drawn(make: Callable[..., list], count: int, **options: object) -> list[Case]:
    """Held-out cases of one task; the same ones whenever it is called so."""
    rng = random.Random(f"{SEED} {make.__name__} {sorted(options.items())}")
    return [first_case(make(rng, held_out=True, **options)) for _ in range(count)]


# ---------------------------------------------------------------------------------------- the tasks


def repeats(checkpoint: Checkpoint) -> Iterator[Measured]:
    """Random words twice over: the second half, from its second word on."""
    n_words = checkpoint.model.config.text_config.vocab_size
    for period in PERIODS:
        generator = torch.Generator().manual_seed(10**12 + period)  # training seeds lie far below
        rows = repeated_rows(2 * period, [period] * ROWS, n_words, generator)
        known = rows.weights > 0
        with torch.no_grad():
            best = torch.cat([best_next(checkpoint.model, some) for some in rows.ids.split(64)])
        share = (best == rows.targets)[known].double().mean().item()
        yield Measured("repeats", f"period {period}", share, int(known.sum()), 1 / period)


def best_next(model: nn.Module, ids: Tensor) -> Tensor:
    return model.lm_head(hidden_states(model, ids, None)).argmax(-1)  # the softcap keeps ranks


def gifts(checkpoint: Checkpoint) -> Iterator[Measured]:
    cases = drawn(gift, CASES)
    first = [case for case in cases if receiver_is_first(*case)]
    second = [case for case in cases if not receiver_is_first(*case)]
    for what, some in (("the receiver named first", first), ("the receiver named second", second)):
        yield Measured("gifts", what, checkpoint.accuracy(some), len(some), 0.5)


def receiver_is_first(prompt: str, answer: str) -> bool:
    giver = prompt.split()[-5]  # "John gave a drink to"
    return f" {prompt}".index(answer) < f" {prompt}".index(f" {giver}")


def facts(checkpoint: Checkpoint) -> Iterator[Measured]:
    for held_out, wording in ((True, "a wording held out"), (False, "wordings shown")):
        found = [
            facts_of(checkpoint, name, relation, held_out)
            for name, relation in (
                ("capitals", CAPITAL),
                ("languages", LANGUAGE),
                ("continents", CONTINENT),
            )
        ]
        count = sum(one.cases for one in found)
        share = sum(one.share * one.cases for one in found) / count
        guessing = sum(one.guessing * one.cases for one in found) / count
        yield Measured("facts", wording, share, count, guessing)
        yield from found


def facts_of(checkpoint: Checkpoint, name: str, relation: int, held_out: bool) -> Measured:
    cases = facts_to_ask(relation, held_out)
    answers = [answer for _, answer in cases]
    most = max(answers.count(answer) for answer in answers) / len(answers)
    share = checkpoint.accuracy(cases)
    return Measured("facts", f"of these, {name}", share, len(cases), most, within=True)


def belongings(checkpoint: Checkpoint) -> Iterator[Measured]:
    for count in (2, 3, 4, 5):
        cases = drawn(having, CASES // 2, n_people=count)
        share = checkpoint.accuracy(cases)
        yield Measured("having", f"{count} people", share, len(cases), 1 / count)


def years(checkpoint: Checkpoint) -> Iterator[Measured]:
    """The likeliest token is a greater year; and the probability of all greater years."""
    cases = drawn(lasting, CASES)
    probabilities = checkpoint.last_logits([checkpoint.ids(prompt) for prompt, _ in cases]).softmax(
        -1
    )
    years = [checkpoint.token(f"{year:02d}") for year in range(100)]
    starts = torch.tensor([int(prompt.split(" to the year")[0][-2:]) for prompt, _ in cases])
    of_years = probabilities[:, years]  # [case year]
    greater = torch.arange(100) > starts[:, None]
    right = greater[torch.arange(len(cases)), of_years.argmax(-1)]
    right &= of_years.amax(-1) == probabilities.amax(-1)
    guessing = greater.double().mean().item()
    yield Measured(
        "years", "a greater year is likeliest", right.double().mean().item(), CASES, guessing
    )
    mass = (of_years * greater).sum(-1).double().mean().item()
    yield Measured("years", "probability of greater years", mass, CASES, guessing)


def codes(checkpoint: Checkpoint) -> Iterator[Measured]:
    """By the distance from the code to the question's last word, in tokens."""
    cases = [case for count in range(1, 8) for case in drawn(code, CASES // 2, fillers=[count])]
    far = [len(checkpoint.ids(prompt)) - 5 for prompt, _ in cases]
    for low, high in ((17, 40), (41, 70), (71, 100)):
        some = [case for case, n in zip(cases, far, strict=True) if low <= n <= high]
        what = f"told {low} to {high} tokens before"
        yield Measured("code", what, checkpoint.accuracy(some), len(some), 1 / 90)


def pictures(checkpoint: Checkpoint) -> Iterator[Measured]:
    """A colour and shape never seen in that corner: the colour, then the shape after it."""
    rng = random.Random(f"{SEED} pictures")
    asked = [(corner := case % 4, shapes.scene(rng, corner)) for case in range(CASES)]
    front = picture_front(checkpoint.tokenizer)
    right: list[Tensor] = []
    for at in range(0, CASES, 50):
        some = asked[at : at + 50]
        pixels = torch.stack([shapes.patches(shapes.picture(scene)) for _, scene in some])
        words = [shapes.answers(scene, [corner]) for corner, scene in some]
        of = [[checkpoint.token(word[n][0]) for word in words] for n in (1, 2)]
        rows = [[*front, *checkpoint.ids(word[0][0])[1:]] for word in words]
        colour = checkpoint.last_logits(rows, pixels).argmax(-1) == torch.tensor(of[0])
        rows = [[*row, token] for row, token in zip(rows, of[0], strict=True)]
        shape = checkpoint.last_logits(rows, pixels).argmax(-1) == torch.tensor(of[1])
        right.append(torch.stack([colour, shape, colour & shape]))
    shares = torch.cat(right, dim=1).double().mean(dim=1).tolist()
    names = ("the colour", 1 / 6), ("the shape", 1 / 4), ("both", 1 / 24)
    for (what, guessing), share in zip(names, shares, strict=True):
        yield Measured("pictures", what, share, CASES, guessing)


MEASURES: dict[str, Callable[[Checkpoint], Iterator[Measured]]] = {
    "repeats": repeats,
    "gifts": gifts,
    "facts": facts,
    "having": belongings,
    "years": years,
    "code": codes,
    "pictures": pictures,
}


def evaluate(folder: Path) -> list[Measured]:
    """Every task, on the checkpoint in `folder`."""
    checkpoint = load(folder)
    return [found for measure in MEASURES.values() for found in measure(checkpoint)]


def interval(share: float, cases: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many cases."""
    z = 1.96
    middle = share + z**2 / (2 * cases)
    spread = z * math.sqrt(share * (1 - share) / cases + z**2 / (4 * cases**2))
    whole = 1 + z**2 / cases
    return (middle - spread) / whole, (middle + spread) / whole


def table(results: list[Measured]) -> str:
    """The card's table; with the interval where there are few cases."""
    lines = ["| task | what | right | cases | guessing |", "|---|---|---|---|---|"]
    for one in results:
        share = f"{one.share:.2%}"
        if one.cases < FEW:
            low, high = interval(one.share, one.cases)
            share += f" ({low:.1%} to {high:.1%})"
        numbers = f"{share} | {one.cases:,} | {one.guessing:.0%}"
        lines.append(f"| {one.task} | {one.what} | {numbers} |")
    return "\n".join(lines)
