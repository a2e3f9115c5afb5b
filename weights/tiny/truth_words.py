"""What solves each task, in words: each statement is written from what was measured, and every claim in it is tested.

A statement whose claim does not hold of the weights is not written: `statement` says which.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from truth_search import ELSEWHERE, RESTORED, WITHOUT_BLOCK

from lens_gemma4.ground_truth import Head, Task

LAST = "the last token"
SURE, MOST, FEW = 0.95, 0.8, 0.15


class Claims:
    """What a statement says, and whether it holds."""

    def __init__(self, task: Task) -> None:
        self.task, self.broken = task, list[str]()
        self.said: set[Head] = set()  # heads that the statement names

    def holds(self, fact: bool, what: str) -> None:
        if not fact:
            self.broken.append(what)

    def some(self, heads: Sequence[Head], what: str) -> list[Head]:
        """Heads that a statement names: there must be some."""
        self.holds(bool(heads), f"there are {what}")
        return list(heads)

    def names(self, heads: Iterable[Head]) -> str:
        """`names`, and these have been told of."""
        heads = list(heads)
        self.said |= set(heads)
        return names(heads)

    def before(self, first: Sequence[Head], then: Sequence[Head], what: str) -> None:
        """Somewhere one head comes before another."""
        early = min((head.layer for head in first), default=99)
        late = max((head.layer for head in then), default=-1)
        self.holds(early < late, what)

    def full(self, heads: Sequence[Head]) -> None:
        layers = {head.layer for head in heads}
        self.holds(layers <= set(self.task.measured["full blocks"]), f"full blocks read, {layers}")

    def beyond_window(self, source: str) -> None:
        last = [row[0] for row in self.task.places[LAST]]
        far = min(p - row[0] for p, row in zip(last, self.task.places[source], strict=True))
        self.holds(far >= self.task.measured["window"], f"{source} lies beyond the window")

    def cut(self, place: str, most: float) -> float:
        """The score when nothing reads a place."""
        score = self.task.measured["score when nothing reads"][place]
        self.holds(score <= most, f"without reading {place} at most {most:.0%}: {score:.1%}")
        return score


def names(heads: Iterable[Head]) -> str:
    """Heads by block: "heads 0 and 1 of block 0", "all heads of blocks 3 and 7"."""
    by_layer: dict[int, list[int]] = {}
    for head in sorted(heads):
        by_layer.setdefault(head.layer, []).append(head.head)
    by_heads: dict[tuple[int, ...], list[int]] = {}
    for layer, some in by_layer.items():
        by_heads.setdefault(tuple(some), []).append(layer)
    parts = []
    for some, layers in by_heads.items():
        head = "head" if len(some) == 1 else "heads"
        block = "block" if len(layers) == 1 else "blocks"
        parts.append(f"{head} {listed(some)} of {block} {listed(layers)}")
    return listed(parts)


def listed(parts: Sequence[object]) -> str:
    if not parts:
        return "none"
    *first, last = map(str, parts)
    return f"{', '.join(first)} and {last}" if first else last


def pays(heads: Sequence[Head]) -> str:
    """How much of their attention, on average."""
    return f"{fmean(head.pattern for head in heads):.0%} of their attention" if heads else "nothing"


def percent(value: float) -> str:
    return f"{value:.0%}" if value in (0, 1) else f"{value:.1%}"


# ------------------------------------------------------------------------------------------- by the task


def repeats(claims: Claims) -> str:
    task = claims.task
    readers = claims.some(task.reading("what followed it"), "heads that read what followed")
    places = ("what followed it", "what followed the exchanged token", ELSEWHERE)
    known = ("the last token, the first time", "the exchanged token", "the token before")
    before = [h for h in task.heads if h.at in places and h.reads in known]
    claims.some(before, "heads that read the token before")
    claims.before(before, readers, "the token before is read first")
    claims.full(readers)
    claims.beyond_window("what followed it")
    cut = claims.cut("what followed it", FEW)
    return (
        f"Induction in two steps: {claims.names(before)} read the token before ({pays(before)}), so that each token knows what it follows; "
        f"{claims.names(readers)} look from the last token to what followed the same token the first time ({pays(readers)}) and say "
        f"it. That lies beyond the window, so only full blocks can; when nothing reads it, {percent(cut)} are right."
    )


def gifts(claims: Claims) -> str:
    task, again = claims.task, "the giver's name, the second time"
    givers = claims.some(task.reading(again), "heads that read who gives")
    readers = claims.some(
        [
            head
            for head in task.reading("the receiver's name")
            if head.at == LAST and head.restored >= RESTORED
        ],
        "heads that read the receiver",
    )
    claims.before(givers, readers, "the giver is read before the receiver")
    claims.full(readers)
    cut, blind = claims.cut("the receiver's name", FEW), claims.cut(again, 0.7)
    return (
        f"Who gives is found, and the other name said: {claims.names(givers)} read who gives, from the name's second place; "
        f"then {claims.names(readers)} look from the last token to the receiver's name ({pays(readers)}). When nothing reads the "
        f"giver's second place, {percent(blind)} are right, about one in two; when nothing reads the receiver's name, {percent(cut)}."
    )


def facts(claims: Claims) -> str:
    task, mlps = claims.task, claims.task.measured["score without MLPs at"]
    country = claims.some(task.reading("the country"), "heads that read the country")
    early = [head for head in task.heads if head.at == LAST and head.layer == 0]
    claims.some(early, "heads of block 0 at the last token")
    cut = claims.cut("the country", FEW)
    claims.holds(mlps["the country"] >= MOST, "MLPs at the country do not matter")
    claims.holds(mlps["everywhere"] <= 0.6, "without MLPs most are wrong")
    return (
        f"The country is carried to the last token, by {claims.names(early)} at once and by {claims.names(set(country) - set(early))} later, and its capital "
        f"is looked up after it: with all MLPs at their mean at the country's own place {percent(mlps['the country'])} are right, at "
        f"the last token {percent(mlps[LAST])}, everywhere {percent(mlps['everywhere'])}. When nothing reads the country, {percent(cut)}."
    )


def having(claims: Claims) -> str:
    task = claims.task
    readers = claims.some(task.reading("its thing"), "heads that read the thing")
    bound = ("its thing", "the other's thing", "the words before its thing")
    bound += ("the words before the other's thing", LAST)
    early = [head for head in task.heads if head.at in bound and head not in readers]
    claims.some(early, "heads that carry names")
    claims.before(early, readers, "names are carried first")
    claims.full(readers)
    cut = claims.cut("its thing", FEW)
    return (
        f"Names are carried to things, then looked up: {claims.names(early)} carry each name to the thing after it, and the asked name to the "
        f"last token; from there {claims.names(readers)} look to the thing with the same name ({pays(readers)}) and say it. "
        f"When nothing reads that thing, {percent(cut)} are right."
    )


def years(claims: Claims) -> str:
    task, mlps = claims.task, claims.task.measured["score without MLPs at"]
    readers = claims.some(task.reading("the first year"), "heads that read the first year")
    cut = claims.cut("the first year", 0.85)
    score = task.measured["score"]["as it is"]
    claims.holds(mlps[LAST] < score, "MLPs at the last token matter")
    largest = max(task.mlps, key=lambda mlp: mlp.share).layer
    return (
        f"The first year is carried to the last token by {claims.names(readers)} ({pays(readers)}); MLPs there make of it the years after it, "
        f"that of block {largest} most. The probability of all greater years is {percent(score)}; with all MLPs at the last "
        f"token at their mean {percent(mlps[LAST])}, when nothing reads the first year {percent(cut)}."
    )


def code(claims: Claims) -> str:
    task = claims.task
    readers = claims.some(task.reading("the code"), "heads that read the code")
    claims.holds(all(head.at == LAST for head in readers), "the code is read from the last token")
    claims.full(readers)
    claims.beyond_window("the code")
    cut = claims.cut("the code", FEW)
    return (
        f"The code is copied from where it was told: {claims.names(readers)} look from the last token straight to it ({pays(readers)}). It lies "
        f"beyond the window, and only full blocks reach it; when nothing reads it, {percent(cut)} are right."
    )


def colour(claims: Claims) -> str:
    task = claims.task
    patch = "the shape's patch"
    readers = claims.some(
        [head for head in task.reading(patch) if head.at == LAST], "heads that read the patch"
    )
    corner = [
        head for head in task.heads if head.layer < min((h.layer for h in readers), default=0)
    ]
    claims.some(corner, "heads that tell the corner")
    claims.full(readers)
    cut = claims.cut(patch, 0.35)
    blind = claims.cut("the corner's two words", 0.5)
    return (
        f"The corner's words are carried to the last token by {claims.names(corner)}; from there {claims.names(readers)} look at the one patch of that corner "
        f"that holds a shape ({pays(readers)}) and say its colour. When nothing reads that patch, {percent(cut)} are right, when "
        f"nothing reads the corner's words {percent(blind)}."
    )


def shape(claims: Claims) -> str:
    task = claims.task
    patch, before = "the shape's patch", 'the word "is"'
    readers = claims.some(
        [head for head in task.reading(patch) if head.at == before],
        "heads that read the patch from the word before the colour",
    )
    then = claims.some(
        [head for head in task.reading(before) if head.at == LAST],
        "heads that read on from the word before the colour",
    )
    claims.before(readers, then, "the patch is read first")
    first = min((head.layer for head in readers), default=0)
    corner = claims.some([h for h in task.heads if h.layer < first], "heads that tell the corner")
    cut, late = claims.cut(patch, 0.45), claims.cut(before, 0.7)
    return (
        f"The shape was read together with its colour, one token earlier: {claims.names(corner)} carry the corner's words to the word before the colour, {claims.names(readers)} look from there at the patch "
        f"({pays(readers)}), and {claims.names(then)} fetch the shape to the last token. When nothing reads the patch, "
        f"{percent(cut)} are right; when nothing reads the word before the colour, {percent(late)}."
    )


SAID: dict[str, Callable[[Claims], str]] = {
    "repeats": repeats,
    "gifts": gifts,
    "facts": facts,
    "having": having,
    "years": years,
    "code": code,
    "colour": colour,
    "shape": shape,
}


def untold(claims: Claims) -> str:
    """The heads that count and that no sentence names, with what they read."""
    rest = sorted(set(claims.task.heads) - claims.said)
    if not rest:
        return ""
    told = (f"{names([head])} ({head.role.replace(' it reads', ', reads')})" for head in rest)
    return f" What else counts, in ways not told here: {'; '.join(told)}."


def by_block(score: Mapping[str, float]) -> str:
    """Right answers without the heads of one block, for each block that has some."""
    start, end = WITHOUT_BLOCK.split("{}")
    found = [
        f"{name.removeprefix(start).removesuffix(end)} {percent(value)}"
        for name, value in score.items()
        if name.startswith(start)
    ]
    return f"without those of block {listed(found)}"


def confirmed(claims: Claims) -> str:
    """The heads together: needed, enough, and no others."""
    score = claims.task.measured["score"]
    whole, n = score["as it is"], len(claims.task.heads)
    claims.holds(whole >= (0.9 if claims.task.by_probability else SURE), "the task is solved")
    enough = score["with these alone"]
    claims.holds(enough >= MOST, f"these heads are enough: {enough:.1%}")
    gone = score["with these of the counterpart"]
    far = score["of the counterparts"]
    claims.holds(gone <= far + 0.1, f"these heads are needed: {gone:.1%}, counterparts {far:.1%}")
    others = score["without as many others, at worst"]
    claims.holds(others >= MOST, f"others are not needed: {others:.1%}")
    claims.holds(score["without these"] < whole - 0.1, "they do not lack without being missed")
    return (
        f"These {n} heads alone, all others at their mean, reach {percent(enough)}; without them {percent(score['without these'])} are right "
        f"({by_block(score)}), "
        f"with their values of the counterpart {percent(gone)}, without as many others {percent(others)} at worst."
    )


def statement(task: Task) -> str:
    """What solves a task.

    Raises:
        ValueError: what would be said is not true; names each claim that does not hold.
    """
    claims = Claims(task)
    said = SAID[task.name](claims)
    said = f"{said}{untold(claims)} {confirmed(claims)}"
    if claims.broken:
        raise ValueError(f"{task.name}: not true of these weights: {'; '.join(claims.broken)}")
    return said
