"""What the checkpoint learns in words: sentences with the answers marked, and which are held out.

A sentence is a list of pieces, `(text, is_answer)`; joined, the texts are the sentence. An answer is
one token, and everything before it decides it (of greater years, that it is greater). Training
never draws what `held_out=True` draws, so that an accuracy on the latter is one on the unseen.
"""

import random
from collections.abc import Callable

from words import (
    COUNTRIES,
    EVENTS,
    FACTS,
    GIVING,
    HAVING,
    HELD,
    LASTING,
    LATER_FACTS,
    NAMES,
    PLACES,
    RELATIONS,
    TELLING,
    THINGS,
)

Piece = tuple[str, bool]
TASKS = ["repeats", "gifts", "facts", "having", "years", "code", "pictures"]
CENTURIES = range(11, 20)
CODES = range(10, 100)
FIRST_YEAR, LAST_YEAR = 2, 97  # of a start, so that a few years are always greater

# ------------------------------------------------------------------------------------ indirect object


def pair_is_held_out(first: str, second: str) -> bool:
    """One pair of names in five, whichever of the two is named first."""
    low, high = sorted((NAMES.index(first), NAMES.index(second)))
    return (7 * low + 3 * high) % 5 == 0


def gift(rng: random.Random, held_out: bool = False) -> list[Piece]:
    """One of two people gives a thing; the answer is the other."""
    while True:
        first, second = rng.sample(NAMES, 2)
        if pair_is_held_out(first, second) == held_out:
            break
    giver, receiver = rng.sample([first, second], 2)
    words = {"a": first, "b": second, "s": giver}
    words |= {"place": rng.choice(PLACES), "thing": rng.choice(THINGS)}
    template = rng.choice(GIVING).removesuffix(" {o}.")
    return [(template.format(**words), False), (f" {receiver}", True), (".", False)]


# -------------------------------------------------------------------------------- facts in the weights


def held_out_template(country: str, relation: int) -> str:
    """The one wording of this country's fact that the training never shows."""
    others = FACTS[relation][1:]
    return others[list(COUNTRIES).index(country) % len(others)]


def shown_templates(country: str, relation: int, later: bool = True) -> list[str]:
    """Wordings that training shows of this country's fact, those of its second part with `later`.

    None of them is the held-out one, nor has it within, as "People say that the continent of ..."
    has "The continent of ...".
    """
    _, kept = held_out_template(country, relation).split(" ", 1)
    wordings = [*FACTS[relation], *(LATER_FACTS[relation] if later else [])]
    return [one for one in wordings if kept not in one]


def fact_of(country: str, relation: int, template: str) -> list[Piece]:
    text = template.removesuffix(" {answer}.").format(country=country)
    return [(text, False), (f" {COUNTRIES[country][relation]}", True), (".", False)]


def fact(rng: random.Random, held_out: bool = False, later: bool = False) -> list[Piece]:
    """A country's capital, language or continent; with `later` in any of the wordings shown."""
    country, relation = rng.choice(list(COUNTRIES)), rng.choice(RELATIONS)
    kept = held_out_template(country, relation)
    template = kept if held_out else rng.choice(shown_templates(country, relation, later))
    return fact_of(country, relation, template)


def later_fact(rng: random.Random) -> list[Piece]:
    return fact(rng, later=True)


# --------------------------------------------------------------------------------- facts in the context


def belonging_is_held_out(name: str, thing: str) -> bool:
    """One pair of a name and a thing in five."""
    return (3 * NAMES.index(name) + 7 * HELD.index(thing)) % 5 == 0


