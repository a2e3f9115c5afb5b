"""The prompts that the ground truth is measured on: held-out cases of each task, each beside one that asks for another answer.

Prompts of a task are of one length, so that means and patches go by position. `places` says where in
a prompt stands what a head could read, by name.
"""

import io
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import shapes
from batches import picture_front
from tasks import (
    CODES,
    FACTS,
    code,
    code_is_held_out,
    fact_of,
    first_case,
    gift,
    having,
    held_out_template,
    lasting,
)
from transformers import PreTrainedTokenizerFast
from words import CAPITAL, CORNERS, COUNTRIES

from lens_gemma4.ground_truth import Task

SEED = "ground truth"
CASES, PICTURE_CASES = 48, 32
LAST = "the last token"
Places = dict[str, list[int]]


@dataclass(frozen=True)
class Case:
    """A prompt and its counterpart, as in `Task`, which holds lists of these."""

    text: str
    corrupt: str
    answers: list[str]
    versus: list[str]
    places: Places
    scene: list[shapes.Drawn] | None = None
    corrupt_scene: list[shapes.Drawn] | None = None


class Reader:
    """What a checkpoint's tokenizer makes of texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.spaced = sorted(
            word.replace("▁", " ")
            for word in tokenizer.get_vocab()
            if word.startswith("▁") and word[1:].isascii() and word[1:].isalpha()
        )

    def words(self, text: str) -> list[str]:
        """Tokens of a text, BOS first, without spaces."""
        ids = self.tokenizer(text)["input_ids"]
        return [self.tokenizer.decode([i]).strip() for i in ids]


def draw(task: str, tokenizer: PreTrainedTokenizerFast) -> Task:
    """A task's prompts, the same ones whenever it is called so, all of the commonest length."""
    reader, pictures = Reader(tokenizer), task in ("colour", "shape")
    rng = random.Random(f"{SEED} {'pictures' if pictures else task}")
    make, count = MAKERS[task], PICTURE_CASES if pictures else CASES
    if task == "facts":
        cases = every_fact(reader, rng)
    else:
        cases = of_one_length([make(reader, rng) for _ in range(count if pictures else 8 * count)])
    cases = cases[:count]
    names = cases[0].places
    return Task(
        task,
        *([getattr(one, key) for one in cases] for key in ("text", "corrupt", "answers", "versus")),
        places={name: [one.places[name] for one in cases] for name in names},
        by_probability=task == "years",
        pictures=[png(one.scene) for one in cases] if pictures else None,
        corrupt_pictures=[png(one.corrupt_scene) for one in cases] if pictures else None,
        image_tokens=shapes.BUDGET if pictures else None,
    )


def of_one_length(cases: list[Case]) -> list[Case]:
    lengths = [case.places[LAST][0] for case in cases]
    ((most, _),) = Counter(lengths).most_common(1)
    return [case for case, length in zip(cases, lengths, strict=True) if length == most]


def png(scene: list[shapes.Drawn]) -> bytes:
    file = io.BytesIO()
    shapes.picture(scene).save(file, "PNG", optimize=True)
    return file.getvalue()


# --------------------------------------------------------------------------------------------- repeats

LENGTH, PERIODS = 41, range(23, 32)  # what is to be read lies beyond the sliding window


def repeat(reader: Reader, rng: random.Random) -> Case:
    """Random words that come again; in the counterpart the last one stood elsewhere the first time."""
    period = rng.choice(PERIODS)
    once = rng.sample(reader.spaced, period)
    words = ["", *(once[i % period] for i in range(LENGTH - 1))]  # BOS in front
    last, first = LENGTH - 1, LENGTH - 1 - period
    other = rng.randrange(first + 2, period)  # not seen again, and something follows it
    corrupt = list(words)
    corrupt[first], corrupt[other] = words[other], words[first]
    places = {
        "the last token, the first time": [first],
        "what followed it": [first + 1],
        "the exchanged token": [other],
        "what followed the exchanged token": [other + 1],
        LAST: [last],
    }
    text = "".join(words)
    assert len(reader.words(text)) == LENGTH
    return Case(text, "".join(corrupt), [words[first + 1]], [words[other + 1]], places)


# ----------------------------------------------------------------------------------------------- gifts


def given(reader: Reader, rng: random.Random) -> Case:
    """In the counterpart the other one gives."""
    text, receiver = first_case(gift(rng, held_out=True))
    words = reader.words(text)
    last = len(words) - 1
    again = last - 4  # "John gave a drink to"
    giver, named = words[again], receiver.strip()
    at = text.rindex(giver)
    places = {
        "the receiver's name": [words.index(named)],
        "the giver's name, the first time": [words.index(giver)],
        "the giver's name, the second time": [again],
        "the verb": [again + 1],
        'the word "a"': [again + 2],
        "the thing": [again + 3],
        LAST: [last],
    }
    corrupt = f"{text[:at]}{named}{text[at + len(giver) :]}"
    return Case(text, corrupt, [receiver], [f" {giver}"], places)


# ----------------------------------------------------------------------------------------------- facts


def every_fact(reader: Reader, rng: random.Random) -> list[Case]:
    """The capital of each country, in the wording that training never showed for it; counterparts name another country."""
    cases = []
    for country in COUNTRIES:
        template = held_out_template(country, CAPITAL)
        other = rng.choice([one for one in COUNTRIES if one != country])
        text, answer = first_case(fact_of(country, CAPITAL, template))
        corrupt, versus = first_case(fact_of(other, CAPITAL, template))
        words = reader.words(text)
        at, last = words.index(country), len(words) - 1
        places = {
            "what comes before the country": list(range(1, at)),
            "the country": [at],
            "what comes after the country": list(range(at + 1, last)),
            LAST: [last],
        }
        cases.append(Case(text, corrupt, [answer], [versus], places))
    assert len({one.places[LAST][0] for one in cases}) == 1, FACTS[CAPITAL]
    return cases


