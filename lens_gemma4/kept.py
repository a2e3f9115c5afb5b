"""What a run keeps: values, and for those that follow from others kept beside them the way to make them.

Nothing here knows about Gemma. Memory that stays is what caching costs, not arithmetic: so a value that can be made
again, to the bit, from values that are kept anyway (and at most a norm's gain, of which it has a copy) is made when it is
first read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

Make = Callable[..., Tensor]


class Made(NamedTuple):
    """A value, and how it is made of another; no way is known of one that a hook changed."""

    value: Tensor
    make: Make | None
    of: Tensor


class Deferred(NamedTuple):
    """A value that has not been made yet: `make` of the values kept under these names."""

    make: Make
    inputs: tuple[str, ...]
    without_batch: bool  # values are kept without their batch axis of 1


class Kept(MutableMapping[str, Tensor]):
    """Values by name; one that was deferred is made when it is read for the first time.

    Reading one raises RuntimeError when a value it follows from was written into after the run.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Tensor | Deferred] = {}
        self._versions: dict[str, int] = {}  # of each tensor when it was kept

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        return self._make(name, entry) if isinstance(entry, Deferred) else entry

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._make_followers(name)
        self.keep(name, value)

    def __delitem__(self, name: str) -> None:
        self._make_followers(name)
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"{len(self)} values: {', '.join(self)}"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_entries": dict(self.items()),
            "_versions": {},
        }  # a copy or a file holds values alone

    def keep(self, name: str, value: Tensor) -> None:
        """Put a value in, whatever follows from the one that was there."""
        self._entries[name] = value
        self._versions[name] = 0 if value.is_inference() else value._version

    def put_off(self, name: str, way: Deferred) -> None:
        """Put the way to a value in."""
        self._entries[name] = way

    def in_memory(self) -> list[Tensor]:
        """The values that have been made."""
        return [entry for entry in self._entries.values() if isinstance(entry, Tensor)]

    def _make(self, name: str, way: Deferred) -> Tensor:
        inputs = [self[source] for source in way.inputs]
        # Its own mode, whatever the reader's: a tensor of inference mode does not tell when it is written into, and
        # autocast would round otherwise than the run did.
        with torch.inference_mode(False), torch.no_grad(), _without_autocast(inputs[0].device.type):
            for source, value in zip(way.inputs, inputs, strict=True):
                if version(value) != self._versions[source]:
                    raise RuntimeError(
                        f"{name!r} can no longer be made: it follows from {source!r}, which was written into after the "
                        "run. Read it before that, or write into a `.clone()`."
                    )
            if way.without_batch:
                value = way.make(*(value[None] for value in inputs))[0]
            else:
                value = way.make(*inputs)
        self.keep(name, value)
        return value

    def _make_followers(self, name: str) -> None:
        for follower, entry in list(self._entries.items()):
            if isinstance(entry, Deferred) and name in entry.inputs:
                self[follower]


class Store:
    """Puts snapshots of values into a mapping, moved and sliced as asked.

    Values are deferred where `target` is `Kept` and they are kept as they are.
    """

    def __init__(
        self,
        target: MutableMapping[str, Tensor],
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        pos_slice: Callable[[Tensor, str], Tensor] | None = None,
        listens: Callable[[], bool] = lambda: True,
        lazy: bool = True,
    ) -> None:
        self.listens = listens  # not to a run that a hook starts inside the one that is kept
        self.target, self.device, self.remove_batch_dim, self.pos_slice = (
            target,
            device,
            remove_batch_dim,
            pos_slice,
        )
        self._whole = device is None and pos_slice is None and not remove_batch_dim
        self.defers = lazy and isinstance(target, Kept) and device is None and pos_slice is None
        self._put = target.keep if isinstance(target, Kept) else target.__setitem__
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # of the run's own tensors
        self._autocast: bool | None = None  # asked for once

    def save(self, name: str, axes: str, value: Tensor) -> None:
        kept = value.detach()
        if self.defers and self._whole and not value.is_inference():
            # What the lines below come to, in one place: a run that keeps everything does it hundreds of times.
            if name in self.target._entries:  # type: ignore[attr-defined]
                self.target._make_followers(name)  # type: ignore[attr-defined]
            self.target._entries[name] = kept  # type: ignore[attr-defined]
            self.target._versions[name] = kept._version  # type: ignore[attr-defined]
            self._names[id(value)] = weakref.ref(value), name
            return
        self._put(name, kept if self._whole else self._snapshot(kept, axes))
        if self.defers:
            self._know(value, name)

    def defer(
        self, name: str, axes: str, value: Tensor | None, make: Make, inputs: tuple[Tensor, ...]
    ) -> bool:
        """Keep the way to a value, which may be at hand already; False when an input is not kept itself, when nobody
        could tell whether one is written into later, or when it might come out otherwise then (autocast)."""
        if not self.defers:
            return False
        if self._autocast is None:
            self._autocast = torch.is_autocast_enabled(inputs[0].device.type)
        if self._autocast:
            return False
        sources = []
        for x in inputs:
            # Compared by identity: another tensor may have its number once it is gone.
            known = self._names.get(id(x))
            if known is None or known[0]() is not x:
                return False
            sources.append(known[1])
        without_batch = self.remove_batch_dim and self._loses_batch(axes)
        self.target.put_off(name, Deferred(make, tuple(sources), without_batch))  # type: ignore[attr-defined]
        if value is not None:
            self._know(value, name)
        return True

    def _know(self, value: Tensor, name: str) -> None:
        if not value.is_inference():
            self._names[id(value)] = weakref.ref(value), name

    def _loses_batch(self, axes: str) -> bool:
        return self.remove_batch_dim and axes.startswith("batch")

    def _snapshot(self, value: Tensor, axes: str) -> Tensor:
        if self.pos_slice is not None:
            value = self.pos_slice(value, axes)
        if self._loses_batch(axes):
            if value.shape[0] != 1:
                raise ValueError(
                    f"remove_batch_dim=True needs a batch of 1; this run has {value.shape[0]} rows"
                )
            value = value[0]
        return value if self.device is None else value.to(self.device)


class Saver:
    """A hook that keeps a point's value or, on the way back, its gradient."""

    __slots__ = ("axes", "name", "store")

    def __init__(self, store: Store, name: str, axes: str) -> None:
        self.store, self.name, self.axes = store, name, axes

    def __call__(self, value: Tensor, hook: Any) -> None:
        if self.store.listens():
            self.store.save(self.name, self.axes, value)

    def defer(self, value: Tensor | None, make: Make, inputs: tuple[Tensor, ...]) -> bool:
        return self.store.listens() and self.store.defer(self.name, self.axes, value, make, inputs)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def version(value: Tensor) -> int:
    """Grows with every write that autograd knows of; a content left equal counts too (a mask of ones)."""
    return 0 if value.is_inference() else value._version
