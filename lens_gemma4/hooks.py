"""Hook points and the module that manages them. Nothing here knows about Gemma.

A value is handed to user hooks as a private copy, so an edit in place and a returned tensor mean the
same, a cached value never changes afterwards, and autograd never meets a tensor changed behind its back.
Without listeners a point costs one attribute test.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lens_gemma4.errors import HookNameError, HookShapeError
from lens_gemma4.kept import Kept, Make, Saver, Store, version

HookFn = Callable[..., Any]
Direction = Literal["fwd", "bwd", "both"]
# A list may hold any of them; ("resid_post", 5) is a short form.
NameFilter = str | re.Pattern[str] | Callable[[str], bool] | Sequence[Any] | None


@dataclass(eq=False, slots=True)
class Handle:
    """One function on one point, and how often a forward pass reached it."""

    fn: HookFn
    asked: HookPoint | NamedPoint
    is_permanent: bool = False
    level: int | None = None
    reads_only: bool = False
    reached: int = 0


@dataclass(eq=False)
class Place:
    """Where the run at hand is; all points of a model share one.

    Args:
        positions: of the tokens that it computes.
        depth: runs, and users' functions in them, inside one another; 0 outside.
        goes_on: whether it is one call of several, on a key/value cache.
        noted: takes what points answer when asked whether their value can be made later.
        repeated: what they answered, where a block is computed once more.
    """

    positions: range | None = None
    depth: int = 0
    goes_on: bool = False
    noted: list[bool] | None = None
    repeated: Iterator[bool] | None = None


class HookPoint(nn.Module):
    """An identity that shows a value to whoever listens and lets them replace it.

    `fn(value, hook=point)` returns None to leave the value, or a tensor of the same shape, dtype and
    device. Backward functions get the gradient of the value in the same way.

    >>> point = HookPoint()
    >>> _ = point.add_hook(lambda value, hook: value + 1)
    >>> point(torch.zeros(2))
    tensor([1., 1.])
    """

    # nn.Module's own looks for parameters and modules in every value set; a point has none, and setting `live`
    # was a fifth of what caching everything costs on a small model.
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def __init__(self, axes: str = "") -> None:
        super().__init__()
        self.name: str | None = None
        self.axes = axes
        self.ctx: dict[str, Any] = {}
        self.place = Place()
        self.fwd_hooks: list[Handle] = []
        self.bwd_hooks: list[Handle] = []
        self.live = False

    def __call__(self, value: Tensor) -> Tensor:
        return self._passed(value) if self.live else value

    def _passed(self, value: Tensor) -> Tensor:
        if len(self.fwd_hooks) == 1 and not self.bwd_hooks:
            handle = self.fwd_hooks[0]
            if handle.reads_only and self.place.repeated is None:  # all of what `_run` does then
                handle.reached += 1
                handle.fn(value, hook=handle.asked)
                return value
        return self._run(value)[0]

    forward = __call__

    def of(self, make: Make, *inputs: Tensor) -> Tensor:
        """`make(*inputs)`, a value that whoever only keeps it may make again when it is read."""
        return self.again(make(*inputs), make, *inputs)

    def again(self, value: Tensor, make: Make | None, *inputs: Tensor) -> Tensor:
        """A value that is at hand already; `make(*inputs)`, where it is known, makes it again to the bit."""
        if not self.live or (make is not None and self._deferred(value, make, inputs)):
            return value
        return self._passed(value)

    def defer(self, make: Make, *inputs: Tensor) -> bool:
        """Whether nobody needs this value now: nobody listens, or the one who does keeps the way to make it."""
        return not self.live or self._deferred(None, make, inputs)

    def _deferred(self, value: Tensor | None, make: Make, inputs: tuple[Tensor, ...]) -> bool:
        if self.place.repeated is not None:
            return next(self.place.repeated)
        deferred = self._asked_to_defer(value, make, inputs)
        if self.place.noted is not None:
            self.place.noted.append(deferred)
        return deferred

    def _asked_to_defer(self, value: Tensor | None, make: Make, inputs: tuple[Tensor, ...]) -> bool:
        if self.bwd_hooks or len(self.fwd_hooks) != 1:
            return False
        handle = self.fwd_hooks[0]
        if type(handle.fn) is not Saver or not handle.reads_only:
            return False
        deferred = handle.fn.defer(value, make, inputs)
        handle.reached += deferred
        return deferred

    def watch(self, value: Tensor) -> tuple[Tensor, bool]:
        """For a value shown beside the fast operation: also whether the forward must go on with it,
        because it was edited or because a gradient is asked for."""
        if not self.live:
            return value, False
        shown, edited = self._run(value)
        # Compared by content as well: writes through numpy or `.data` leave no trace on the tensor.
        return shown, edited or bool(self.bwd_hooks) or not (shown is value or _same(shown, value))

    @property
    def positions(self) -> range | None:
        """Absolute positions of the tokens that the run at hand computes, in the padded row: all of a prompt's, or those
        after what a key/value cache holds. None outside a run."""
        return self.place.positions

    def layer(self) -> int:
        """Number of the block this point is in.

        Raises:
            ValueError: the point is in no block.
        """
        found = re.search(r"(?:^|\.)(\d+)\.", self.name or "")
        if found is None:
            raise ValueError(f"hook point {self.name!r} is in no block")
        return int(found[1])

    def add_hook(
        self,
        hook: HookFn,
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        *,
        name: str | None = None,
        reads_only: bool = False,
    ) -> Handle:
        """Add a function; `prepend` runs it before those already there.

        Args:
            name: what `hook.name` shall read inside the function; the point's own by default.
            reads_only: promises that the function changes nothing and runs no part of the model, which saves it the private copy.
        """
        if not callable(hook):
            raise TypeError(f"a hook must be callable, got {type(hook).__name__} for {self.name!r}")
        handle = Handle(hook, self._asked(name), is_permanent, level, reads_only)
        hooks = self._of(dir)
        hooks.insert(0, handle) if prepend else hooks.append(handle)
        self.live = True
        return handle

    def _asked(self, name: str | None) -> HookPoint | NamedPoint:
        return self if name is None or name == self.name else NamedPoint(self, name)

    def keep_in(self, store: Store, name: str) -> Handle:
        """`add_hook` of a `Saver`, which a run that keeps everything does at hundreds of points."""
        saver = Saver(store, self.name or "", self.axes)
        asked = self if name == self.name else NamedPoint(self, name)
        handle = Handle(saver, asked, False, None, True)
        self.fwd_hooks.append(handle)
        self.live = True
        return handle

    def add_perma_hook(self, hook: HookFn, dir: Literal["fwd", "bwd"] = "fwd") -> Handle:
        """Add a function that `reset_hooks` leaves in place."""
        return self.add_hook(hook, dir, is_permanent=True)

    def remove_hooks(
        self, dir: Direction = "fwd", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Remove functions; permanent ones only when asked, and only those of `level` when given."""
        for one in ("fwd", "bwd") if dir == "both" else (dir,):
            hooks = self._of(one)
            hooks[:] = [h for h in hooks if _stays(h, including_permanent, level)]
        self._refresh()

    def remove(self, handle: Handle) -> None:
        """Remove one function, wherever it is; nothing happens when it is gone already."""
        for hooks in (self.fwd_hooks, self.bwd_hooks):
            if hooks and hooks[-1] is handle:
                hooks.pop()
            elif handle in hooks:
                hooks.remove(handle)
        self._refresh()

    def has_hooks(
        self, dir: Direction = "both", including_permanent: bool = True, level: int | None = None
    ) -> bool:
        hooks = self.fwd_hooks + self.bwd_hooks if dir == "both" else self._of(dir)
        return any(
            (including_permanent or not h.is_permanent) and (level is None or h.level == level)
            for h in hooks
        )

    def clear_context(self) -> None:
        self.ctx.clear()

    def _of(self, dir: str) -> list[Handle]:
        if dir not in ("fwd", "bwd"):
            raise ValueError(f"dir is {dir!r}; use 'fwd' or 'bwd'")
        return self.fwd_hooks if dir == "fwd" else self.bwd_hooks

    def _refresh(self) -> None:
        self.live = bool(self.fwd_hooks or self.bwd_hooks)

    def _run(self, value: Tensor) -> tuple[Tensor, bool]:
        """The value after every listener, and whether one returned a tensor or wrote into its own.

        Each gets a copy of its own, so what one keeps is never changed by the next.
        """
        edited = held = False
        for handle in tuple(self.fwd_hooks):
            if handle.reads_only and self.place.repeated is not None:
                continue  # it has seen this value
            handle.reached += 1
            if handle.reads_only:
                # Whoever was shown this very tensor may have kept it, and write into it later.
                handle.fn(value.clone() if held else value, hook=handle.asked)
                continue
            given = value.clone()
            before = version(given)
            returned = self._call(handle, given, self.place.depth)
            if returned is None or returned is given:
                self._check(given, value, handle)  # `resize_`, `.data = ...`
                value, edited, held = given, edited or version(given) != before, True
            else:
                self._check(returned, value, handle)
                # Laid out as the network's own values: products of unlike strides round unlike. And copied: the
                # function may hand out one buffer again and again.
                value, edited, held = (
                    returned.clone(memory_format=torch.contiguous_format),
                    True,
                    False,
                )
        return (self._listen_backward(value) if self.bwd_hooks else value), edited

    def _call(self, handle: Handle, given: Tensor, depth: int) -> Any:
        """What a function returns. Whatever a user's runs of the model lies deeper than this run, and is not what it keeps."""
        if type(handle.fn) is Saver:
            return handle.fn(given, hook=handle.asked)
        place = self.place
        outer, place.depth = place.depth, depth + 1
        try:
            return handle.fn(given, hook=handle.asked)
        finally:
            place.depth = outer

    def _listen_backward(self, value: Tensor) -> Tensor:
        """Register the backward functions on a node of this point's own."""
        handles = [
            one for one in self.bwd_hooks if type(one.fn) is not Saver or one.fn.store.listens()
        ]
        if not handles:
            return value
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"a backward hook on {self.name!r} can never fire: gradients are off. "
                "Call the model outside torch.no_grad() / inference_mode()."
            )
        if not (value.is_floating_point() or value.is_complex()):
            raise RuntimeError(
                f"{self.name!r} holds {value.dtype}, which has no gradient: no backward hook fits there"
            )
        # A view gives this point its own node: the same tensor may be another point's value as well.
        value = value.view_as(value) if value.requires_grad else value.detach().requires_grad_(True)
        for handle in handles:
            handle.reached += 1
            value.register_hook(self._backward_fn(handle))
        return value

    def _backward_fn(self, handle: Handle) -> Callable[[Tensor], Tensor]:
        depth = self.place.depth  # a backward pass is outside the run

        def run(grad: Tensor) -> Tensor:
            given = grad.clone()
            returned = self._call(handle, given, depth)
            if returned is None:
                return given
            self._check(returned, grad, handle)
            return returned

        return run

    def _check(self, returned: Any, value: Tensor, handle: Handle) -> None:
        name = handle.asked.name
        if not isinstance(returned, Tensor):
            raise HookShapeError(
                f"the hook on {name!r} returned {type(returned).__name__}; return a tensor of the same shape, "
                "dtype and device, or None to leave the value unchanged."
            )
        if returned.shape != value.shape:
            axes = f"\n  ({self.axes})" if self.axes else ""
            raise HookShapeError(
                f"the hook on {name!r} returned {list(returned.shape)} in place of {list(value.shape)}{axes}. "
                "Return a tensor of the same shape and dtype, or None to leave it unchanged."
            )
        if returned.dtype != value.dtype or returned.device != value.device:
            raise HookShapeError(
                f"the hook on {name!r} returned {returned.dtype} on {returned.device} in place of {value.dtype} on "
                f"{value.device}. Convert it with `.to(value)` before returning it."
            )

    def extra_repr(self) -> str:
        return self.axes


