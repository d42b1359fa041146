"""The layout of lanes and tensors, and the fixed order of sums. Pure: numbers and sizes only.

A worker has contiguous lanes. Lanes are added pairwise: the tree over lanes [lo, hi) splits at the
largest power of two below its length:

    8 lanes                     [0,8)
                        [0,4)           [4,8)
                    [0,2)   [2,4)   [4,6)   [6,8)
                    0   1   2   3   4   5   6   7
    3 workers       w0 w0 | w1  w1  w1 | w2 w2  w2

A worker adds the maximal subtrees inside its own lanes (w1: [2,4) and 4); the exchange finishes the
tree. So the order of additions does not depend on the number of workers. If a model is sharded,
lanes are strided instead: worker r of W has lanes r, r + W, ..., so that all workers compute
neighbors at the same time, whose gradients are added at once.

Tensors lie in flat storage, which is divided into one slice per worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from torch import Tensor

Value = TypeVar("Value")
Span = tuple[int, int]  # [low, high) of lanes

# In elements. Vectorized kernels round full vectors and tails differently, so no cut between
# workers may create a new tail.
ALIGNMENT = 64
# In bytes. Kernels of GPUs choose by the alignment of a tensor's memory, up to this; allocators
# align every tensor to it.
GPU_ALIGNMENT_BYTES = 512


def lanes_of(rank: int, workers: int, lanes: int) -> range:
    """Return the contiguous lanes of a worker; workers' numbers of lanes differ by at most one."""
    # both ends are rounded down, so neighbors meet without a gap
    return range(rank * lanes // workers, (rank + 1) * lanes // workers)


@dataclass
class Assignment:
    """Which worker computes which lanes: contiguous ones, or strided ones."""

    workers: int
    lanes: int
    is_strided: bool = False

    def stride(self) -> None:
        """Make lanes strided, before any of them is computed."""
        self.is_strided = True

    def of(self, rank: int) -> range:
        """Return the lanes of a worker."""
        if self.is_strided:
            return range(rank, self.lanes, self.workers)
        return lanes_of(rank, self.workers, self.lanes)

    def worker_of(self, lane: int) -> int:
        """Return the rank of the worker that computes a lane."""
        return next(rank for rank in range(self.workers) if lane in self.of(rank))

    def subtrees(self, ranks: range) -> list[Span]:
        """Return the maximal subtrees of the lanes of these workers."""
        return subtrees(sorted(lane for rank in ranks for lane in self.of(rank)), self.lanes)


def halves(span: Span) -> tuple[Span, Span]:
    """Split a span of at least two lanes at the largest power of two below its length."""
    low, high = span
    middle = low + (1 << (high - low - 1).bit_length() - 1)  # 4 lanes of 5 to 8
    return (low, middle), (middle, high)


def subtrees(own_lanes: Sequence[int], lanes: int) -> list[Span]:
    """Return the maximal spans of the tree over `lanes` inside sorted `own_lanes`, in order."""

    def inside(span: Span) -> list[Span]:
        own = bisect_left(own_lanes, span[1]) - bisect_left(own_lanes, span[0])
        if own == span[1] - span[0]:
            return [span]
        if own == 0:
            return []
        left, right = halves(span)  # other workers have some of the span
        return inside(left) + inside(right)

    return inside((0, lanes))


def tree_sum(
    span: Span, value_of: Callable[[Span], Value | None], add: Callable[[Value, Value], Value]
) -> Value:
    """Add the values of a span's lanes along the tree, in lane order.

    `value_of` returns the value of a span, or None if the span's halves should be added instead. It
    is called for spans from left to right, so it may compute a lane's value on demand. `add` may
    reuse its first argument.
    """
    value = value_of(span)
    if value is not None:
        return value
    left, right = halves(span)
    total = tree_sum(left, value_of, add)  # depth first: each level of the tree holds one sum
    return add(total, tree_sum(right, value_of, add))


def tree_steps(
    span: Span,
    value_of: Callable[[Span], Generator[Any, Any, Value | None]],
    add: Callable[[Value, Value], Value],
) -> Generator[Any, Any, Value]:
    """Add as `tree_sum` does, and yield what `value_of` yields while it computes a value."""
    value = yield from value_of(span)
    if value is not None:
        return value
    left, right = halves(span)
    total = yield from tree_steps(left, value_of, add)
    return add(total, (yield from tree_steps(right, value_of, add)))


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of tensor `index`, stored at `offset` of what one worker holds."""

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Tensors with `sizes` elements each, aligned to 64 and cut into one slice per worker.

    Slices start and end on multiples of 64 elements. They are equal, so that the last ones may
    contain padding only, unless `owners` has the number of the slice of each tensor, in ascending
    order: then no tensor is cut, and slices may be empty. `alignment` replaces 64 by a multiple of
    it.
    """

    sizes: tuple[int, ...]  # in elements, as all numbers here
    workers: int
    alignment: int = ALIGNMENT
    owners: tuple[int, ...] | None = None

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The start of each tensor, followed by the end of the last one, in elements."""
        unit = self.alignment  # padding fills each tensor up to a multiple
        return tuple(accumulate((-(-n // unit) * unit for n in self.sizes), initial=0))

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The start of each slice, followed by the end of the last one, in elements."""
        numbers = range(self.workers + 1)
        if self.owners is not None:
            return tuple(self.offsets[bisect_left(self.owners, number)] for number in numbers)
        # equal, so that an all-gather can fill flat storage: [workers, size]
        size = -(-self.offsets[-1] // (self.alignment * self.workers)) * self.alignment
        return tuple(size * number for number in numbers)

    @property
    def flat_size(self) -> int:
        """Elements in total, including padding."""
        return self.bounds[-1]

    def fragments(self, number: int, slices: int = 1) -> list[Fragment]:
        """Return the parts of tensors in adjacent slices, in order; empty tensors have none."""
        low, high = self.bounds[number], self.bounds[number + slices]
        fragments = []
        # `offsets` has one more entry, the end of the last tensor
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=False)):
            # [start, stop) in flat storage
            start, stop = max(low, offset), min(high, offset + size)
            if start < stop:
                fragments.append(Fragment(index, start - offset, stop - offset, start - low))
        return fragments


@dataclass(frozen=True)
class TensorSlice:
    """Elements `[start, start + len(values))` of a tensor, counted in the tensor's storage order.

    `values` is 1-D. `shape` is the shape of the complete tensor. `order` lists its dims from the
    slowest to the fastest in storage: `(0, 1, 2, 3)` for a contiguous tensor, `(0, 2, 3, 1)` for
    channels last.
    """

    values: Tensor  # 1-D, elements [start, stop)
    shape: tuple[int, ...]
    start: int
    order: tuple[int, ...]


def storage_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims from slowest to fastest, or in normal order if `tensor` has gaps."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    # channels last [N, C, H, W] has strides (H*W*C, 1, W*C, C)
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim))


def flattened(tensor: Tensor) -> Tensor:
    """Return `tensor` as 1-D in its storage order: a view if it has no gaps, otherwise a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.permute(storage_order(tensor)).reshape(-1).contiguous()


def view_like(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a view of 1-D storage from `offset`, with the shape and storage order of `like`."""
    dense = flattened(like).data_ptr() == like.data_ptr()  # no copy was needed
    strides = (like if dense else like.contiguous()).stride()
    # `as_strided` counts from the start of the memory, not from that of `flat`
    return flat.as_strided(like.shape, strides, flat.storage_offset() + offset)
