"""Data and a page around it as one file that needs nothing else and asks for nothing.

Tensors travel as base64 of deflated bytes; the page says by its own policy that no request may leave it and that
no script runs but its own, known by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_KINDS = {
    torch.float32: ("f4", "<f4"),
    torch.int32: ("i4", "<i4"),
    torch.uint16: ("u2", "<u2"),
    torch.uint8: ("u1", "|u1"),
}


def encoded(value: Any) -> Any:
    """Nested data as JSON can hold it.

    A tensor becomes `{"shape", "type", "bytes"}`: "f4" (float32), "i4", "u2" or "u1", first axis outermost, little
    endian, deflated, base64. Numbers that are no number become None.

    Raises:
        TypeError: something that has no place in JSON.
    """
    if isinstance(value, Tensor):
        return _packed(value)
    if isinstance(value, Mapping):
        return {str(key): encoded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"a page cannot hold {type(value).__name__}")


def _packed(value: Tensor) -> dict[str, Any]:
    value = value.detach().cpu()
    if value.dtype == torch.bool:
        value = value.to(torch.uint8)
    elif value.dtype == torch.int64:
        value = value.to(torch.int32)
    elif value.is_floating_point():
        value = value.float()
    kind, spelled = _KINDS[value.dtype]
    raw = value.contiguous().numpy().astype(spelled, copy=False).tobytes()
    packed = base64.b64encode(zlib.compress(raw, 6)).decode()
    return {"shape": list(value.shape), "type": kind, "bytes": packed}


def in_html(data: Any) -> str:
    """JSON that stands inside a script element: nothing in it can end that element or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    # A lone half of a character, which UTF-8 cannot hold.
    return "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def policy(script: str, style: str) -> str:
    """The content security policy of a page with one script and one style of its own."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page(folder: Path, scripts: Sequence[str], title: str, data: Any) -> str:
    """`page.html` of a folder with `page.css`, the scripts (in order, as one) and the data put in.

    Args:
        folder: where these files are.
        scripts: names of its JavaScript files.
        title: of the page; any text.
        data: nested dictionaries and lists of plain values and tensors.
    Returns:
        The page's text; write it as UTF-8.
    """
    parts = [(folder / name).read_text(encoding="utf-8") for name in scripts]
    script = "(() => {\n'use strict';\n" + "\n".join(parts) + "\n})();\n"
    style = (folder / "page.css").read_text(encoding="utf-8")
    given = {
        "policy": html.escape(policy(script, style), quote=True),
        "title": html.escape(title),
        "style": style,
        "data": in_html(encoded(data)),
        "script": script,
    }
    pieces = (folder / "page.html").read_text(encoding="utf-8").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [given[name], rest]
    return "".join(filled)
