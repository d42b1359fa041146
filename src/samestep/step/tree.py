"""The fixed pairwise order in which lanes are added, and the lanes of each worker.

The tree over lanes [lo, hi) splits at the largest power of two below its length:

    8 lanes                     [0,8)
                        [0,4)           [4,8)
                    [0,2)   [2,4)   [4,6)   [6,8)
                    0   1   2   3   4   5   6   7
    3 workers       w0 w0 | w1  w1  w1 | w2 w2  w2

A worker adds the maximal subtrees inside its own lanes (w1: [2,4) and 4); the exchange finishes the
tree. So the order of additions does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

Value = TypeVar("Value")
Span = tuple[int, int]


def lanes_of(rank: int, workers: int, lanes: int) -> range:
    """Return the contiguous lanes of a worker; workers' numbers of lanes differ by at most one."""
    return range(rank * lanes // workers, (rank + 1) * lanes // workers)


def halves(span: Span) -> tuple[Span, Span]:
    """Split a span of at least two lanes at the largest power of two below its length."""
    low, high = span
    middle = low + (1 << (high - low - 1).bit_length() - 1)
    return (low, middle), (middle, high)


def subtrees(own: range, lanes: int) -> list[Span]:
    """Return the maximal spans of the tree over `lanes` inside the lanes `own`, in lane order."""

    def inside(span: Span) -> list[Span]:
        low, high = span
        if own.start <= low and high <= own.stop:
            return [span]
        if high <= own.start or own.stop <= low:
            return []
        left, right = halves(span)
        return inside(left) + inside(right)

    return inside((0, lanes)) if own else []


def tree_sum(
    span: Span, known: Callable[[Span], Value | None], add: Callable[[Value, Value], Value]
) -> Value:
    """Add the values of a span's lanes along the tree, in lane order.

    `known` returns the value of a span, or None if the span's halves should be added instead. It is
    called for spans from left to right, so it may compute a lane's value on demand. `add` may reuse
    its first argument.
    """
    value = known(span)
    if value is not None:
        return value
    left, right = halves(span)
    total = tree_sum(left, known, add)
    return add(total, tree_sum(right, known, add))


def tree_steps(
    span: Span, known: Callable[[Span], Value | None], add: Callable[[Value, Value], Value]
) -> Generator[None, None, Value]:
    """Add as `tree_sum` does, and yield after each known value so that sums can be interleaved."""
    value = known(span)
    if value is not None:
        yield
        return value
    left, right = halves(span)
    total = yield from tree_steps(left, known, add)
    return add(total, (yield from tree_steps(right, known, add)))
