"""Where tensors lie in flat storage, and how it is cut into one slice a worker. Pure: sizes only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

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
