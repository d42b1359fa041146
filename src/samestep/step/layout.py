"""Where tensors lie in flat storage, and how it is cut into one slice a worker. Pure: sizes only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

# elements; vectorised kernels round whole vectors and tails differently, so no cut may make a new
# tail
ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """The part of tensor `index` that lies in a worker's slice: its elements [start, stop), at `offset` in the slice."""

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Tensors of `sizes` elements one after the other, each aligned to 64 elements, cut into `workers` equal slices.

    Slices start and end on multiples of 64 elements; the last ones may be padding, wholly or in
    part.
    """

    sizes: tuple[int, ...]
    workers: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts, and after them where the last ends, in elements."""
        return tuple(
            accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes), initial=0)
        )

    @cached_property
    def slice_size(self) -> int:
        """Elements a worker."""
        return -(-self.offsets[-1] // (ALIGNMENT * self.workers)) * ALIGNMENT

    @property
    def flat_size(self) -> int:
        """Elements of the whole storage, padding included."""
        return self.slice_size * self.workers

    def pieces(self, rank: int) -> list[Piece]:
        """Return the parts of tensors that lie in a worker's slice, in order; empty tensors have none."""
        low, high = rank * self.slice_size, (rank + 1) * self.slice_size
        pieces = []
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=False)):
            start, stop = max(low, offset), min(high, offset + size)
            if start < stop:
                pieces.append(Piece(index, start - offset, stop - offset, start - low))
        return pieces


@dataclass(frozen=True)
class TensorSlice:
    """Elements `[start, start + len(values))` of a tensor, counted in the tensor's storage order.

    `values` is 1-D. `shape` is the whole tensor's. `order` lists its dims from the slowest to the
    fastest in storage: `(0, 1, 2, 3)` for a contiguous tensor, `(0, 2, 3, 1)` for channels last.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    start: int
    order: tuple[int, ...]


def storage_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of `tensor` from the slowest to the fastest, or plain order where it is not dense."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as 1-D in its storage order: a view where it is dense, a copy elsewhere."""
    return (
        tensor.view(-1)
        if tensor.is_contiguous()
        else tensor.permute(storage_order(tensor)).reshape(-1).contiguous()
    )