class Part(nn.Module):
    """A part of a network. The modules in it are plain attributes as well: nn.Module's own look-up is a Python call for each
    hook point that is passed, together a tenth of a small model's forward."""

    _parameters: dict[str, Any]  # none of them is None here
    _buffers: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)  # it takes a plain attribute of that name away
        if isinstance(value, nn.Module):
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__.pop(name, None)
        if name in self._parameters or name in self._buffers or name in self._modules:
            super().__delattr__(name)


class NamedPoint:
    """A point under the name it was asked for by; everything else is the point's."""

    def __init__(self, point: HookPoint, name: str) -> None:
        self.point, self.name = point, name

    def layer(self) -> int:
        return self.point.layer()

    @property
    def ctx(self) -> dict[str, Any]:
        return self.point.ctx

    @ctx.setter
    def ctx(self, ctx: dict[str, Any]) -> None:
        self.point.ctx = ctx

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("point", "name") or attribute.startswith(
            "__"
        ):  # not there yet while being copied
            raise AttributeError(attribute)
        return getattr(self.point, attribute)

    def __repr__(self) -> str:
        return f"NamedPoint({self.name!r} -> {self.point.name!r})"


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN for NaN."""
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _stays(handle: Handle, including_permanent: bool, level: int | None) -> bool:
    return (handle.is_permanent and not including_permanent) or (
        level is not None and handle.level != level
    )


class HookedRootModule(nn.Module):
    """A module whose hook points are found by their module path.

    Call `setup()` at the end of `__init__`. Subclasses may override `canonical_name`, `aliases` and `short_form`
    (other spellings), `unknown_name` (the message), `why_silent` (why a point did not fire) and `uncached`
    (points too large to cache unasked).
    """

    def setup(self) -> None:
        """Give every hook point its module path as name."""
        self.mod_dict: dict[str, nn.Module] = {}
        self.hook_dict: dict[str, HookPoint] = {}
        self._awaited: list[tuple[HookPoint, Handle]] = []
        self.place = Place()
        self._runs = 0
        for name, module in self.named_modules():
            if name:
                self.mod_dict[name] = module
            if isinstance(module, HookPoint):
                module.name, module.place = name, self.place
                self.hook_dict[name] = module
        self._cached = {
            name: (point, False)
            for name, point in self.hook_dict.items()
            if not self.uncached(name)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._runs += 1
        place = self.place
        outer = place.depth, place.positions, place.goes_on, place.noted, place.repeated
        try:
            place.depth += 1  # a hook may run the model inside a run
            place.noted = place.repeated = None
            return super().__call__(*args, **kwargs)
        finally:
            place.depth, place.positions, place.goes_on, place.noted, place.repeated = outer

    # -- names -----------------------------------------------------------------------------------

    def canonical_name(self, name: str) -> str:
        return name

    def aliases(self, name: str) -> Sequence[str]:
        """Other names of a point, for patterns."""
        return ()

    def short_form(self, words: tuple[Any, ...]) -> str:
        """The name meant by a tuple like ("resid_post", 5)."""
        raise TypeError(f"{words!r} is no name of a hook point")

    def unknown_name(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.hook_dict, n=1)
        return f"no hook point {name!r}." + (f" Closest: {close[0]!r}." if close else "")

    def why_silent(self, name: str) -> str:
        return "nothing in this call computes it"

    def uncached(self, name: str) -> bool:
        return False

    def hook_points(self) -> list[HookPoint]:
        return list(self.hook_dict.values())

    def hook_point(self, name: str) -> HookPoint:
        """The point of a name in any vocabulary.

        Raises:
            HookNameError: there is none; the message says why or what is closest.
        """
        if not isinstance(name, str):
            raise TypeError(f"a hook point is named by a string, got {type(name).__name__}")
        point = self.hook_dict.get(self.canonical_name(name))
        if point is None:
            raise HookNameError(self.unknown_name(name))
        return point

    def matches(self, names: NameFilter) -> dict[str, tuple[HookPoint, bool]]:
        """The points of a filter: name as asked -> (point, whether it was named literally).

        A filter is a name, a hook point, a short form ("resid_post", 5), a list of filters, a glob
        ("blocks.*.hook_resid_post"), a compiled regular expression, a function of our name, or None for every
        point but those too large to cache unasked. A pattern that matches none of our names is tried on the
        other vocabulary's. A point that several filters of a list match is there once.

        Raises:
            HookNameError: a literal name that does not exist, or a pattern or list that matches nothing.
        """
        if names is None:
            return dict(self._cached)
        if isinstance(names, str):
            return self._matches_text(names)
        if isinstance(names, HookPoint):
            if self.hook_dict.get(names.name or "") is not names:
                raise HookNameError(
                    f"the hook point {names.name!r} that was given is not one of this model's."
                )
            return {names.name: (names, True)}  # type: ignore[dict-item]
        if isinstance(names, re.Pattern) or callable(names):
            if isinstance(names, re.Pattern):
                return self._matching(names.search, repr(names))
            return self._matching(names, repr(names), also_aliases=False)
        if not isinstance(names, Iterable):
            raise TypeError(
                f"names_filter is a {type(names).__name__}; use a name, a list, a pattern or a function"
            )
        if isinstance(names, tuple) and len(names) > 1 and isinstance(names[1], int):
            return self._matches_text(self.short_form(names))
        return self._matches_any(names)

    def _matches_any(self, filters: Iterable[NameFilter]) -> dict[str, tuple[HookPoint, bool]]:
        merged: dict[str, tuple[HookPoint, bool]] = {}
        spelt: dict[HookPoint, str] = {}
        for one in filters:
            for asked, (point, literal) in self.matches(one).items():
                name = spelt.setdefault(point, asked)
                merged[name] = (point, literal or (name in merged and merged[name][1]))
        if not merged:
            raise HookNameError(
                "the filter is an empty list, which matches no hook point; None means every one."
            )
        return merged

    def _matches_text(self, name: str) -> dict[str, tuple[HookPoint, bool]]:
        if not any(c in name for c in "*?["):
            return {name: (self.hook_point(name), True)}
        return self._matching(
            re.compile(fnmatch.translate(self.canonical_name(name))).match, repr(name)
        )

    def _matching(
        self, test: Callable[[str], Any], described: str, also_aliases: bool = True
    ) -> dict[str, tuple[HookPoint, bool]]:
        found = {name: (point, False) for name, point in self.hook_dict.items() if test(name)}
        if not found and also_aliases:
            found = {
                n: (p, False) for n, p in self.hook_dict.items() if any(map(test, self.aliases(n)))
            }
        if not found:
            raise HookNameError(
                f"the filter {described} matches none of the {len(self.hook_dict)} hook points."
            )
        return found

    # -- adding and removing ----------------------------------------------------------------------

    def add_hook(
        self,
        name: NameFilter,
        hook: HookFn,
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> list[Handle]:
        """Add a function to the points of a filter. Nothing is added when any name is wrong."""
        return [h for _, h, _ in self._add(name, hook, dir, is_permanent, level, prepend)]

    def add_perma_hook(
        self, name: NameFilter, hook: HookFn, dir: Literal["fwd", "bwd"] = "fwd"
    ) -> list[Handle]:
        """Add a function that `reset_hooks` leaves in place."""
        return self.add_hook(name, hook, dir, is_permanent=True)

    def _add(
        self,
        name: NameFilter,
        hook: HookFn,
        dir: Any,
        permanent: bool,
        level: int | None,
        prepend: bool,
    ) -> list[tuple[HookPoint, Handle, bool]]:
        if not callable(hook):
            raise TypeError(f"a hook must be callable, got {type(hook).__name__} for {name!r}")
        found = self.matches(_all if name is None else name)
        return [
            (point, point.add_hook(hook, dir, permanent, level, prepend, name=asked), literal)
            for asked, (point, literal) in found.items()
        ]

    def check_and_add_hook(
        self, hook_point: HookPoint, hook_point_name: str, hook: HookFn, **kwargs: Any
    ) -> None:
        """TransformerLens's spelling of `hook_point.add_hook`, with the name checked."""
        if self.hook_point(hook_point_name) is not hook_point:
            raise HookNameError(
                f"{hook_point_name!r} names {self.hook_point(hook_point_name).name!r}, not this point"
            )
        hook_point.add_hook(hook, name=hook_point_name, **kwargs)

    def check_hooks_to_add(
        self, hook_point: HookPoint, hook_point_name: str, hook: HookFn, **kwargs: Any
    ) -> None:
        """Raise when a hook could not be added there."""
        self.hook_point(hook_point_name)
        if not callable(hook):
            raise TypeError(
                f"a hook must be callable, got {type(hook).__name__} for {hook_point_name!r}"
            )

    def remove_all_hook_fns(
        self,
        direction: Direction = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        for point in self.hook_dict.values():
            point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        for point in self.hook_dict.values():
            point.clear_context()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Direction = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove every hook but the permanent ones (those too with `including_permanent`)."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)

    def list_hooks(self, including_permanent: bool = True) -> list[tuple[str, str, Handle]]:
        """What is hooked now: (name as asked, "fwd" or "bwd", handle)."""
        return [
            (handle.asked.name or "", dir, handle)
            for point in self.hook_dict.values()
            for dir in ("fwd", "bwd")
            for handle in point._of(dir)
            if including_permanent or not handle.is_permanent
        ]

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[NameFilter, HookFn]] = (),
        bwd_hooks: Sequence[tuple[NameFilter, HookFn]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedRootModule]:
        """Hooks for the length of a `with` block; only these are removed at its end, however it ends.

        Raises:
            HookNameError: a name does not exist, or a literally named point did not fire though the
                model ran (raised when the block ends without another error).
        """
        runs = self._runs
        added = self._add_all(fwd_hooks, bwd_hooks)
        try:
            yield self
            if self._runs > runs:
                self._check_fired([(p, h) for p, h, literal in added if literal])
        finally:
            if reset_hooks_end:
                self._remove(added)
            if clear_contexts:
                self.clear_contexts()

    def _add_all(
        self,
        fwd_hooks: Sequence[tuple[NameFilter, HookFn]],
        bwd_hooks: Sequence[tuple[NameFilter, HookFn]],
    ) -> list[tuple[HookPoint, Handle, bool]]:
        added: list[tuple[HookPoint, Handle, bool]] = []
        try:
            for dir, pairs in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
                for pair in pairs:
                    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                        raise TypeError(
                            f"{dir}_hooks holds {pair!r}; each entry is a pair (name or filter, function)"
                        )
                    added += self._add(pair[0], pair[1], dir, False, None, False)
        except BaseException:
            self._remove(added)
            raise
        return added

    @staticmethod
    def _remove(added: Iterable[tuple[HookPoint, Handle, bool]]) -> None:
        for point, handle, _ in added:
            point.remove(handle)

    def _check_fired(self, awaited: Iterable[tuple[HookPoint, Handle]]) -> None:
        for _, handle in awaited:
            if not handle.reached:
                name = handle.asked.name or ""
                raise HookNameError(f"{name!r} did not fire: {self.why_silent(name)}.")

    # -- running ----------------------------------------------------------------------------------

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Sequence[tuple[NameFilter, HookFn]] = (),
        bwd_hooks: Sequence[tuple[NameFilter, HookFn]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Run the model with hooks that are gone afterwards.

        Backward hooks need the caller to call `.backward()` on what is returned, so they stay until then:
        they are tied to this run's tensors and never fire for another.

        Raises:
            HookNameError: a name that does not exist or cannot fire in this call.
        """
        added = self._add_all(fwd_hooks, bwd_hooks)
        try:
            return self._awaiting(added, *model_args, **model_kwargs)
        finally:
            if reset_hooks_end:
                self._remove(added)
            if clear_contexts:
                self.clear_contexts()

    def _awaiting(
        self, added: list[tuple[HookPoint, Handle, bool]], *args: Any, **kwargs: Any
    ) -> Any:
        """Call the model; literally named points must fire in it."""
        awaited = [(point, handle) for point, handle, literal in added if literal]
        outer, self._awaited = self._awaited, awaited
        try:
            out = self(*args, **kwargs)
            self._check_fired(awaited)
            return out
        finally:
            self._awaited = outer

    def take_awaited(self) -> list[tuple[HookPoint, Handle]]:
        """Points that must fire in the forward pass that now begins, for it to check before it computes; a pass
        that a hook starts inside it awaits nothing of theirs."""
        taken, self._awaited = self._awaited, []
        return taken

    def get_caching_hooks(
        self,
        names_filter: NameFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Callable[[Tensor, str], Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, HookFn]], list[tuple[str, HookFn]]]:
        """A cache and the hooks that fill it: (cache, forward hooks, backward hooks)."""
        target: dict[str, Tensor] = {} if cache is None else cache
        store = Store(target, device, remove_batch_dim, pos_slice)
        found = {asked: point for asked, (point, _) in self.matches(names_filter).items()}
        forward: list[tuple[str, HookFn]] = [
            (asked, _saver(store, point)) for asked, point in found.items()
        ]
        backward: list[tuple[str, HookFn]] = [
            (asked, _saver(store, point, "_grad"))
            for asked, point in found.items()
            if not _is_integer(point)
        ]
        return target, forward, backward if incl_bwd else []

    def add_caching_hooks(
        self,
        names_filter: NameFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Fill the returned dictionary on every run, until `reset_hooks`."""
        target, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache
        )
        for dir, pairs in (("fwd", forward), ("bwd", backward)):
            for name, fn in pairs:
                self.hook_point(name).add_hook(fn, dir, name=name, reads_only=dir == "fwd")  # type: ignore[arg-type]
        return target

    def cache_all(self, cache: dict[str, Tensor] | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """`add_caching_hooks` on every point."""
        return self.add_caching_hooks(None, cache=cache, **kwargs)

    def cache_some(
        self, cache: dict[str, Tensor] | None, names: NameFilter, **kwargs: Any
    ) -> dict[str, Tensor]:
        """`add_caching_hooks` on the points of a filter."""
        return self.add_caching_hooks(names, cache=cache, **kwargs)

    def run_and_store(
        self,
        *model_args: Any,
        names_filter: NameFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        pos_slice: Callable[[Tensor, str], Tensor] | None = None,
        lazy: bool = True,
        **model_kwargs: Any,
    ) -> tuple[Any, Kept]:
        """Run the model and keep the values of the filter's points under our names.

        Those that follow from others kept here too are made when they are first read, or at once (`lazy=False`). Values are
        snapshots without gradient; with `incl_bwd` the output, which must be a single number (`return_type="loss"`), is
        differentiated and gradients are kept under `name + "_grad"`.
        """
        stored, depth = Kept(), self.place.depth + 1
        store = Store(
            stored,
            device,
            remove_batch_dim,
            pos_slice,
            listens=lambda: self.place.depth <= depth,
            lazy=lazy,
        )
        added: list[tuple[HookPoint, Handle, bool]] = []
        try:
            for asked, (point, literal) in self.matches(names_filter).items():
                added.append((point, point.keep_in(store, asked), literal))
                if incl_bwd and not _is_integer(point):
                    grad = point.add_hook(_saver(store, point, "_grad"), "bwd", name=asked)
                    added.append((point, grad, literal))
            out = self._awaiting(added, *model_args, **model_kwargs)
            if incl_bwd:
                _differentiate(out)
            return out, stored
        finally:
            self._remove(added)


def _saver(store: Store, point: HookPoint, suffix: str = "") -> Saver:
    return Saver(store, f"{point.name}{suffix}", point.axes)


def _all(name: str) -> bool:
    return True


def _is_integer(point: HookPoint) -> bool:
    return point.axes == "batch pos"


def _differentiate(out: Any) -> None:
    if not isinstance(out, Tensor) or out.numel() != 1:
        shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"incl_bwd=True differentiates the output, which must be one number; this run returned {shape}. "
            'Ask for return_type="loss", or use run_with_hooks(bwd_hooks=...) and call backward() yourself.'
        )
    out.backward()
