"""Blocks that keep nothing for the way back but what entered them, and run once more when the gradient arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lens_gemma4.hooks import Handle, HookPoint, Place


@dataclass
class Listeners:
    """Who listens to a point."""

    point: HookPoint
    fwd_hooks: list[Handle]
    bwd_hooks: list[Handle]


def recomputed(
    block: nn.Module, place: Place, compute: Callable[[Tensor], Tensor], stream: Tensor
) -> Tensor:
    """`compute(stream)`, of which autograd keeps `stream` alone.

    The second time the block's points have the functions that they had the first time, whoever came or went since. They are
    called again, and must do the same again (torch's global random numbers are the same); those of caches are not.
    """
    listening = [
        Listeners(point, list(point.fwd_hooks), list(point.bwd_hooks))
        for point in block.modules()
        if isinstance(point, HookPoint) and point.live
    ]
    then = place.positions, place.depth
    answers: list[bool] = []  # of points asked whether their value can be made later
    ran = False

    def run(stream: Tensor) -> Tensor:
        nonlocal ran
        if not ran:
            ran = True
            with _noting(place, answers):
                return compute(stream)
        with _as_then(block, place, listening, then), _repeating(place, answers):
            return compute(stream)

    return checkpoint(run, stream, use_reentrant=False)


@contextmanager
def _noting(place: Place, answers: list[bool]) -> Iterator[None]:
    outer, place.noted = place.noted, answers
    try:
        yield
    finally:
        place.noted = outer


@contextmanager
def _repeating(place: Place, answers: list[bool]) -> Iterator[None]:
    outer, place.repeated = place.repeated, iter(answers)
    try:
        yield
    finally:
        place.repeated = outer


@contextmanager
def _as_then(
    block: nn.Module, place: Place, listening: list[Listeners], then: tuple[range | None, int]
) -> Iterator[None]:
    """The block's points with the functions of another time."""
    points = [point for point in block.modules() if isinstance(point, HookPoint)]
    now = [Listeners(point, point.fwd_hooks, point.bwd_hooks) for point in points]
    outer = place.positions, place.depth
    place.positions, place.depth = then  # a run that a hook starts is inside this one, as it was
    _set([Listeners(point, [], []) for point in points])
    _set(listening)
    try:
        yield
    finally:
        _set(now)
        place.positions, place.depth = outer


def _set(listening: list[Listeners]) -> None:
    for one in listening:
        one.point.fwd_hooks, one.point.bwd_hooks = one.fwd_hooks, one.bwd_hooks
        one.point.live = bool(one.fwd_hooks or one.bwd_hooks)
