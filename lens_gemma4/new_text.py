"""The text of new tokens while they come, and where it ends.

A token is not always a text: several may spell one character, and what a tokenizer makes of one depends on those before it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

HALF = (
    "\N{REPLACEMENT CHARACTER}"  # what decoders show for bytes that are no character, or none yet
)
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # tokens that are one byte
SPELT = 4  # tokens that one character takes at most
CONTEXT = 32  # tokens that are decoded again with every new one

Stop = Callable[[Any], Any]


class NewText:
    """Text of what follows `before`, token by token.

    `settled` never changes any more; `loose` are characters that the next token may still change. A character of several
    tokens is loose until it is whole, and bytes until a token follows that is none: byte fallback shows a run of them as
    nothing but replacement characters when its last one is missing.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.settled = self.loose = ""
        self._searched = self._taken = 0  # characters of `settled`
        self._context = self._end_of(before)
        self._shown = self._decode(self._context)
        self._pending: list[int] = []

    def add(self, token: int) -> None:
        self._pending.append(token)
        now = self._decode(self._context + self._pending)
        self.loose = after(self._shown, now)
        if self.loose.endswith(HALF) or self._is_byte(token):
            return
        self.settled += self.loose
        self.loose = ""
        self._context += self._pending
        if len(self._context) > CONTEXT:
            self._context = self._pending
            now = self._decode(self._context)
        self._shown, self._pending = now, []

    def whole(self) -> str:
        return self.settled + self.loose

    def take(self) -> str:
        """What has settled since this was asked last."""
        begin, self._taken = self._taken, len(self.settled)
        return self.settled[begin:]

    def has(self, stops: Sequence[str]) -> bool:
        """Whether one of the stops is in the text; asked after every token, so that only its end is searched."""
        begin = max(0, self._searched - max(map(len, stops)))
        self._searched = len(self.settled)
        end = self.settled[begin:] + self.loose
        return any(stop in end for stop in stops)

    def _end_of(self, ids: Sequence[int]) -> list[int]:
        """As much of a text's end as decides how the next token is shown."""
        begin = max(0, len(ids) - 1)
        while begin and self._is_byte(ids[begin]):
            begin -= 1
        return list(ids[max(0, begin - SPELT) :])

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _is_byte(self, token: int) -> bool:
        return BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or "") is not None


def after(before: str, whole: str) -> str:
    """What a longer text has beyond a shorter one; a character that was half there counts as new."""
    if whole.startswith(before):
        return whole[len(before) :]
    pairs = enumerate(zip(before, whole, strict=False))
    return whole[next((i for i, (a, b) in pairs if a != b), len(whole)) :]


class Stops:
    """When a row of a batch is at its end: at a token, a text, or where a function says so.

    Args:
        stop: an id, a text, a function of the row's ids `[pos]` (prompt and new ones, without padding), or a list of them.
        eos: ids that end every row.
        d_vocab: tokens there are.
    Raises:
        TypeError: something else.
        ValueError: an empty text; an id that is no token.
    """

    def __init__(self, stop: Any, eos: Iterable[int], d_vocab: int) -> None:
        self.texts: list[str] = []
        self.functions: list[Stop] = []
        ids: list[int] = []
        for one in _listed(stop):
            if isinstance(one, str):
                self.texts.append(one)
            elif callable(one):
                self.functions.append(one)
            else:
                ids.append(_id(one))
        if "" in self.texts:
            raise ValueError("stop holds an empty text, which every text holds: leave it out")
        if strange := [one for one in ids if not 0 <= one < d_vocab]:
            raise ValueError(
                f"stop holds {strange[0]}, which is no token: this vocabulary has 0 to {d_vocab - 1}"
            )
        self.ids = {*ids, *eos}

    def ended(self, token: int, text: NewText | None, row: Callable[[], Tensor]) -> bool:
        """Whether a row ends with `token`, which is in `text` and in `row()` already."""
        if token in self.ids:
            return True
        if text is not None and self.texts and text.has(self.texts):
            return True
        return any(bool(function(row())) for function in self.functions)


def _listed(stop: Any) -> list[Any]:
    if isinstance(stop, Tensor):
        stop = stop.tolist()
    if stop is None:
        return []
    return list(stop) if isinstance(stop, (list, tuple, set, frozenset)) else [stop]


def _id(one: Any) -> int:
    try:
        if isinstance(one, bool):
            raise TypeError
        return operator.index(one)
    except TypeError:
        raise TypeError(
            f"stop holds {one!r}; use ids, texts, functions of a row's ids, or a list of them"
        ) from None