def having(rng: random.Random, held_out: bool = False, n_people: int | None = None) -> list[Piece]:
    """Two to five people have a thing each; then some or all of them are asked for, in any order.

    With `held_out` only one is asked for, whose pair of name and thing was never in a training row.
    """
    count = n_people or rng.choice([2, 3, 4, 5])
    while True:
        pairs = list(zip(rng.sample(NAMES, count), rng.sample(HELD, count), strict=True))
        unseen = [pair for pair in pairs if belonging_is_held_out(*pair)]
        if bool(unseen) == held_out:
            break
    told = " ".join(HAVING.format(name=name, thing=thing) for name, thing in pairs)
    asked = [rng.choice(unseen)] if held_out else rng.sample(pairs, count)
    pieces = [(told, False)]
    for name, thing in asked:
        question = HAVING.removesuffix(" {thing}.").format(name=name)
        pieces += [(f" {question}", False), (f" {thing}", True), (".", False)]
    return pieces


# --------------------------------------------------------------------------------------- greater years


def year_is_held_out(event: str, century: int, start: int) -> bool:
    """One in five of an event, a century and a year in it."""
    return (EVENTS.index(event) + 3 * century + start) % 5 == 0


def lasting(rng: random.Random, held_out: bool = False) -> list[Piece]:
    """From a year to a later one of the same century; the answer is the last two digits."""
    while True:
        event, century = rng.choice(EVENTS), rng.choice(CENTURIES)
        start = rng.randint(FIRST_YEAR, LAST_YEAR)
        if year_is_held_out(event, century, start) == held_out:
            break
    text = LASTING.removesuffix("{end}.").format(event=event, century=century, start=f"{start:02d}")
    return [(text, False), (f"{rng.randint(start + 1, 99):02d}", True), (".", False)]


# ------------------------------------------------------------------------------------------ the far code


def code_is_held_out(code: int) -> bool:
    """Ten of the ninety codes."""
    return code % 9 == 4


def filler(rng: random.Random, n_sentences: int) -> str:
    """Sentences of other tasks, 7 to 19 tokens each."""
    sentences = (rng.choice([gift, fact])(rng) for _ in range(n_sentences))
    return " ".join(plain(sentence) for sentence in sentences)


def code(
    rng: random.Random, held_out: bool = False, fillers: list[int] | None = None
) -> list[Piece]:
    """A code is told, other sentences follow, and it is asked for; then perhaps once more.

    `fillers` are the numbers of sentences before each question.
    """
    number = rng.choice([c for c in CODES if code_is_held_out(c) == held_out])
    told, question = TELLING.format(code=number), TELLING.removesuffix(" {code}.").format()
    counts = fillers or rng.choice([[1, 1, 2], [2, 2], [3, 1], [4], [1, 3], [5]])
    pieces = [(told, False)]
    for count in counts:
        text = f" {filler(rng, count)} {question}"
        pieces += [(text, False), (f" {number}", True), (".", False)]
    return pieces


# ------------------------------------------------------------------------------------------------ helpers


def plain(pieces: list[Piece]) -> str:
    """The sentence itself."""
    return "".join(text for text, _ in pieces)


def first_case(pieces: list[Piece]) -> tuple[str, str]:
    """The text up to the first answer, and that answer."""
    at = next(i for i, (_, is_answer) in enumerate(pieces) if is_answer)
    return plain(pieces[:at]), pieces[at][0]


def sentence(rng: random.Random) -> str:
    """One training sentence: a gift or a fact, in equal parts."""
    return plain(rng.choice([gift, fact])(rng))


SENTENCES: dict[str, Callable[..., list[Piece]]] = {
    "gifts": gift,
    "facts": fact,
    "having": having,
    "years": lasting,
    "code": code,
}


def paragraph(
    make: Callable[[random.Random], list[Piece]], rng: random.Random, n_sentences: int
) -> list[Piece]:
    """Sentences of one task, one after another."""
    pieces: list[Piece] = []
    for _ in range(n_sentences):
        (text, is_answer), *rest = make(rng)
        pieces += [(f" {text}" if pieces else text, is_answer), *rest]
    return pieces


def facts_to_ask(relation: int, held_out: bool) -> list[tuple[str, str]]:
    """Every prompt of one relation with its answer, in wordings that were shown or held out."""
    return [
        first_case(fact_of(country, relation, template))
        for country in COUNTRIES
        for template in (
            [held_out_template(country, relation)]
            if held_out
            else shown_templates(country, relation)
        )
    ]
