"""The layout of tensors in flat storage, divided into one slice per worker. Pure: sizes only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

# In elements. Vectorized kernels round full vectors and tails differently, so no cut between
# workers may create a new tail.
ALIGNMENT = 64
# In bytes. Kernels of GPUs choose by the alignment of a tensor's memory, up to this; allocators
# align every tensor to it.
GPU_ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of tensor `index`, stored at `offset` of what one worker holds."""

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Tensors with `sizes` elements each, aligned to 64 and cut into `workers` equal slices.

    Slices start and end on multiples of 64 elements; the last ones may contain padding only.
    `alignment` replaces 64 by a multiple of it.
    """

    sizes: tuple[int, ...]
    workers: int
    alignment: int = ALIGNMENT

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The start of each tensor, followed by the end of the last one, in elements."""
        unit = self.alignment
        return tuple(accumulate((-(-n // unit) * unit for n in self.sizes), initial=0))

    @cached_property
    def slice_size(self) -> int:
        """Elements per worker."""
        return -(-self.offsets[-1] // (self.alignment * self.workers)) * self.alignment

    @property
    def flat_size(self) -> int:
        """Elements in total, including padding."""
        return self.slice_size * self.workers

    def fragments(self, number: int, slices: int = 1) -> list[Fragment]:
        """Return the parts of tensors in adjacent slices, in order; empty tensors have none."""
        low, high = number * self.slice_size, (number + slices) * self.slice_size
        fragments = []
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=False)):
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

    values: Tensor
    shape: tuple[int, ...]
    start: int
    order: tuple[int, ...]


def storage_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims from slowest to fastest, or in normal order if `tensor` has gaps."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim))


def flattened(tensor: Tensor) -> Tensor:
    """Return `tensor` as 1-D in its storage order: a view if it has no gaps, otherwise a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.permute(storage_order(tensor)).reshape(-1).contiguous()
