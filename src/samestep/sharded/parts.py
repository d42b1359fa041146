"""The part of each parameter that a worker owns, and the elements that it updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.step.layout import ALIGNMENT, TensorSlice

Elements = tuple[int, int]  # [start, stop) of a parameter in its storage order


def rows_of(shape: Sequence[int], workers: int) -> list[Elements]:
    """Return the elements that each worker owns, by rank: whole rows, as FSDP2 divides them.

    Each has as many rows as the first, as long as there are some.
    """
    rows, width = shape[0], math.prod(shape[1:])
    chunk = -(-rows // workers)
    ends = [min(rank * chunk, rows) * width for rank in range(workers + 1)]
    return list(pairwise(ends))


def extended(elements: Elements, numel: int) -> Elements:
    """Return elements extended to multiples of 64, but not past the parameter's end.

    So each is as far from a multiple of 64 as it is in the whole parameter, and kernels that treat
    vectors and tails differently give it the same bits.
    """
    start, stop = elements
    if start == stop:
        return 0, 0
    return start // ALIGNMENT * ALIGNMENT, min(-(-stop // ALIGNMENT) * ALIGNMENT, numel)


class Part:
    """A parameter of which this worker owns some rows.

    `sharded` is the DTensor that the module has, `whole` the parameter that computes while the unit
    is gathered. The optimizer updates `segment`, 1-D: FSDP2's own memory if the borders are
    multiples of 64 elements, and otherwise a copy, which `publish` copies back.
    """

    def __init__(
        self, name: str, sharded: Parameter, unsharded: Parameter, rank: int, workers: int
    ) -> None:
        self.name, self.sharded, self.unsharded = name, sharded, unsharded
        self.shape, self.numel = tuple(unsharded.shape), unsharded.numel()
        self.is_used = False  # has a gradient, of which this worker may have no element
        self.stand_in: Tensor | None = None  # for the gradient, in `.grad` of the sharded one
        self.rows = rows_of(self.shape, workers)
        self.wide = [extended(elements, self.numel) for elements in self.rows]
        self.start, self.stop = self.rows[rank]
        self.low, self.high = self.wide[rank]
        self.inner = slice(self.start - self.low, self.stop - self.low)  # of `segment`
        padded: Tensor = sharded.to_local().detach().view(-1)  # type: ignore[attr-defined]
        self._local = padded[: self.stop - self.start]
        self._is_copied = (self.start, self.stop) != (self.low, self.high)
        values = self._local.new_zeros(self.high - self.low) if self._is_copied else self._local
        self.segment = Parameter(values, unsharded.requires_grad)

    @property
    def size(self) -> int:
        """Elements that this worker updates."""
        return self.high - self.low

    def take(self, values: Tensor) -> None:
        """Take this worker's elements of the whole parameter."""
        self.set(values.detach().reshape(-1)[self.low : self.high])

    def set(self, values: Tensor) -> None:
        """Set the elements of the segment, [size]."""
        with torch.no_grad():
            self.segment.copy_(values)
        self.publish()

    def add_gradient(self, gradient: Tensor) -> None:
        """Add to the gradient of the segment."""
        earlier = self.segment.grad
        self.segment.grad = gradient if earlier is None else earlier.add_(gradient)

    def use(self) -> None:
        """Note that there is a gradient."""
        self.is_used, self.sharded.grad = True, self.stand_in

    def stand_for(self, placeholder: Tensor) -> None:
        """Let a placeholder stand for the gradient in `.grad` of the sharded parameter."""
        self.stand_in = placeholder

    def clear(self) -> None:
        """Forget the gradient."""
        self.segment.grad = self.sharded.grad = None
        self.is_used = False

    def publish(self) -> None:
        """Give FSDP2 what the optimizer updated."""
        if self._is_copied:
            self._local.copy_(self.segment.detach()[self.inner])

    def slice_of(self, values: Tensor) -> TensorSlice:
        """Return what this worker saves of `values`, one per element of the segment."""
        order = tuple(range(len(self.shape)))
        return TensorSlice(values.detach()[self.inner], self.shape, self.start, order)
