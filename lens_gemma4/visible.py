"""Tokens as a reader can see them: spaces, line ends, bytes and marks that show nothing have signs."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

SPACE, LINE_END, TAB = "␣", "↵", "⇥"
_SIGNS = {" ": SPACE, "\n": LINE_END, "\t": TAB}
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Joined emoji and scripts need these two; the others only hide or turn what stands beside them.
_JOINERS = ("\u200c", "\u200d")


def visible(text: str) -> str:
    """Text whose every character is seen.

    Spaces, line ends and tabs become signs, other control characters their pictures, and marks without a shape
    (of direction, of no width) their numbers. Letters of every script and emoji stay as they are.

    >>> visible(" Paris\\n")
    '␣Paris↵'
    """
    return "".join(map(_seen, text))


def _seen(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    code, kind = ord(letter), unicodedata.category(letter)
    if code < 32:
        return chr(0x2400 + code)
    if letter in _JOINERS or kind not in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp", "Zs"):
        return letter
    return f"<U+{code:04X}>"


def token_label(tokenizer: Any, token: int) -> str:
    """A token's text, seen; a byte as the tokenizer names it, `<0xF0>`; a place that no text fills by its number."""
    if tokenizer is None:
        return f"token {token}"
    name = tokenizer.convert_ids_to_tokens(token)
    if isinstance(name, str) and _BYTE.fullmatch(name):
        return name
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    return visible(text) or (name if isinstance(name, str) and name else f"token {token}")
