"""The rows of each step: they depend on the step alone, so a resumed training sees the same."""

import dataclasses
import functools
import random
from dataclasses import dataclass

import shapes
import torch
from tasks import SENTENCES, TASKS, Piece, later_fact, paragraph
from tokenizer import BOS, EOS, FIRST_ORDINARY, MEDIA, PAD
from torch import Tensor
from transformers import PreTrainedTokenizerFast

# In the first part and in the second; over the window of 16 only full blocks can look so far back.
LONGEST_PERIODS = 40, 44
PLAIN_WEIGHT = (
    0.1  # of a target that is not an answer: names, places and things are drawn at random
)
YEARS_APART = 4  # tokens from a start to the one before its answer: " to the year 17"
IMAGE_TYPE = 1  # among transformers' token types


@dataclass
class Rows:
    """Some rows of one length, padded on the right, and what is to be learned from them."""

    ids: Tensor  # [row pos]
    targets: Tensor  # [row pos], the next token
    weights: Tensor  # [row pos], of each target in its task's loss; 0 where there is none
    tasks: Tensor  # [row], index into TASKS
    pixels: Tensor | None = None  # [row patch 6912]
    spans: Tensor | None = None  # [row pos], how many tokens are right, from the target on; else 1


def repeated_rows(
    length: int, periods: list[int], n_words: int, generator: torch.Generator
) -> Rows:
    """BOS and random words that come again with a period.

    A word can be known, and is a target, once the one before it has been seen; the words of a row's
    first period are all different.
    """
    ids = torch.full((len(periods), length + 1), PAD)
    weights = torch.zeros(len(periods), length)
    ids[:, 0] = BOS
    for row, period in enumerate(periods):
        words = FIRST_ORDINARY + torch.randperm(n_words - FIRST_ORDINARY, generator=generator)
        ids[row, 1:] = words[:period].repeat(-(-length // period))[:length]
        weights[row, period + 1 :] = 1
    tasks = torch.full((len(periods),), TASKS.index("repeats"))
    return Rows(ids[:, :-1], ids[:, 1:], weights, tasks)


class Writer:
    """Turns pieces of text into ids, weights and rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.n_words = len(tokenizer)
        (self.last_year,) = self._words("99")  # the hundred years are tokens in a row
        self.words = functools.lru_cache(100_000)(self._words)

    def _words(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ids(self, pieces: list[Piece]) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for text, is_answer in pieces:
            words = self.words(text)
            ids += words
            weights += [1.0 if is_answer else PLAIN_WEIGHT] * len(words)
        return ids, weights

    def rows(self, tasks: list[str], texts: list[list[Piece]], length: int) -> Rows:
        """BOS and a paragraph each, cut at `length` targets; EOS where there is room."""
        ids = torch.full((len(texts), length + 1), PAD)
        weights = torch.zeros(len(texts), length)
        ids[:, 0] = BOS
        for row, pieces in enumerate(texts):
            words, weight = self.ids(pieces)
            words, weight = [*words, EOS][:length], [*weight, PLAIN_WEIGHT][:length]
            ids[row, 1 : 1 + len(words)] = torch.tensor(words)
            weights[row, : len(words)] = torch.tensor(weight)
        numbers = torch.tensor([TASKS.index(task) for task in tasks])
        return Rows(ids[:, :-1], ids[:, 1:], weights, numbers)

    def any_later_year(self, rows: Rows) -> Rows:
        """The same rows, in which every greater year is right where one was drawn."""
        is_year = rows.tasks[:, None] == TASKS.index("years")
        answers = is_year & (rows.weights == 1)
        start = rows.ids.roll(YEARS_APART, dims=1)
        targets = torch.where(answers, start + 1, rows.targets)
        spans = torch.where(answers, self.last_year - start, 1)
        return dataclasses.replace(rows, targets=targets, spans=spans)

    def picture_rows(self, rng: random.Random, n_rows: int) -> Rows:
        """A picture each, and a question on every corner, in any order."""
        front = picture_front(self.tokenizer)
        ids, weights, pixels = [], [], []
        for _ in range(n_rows):
            seen = shapes.scene(rng)
            words, weight = self.ids(shapes.answers(seen, rng.sample(range(4), 4)))
            ids.append([*front, *words, EOS])
            weights.append([0.0] * (len(front) - 1) + weight + [PLAIN_WEIGHT])
            pixels.append(shapes.patches(shapes.picture(seen)))
        tasks = torch.full((n_rows,), TASKS.index("pictures"))
        words = torch.tensor(ids)
        return Rows(words[:, :-1], words[:, 1:], torch.tensor(weights), tasks, torch.stack(pixels))


def picture_front(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What the processor puts in place of a picture at the front of a prompt, BOS included."""
    names = (MEDIA[f"{kind}_token"] for kind in ("boi", "image", "eoi"))
    boi, image, eoi = (tokenizer.convert_tokens_to_ids(name) for name in names)
    return [BOS, boi, *[image] * len(shapes.positions()), eoi]


def hidden_states(model: torch.nn.Module, ids: Tensor, pixels: Tensor | None) -> Tensor:
    """The final norm's output, [row pos d_model]."""
    if pixels is None:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state
    is_image = ids == model.config.image_token_id
    return model.model(
        input_ids=ids,
        pixel_values=pixels,
        image_position_ids=shapes.positions().expand(len(ids), -1, -1),
        mm_token_type_ids=is_image.long() * IMAGE_TYPE,
        use_cache=False,
    ).last_hidden_state


# ------------------------------------------------------------------------------------ the lesson plan

REPEATS_ALONE = 544 / 3600  # of the training: looking back comes first, and the rest is built on it
REPEATED_ROWS = 24, 8  # a step, alone and beside the others
SECOND_PART = 19 / 36  # of the training is over when it begins
ROWS_OF_TASKS = (  # a step, in the first part and in the second
    {"gifts": 5, "facts": 2, "having": 6, "years": 3},
    {"gifts": 4, "facts": 6, "having": 4, "years": 8},
)
CODE_ROWS, PICTURE_ROWS = 2, 8
TEXT_LENGTH, LONG_LENGTH, PICTURE_LENGTH = 65, 88, 107  # the last one is what it comes to


def rows_of_step(
    writer: Writer, seed: int, progress: float, step: int, pace: float = 1.0
) -> list[Rows]:
    """The rows of one step, in groups of one length.

    Args:
        progress: the share of steps done.
        pace: of the lessons on repeats. In a shorter training less of them is given, more slowly: looking back is
            learned on few words and short periods or not at all.
    """
    rng = random.Random(f"{seed} {step}")
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    alone = progress < REPEATS_ALONE
    n_rows = REPEATED_ROWS[0 if alone else 1]
    second = progress >= SECOND_PART
    lesson = int(step * pace)
    longest = min(LONGEST_PERIODS[second], 6 + lesson // 15)
    # The longer of two draws: far repeats are the hard ones.
    periods = [max(rng.randint(4, longest), rng.randint(4, longest)) for _ in range(n_rows)]
    length = min(LONG_LENGTH, 2 * longest + 6) if alone else LONG_LENGTH
    # Few words first: looking back is learned in minutes so, else in hours.
    n_words = min(writer.n_words, FIRST_ORDINARY + 60 + 3 * lesson)
    repeats = repeated_rows(length, periods, n_words, generator)
    if alone:
        return [repeats]
    # A fact in few wordings is learned once for each of them; what comes later makes it one.
    makers = SENTENCES | ({"facts": later_fact} if second else {})
    tasks = [task for task, count in ROWS_OF_TASKS[second].items() for _ in range(count)]
    texts = [paragraph(makers[task], rng, SENTENCES_A_ROW[task]) for task in tasks]
    codes = [makers["code"](rng) for _ in range(CODE_ROWS)]
    words = writer.rows(tasks, texts, TEXT_LENGTH)
    return [
        writer.any_later_year(words) if second else words,
        joined(repeats, writer.rows(["code"] * CODE_ROWS, codes, LONG_LENGTH)),
        writer.picture_rows(rng, PICTURE_ROWS),
    ]


SENTENCES_A_ROW = {"gifts": 4, "facts": 8, "having": 2, "years": 5}


def joined(first: Rows, second: Rows) -> Rows:
    """Rows of one length as one group."""
    return Rows(
        torch.cat([first.ids, second.ids]),
        torch.cat([first.targets, second.targets]),
        torch.cat([first.weights, second.weights]),
        torch.cat([first.tasks, second.tasks]),
    )