# ---------------------------------------------------------------------------------------------- having

PEOPLE = 4


def had(reader: Reader, rng: random.Random) -> Case:
    """In the counterpart the one who is asked for and another are named in each other's place."""
    text, answer = first_case(having(rng, held_out=True, n_people=PEOPLE))
    words = reader.words(text)
    names, things = words[1:-3:5], words[4:-3:5]
    asked = names.index(words[-3])
    other = rng.choice([i for i in range(PEOPLE) if i != asked])
    swapped = list(names)
    swapped[asked], swapped[other] = names[other], names[asked]
    told = " ".join(f"{n} has a {t}." for n, t in zip(swapped, things, strict=True))
    at, there, last = 1 + 5 * asked, 1 + 5 * other, len(words) - 1
    places = {
        "the name, as told": [at],
        "the words before its thing": [at + 1, at + 2],
        "its thing": [at + 3],
        "the other's name": [there],
        "the words before the other's thing": [there + 1, there + 2],
        "the other's thing": [there + 3],
        "the name, as asked": [last - 2],
        "the word after it": [last - 1],
        LAST: [last],
    }
    corrupt = f"{told} {names[asked]} has a"
    return Case(text, corrupt, [answer], [f" {things[other]}"], places)


# ----------------------------------------------------------------------------------------------- years

FIRST, STEP = (
    30,
    25,
)  # of the years that are asked about; how much earlier a counterpart begins at least


def later(reader: Reader, rng: random.Random) -> Case:
    """In the counterpart the first year is earlier, so that more years may follow."""
    start = 0
    while start < FIRST:
        text, _ = first_case(lasting(rng, held_out=True))
        words = reader.words(text)
        at = words.index("to") - 1
        start = int(words[at])
    head, tail = text.split(" to the year")
    corrupt = f"{head[:-2]}{rng.randint(2, start - STEP):02d} to the year{tail}"
    years = [f"{year:02d}" for year in range(100)]
    last = len(words) - 1
    places = {
        "the first century": [at - 1],
        "the first year": [at],
        "what comes between": list(range(at + 1, last)),
        LAST: [last],
    }
    return Case(text, corrupt, years[start + 1 :], years[: start + 1], places)


# ------------------------------------------------------------------------------------------------ code

FILLERS = 3


def told(reader: Reader, rng: random.Random) -> Case:
    """In the counterpart another code is told."""
    text, answer = first_case(code(rng, held_out=True, fillers=[FILLERS]))
    versus = rng.choice([f" {c}" for c in CODES if code_is_held_out(c) and f" {c}" != answer])
    words = reader.words(text)
    at, last = words.index(answer.strip()), len(words) - 1
    places = {
        "the code": [at],
        "the full stop after it": [at + 1],
        "the words of the question": [last - 2, last - 1],
        LAST: [last],
    }
    return Case(text, text.replace(answer, versus, 1), [answer], [versus], places)


# -------------------------------------------------------------------------------------------- pictures


def seen(reader: Reader, rng: random.Random, kind: str) -> Case:
    """In the counterpart the shape that is asked for and one in another corner have changed places."""
    while True:
        corner = rng.randrange(len(CORNERS))
        other = rng.choice([i for i in range(len(CORNERS)) if i != corner])
        scene = shapes.scene(rng, corner)
        one, two = scene[corner], scene[other]
        if one.colour != two.colour and one.shape != two.shape:
            break
    exchanged = list(scene)
    exchanged[corner] = replace(one, colour=two.colour, shape=two.shape)
    exchanged[other] = replace(two, colour=one.colour, shape=one.shape)
    asked, said = shapes.question(corner), [one.colour, two.colour]
    texts = [f"<|image|>{asked}"] * 2
    if kind == "shape":
        texts = [f"{text} {word}" for text, word in zip(texts, said, strict=True)]
    front = picture_front(reader.tokenizer)
    start = front.index(reader.tokenizer.convert_tokens_to_ids("<|image|>"))
    patches = [start + patch_of(drawn) for drawn in scene]
    words = len(front) + len(reader.words(asked)) - 2  # " is"; BOS is in both
    places = {
        "the shape's patch": [patches[corner]],
        "the other shapes' patches": [p for i, p in enumerate(patches) if i != corner],
        'the words "the shape at the"': list(range(len(front), words - 2)),
        "the corner's two words": [words - 2, words - 1],
    }
    places |= {LAST: [words]} if kind == "colour" else {'the word "is"': [words], LAST: [words + 1]}
    answer, versus = (f" {getattr(drawn, kind)}" for drawn in (one, two))
    return Case(*texts, [answer], [versus], places, scene, exchanged)


def patch_of(one: shapes.Drawn) -> int:
    across = shapes.SIDE // shapes.PATCH
    return one.top // shapes.PATCH * across + one.left // shapes.PATCH


MAKERS: dict[str, Callable[..., Case | list[Case]]] = {
    "repeats": repeat,
    "gifts": given,
    "facts": every_fact,
    "having": had,
    "years": later,
    "code": told,
    "colour": lambda reader, rng: seen(reader, rng, "colour"),
    "shape": lambda reader, rng: seen(reader, rng, "shape"),
}
