"""What tells one thing from another, across runs: digests of tensors, of functions with all they use, and plain values for JSON."""

from __future__ import annotations

import functools
import hashlib
import pickle
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

DEPTH = 8  # of functions that use functions


def digest(*values: Any) -> str:
    """Of tensors by their bytes, of the rest by its text."""
    state = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            state.update(f"{value.dtype} {list(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().view(-1)
            state.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            state.update(repr(value).encode())
    return state.hexdigest()[:16]


def plain(value: Any) -> Any:
    """Numbers, texts and lists of these, as JSON takes them, of whatever holds them: tensors, arrays, ranges, slices."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, slice):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, range, set, frozenset)):
        return [plain(part) for part in value]
    return repr(value)


def fingerprint(function: Any) -> str | None:
    """Of a function: its code, and what it closes over, its defaults and the globals it names; None if one of these has none."""
    try:
        return digest(*_parts(function, 0))
    except (TypeError, AttributeError, ValueError, pickle.PicklingError, RecursionError):
        return None


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """Everything that decides what a value does, as tensors and text."""
    if depth > DEPTH:
        raise RecursionError
    if isinstance(value, Tensor) or value is None or isinstance(value, (bool, int, float, str)):
        yield value
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, depth)
    elif isinstance(value, types.MethodType):
        yield from _parts(value.__func__, depth + 1)
        yield from _parts(value.__self__, depth + 1)
    elif isinstance(value, functools.partial):
        yield from _parts([value.func, list(value.args), value.keywords], depth + 1)
    elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
        yield f"{getattr(value, '__module__', '')} {value.__name__}"
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield repr(key)
            yield from _parts(part, depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        yield from _parts(type(value).__qualname__, depth + 1)
        yield from _parts(vars(type(value)).get("__call__"), depth + 1)
        yield from _parts(vars(value), depth + 1)
    else:
        yield hashlib.sha256(pickle.dumps(value)).hexdigest()


def _of_function(function: types.FunctionType, depth: int) -> Iterator[Any]:
    yield from _of_code(function.__code__)
    yield from _parts([function.__defaults__, function.__kwdefaults__], depth + 1)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, depth + 1)
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name
            yield from _parts(function.__globals__[name], depth + 1)


def _of_code(code: types.CodeType) -> Iterator[str]:
    yield f"{code.co_code!r} {code.co_names!r} {code.co_varnames!r}"
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _of_code(const)
        else:
            yield repr(const)


def _names(code: types.CodeType) -> list[str]:
    """Names that a function and those within it look up."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [*code.co_names, *(name for part in inner for name in _names(part))]
