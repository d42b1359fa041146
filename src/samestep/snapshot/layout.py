"""Which worker writes which elements of tensors that all workers hold, and whether pieces make up a tensor. Pure: sizes only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 64  # elements; no cache line and no vector of a tensor is shared between two workers


@dataclass(frozen=True)
class Extent:
    """The size of a tensor: how many elements it has, and bytes an element."""

    elements: int
    element_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.element_size


def share(extents: Sequence[Extent], rank: int, workers: int) -> list[range]:
    """Return the elements of each tensor that worker `rank` of `workers` writes.

    The tensors lie one after the other and their bytes are cut evenly, each cut moved down to a
    multiple of 64 elements of the tensor that it falls into. The ranges of all workers hold every
    element exactly once.
    """
    offsets = list(accumulate((extent.nbytes for extent in extents), initial=0))
    low, high = (offsets[-1] * worker // workers for worker in (rank, rank + 1))
    return [
        range(_element_at(low - offset, extent), _element_at(high - offset, extent))
        for offset, extent in zip(offsets[:-1], extents, strict=True)
    ]


def _element_at(byte: int, extent: Extent) -> int:
    if byte >= extent.nbytes:
        return extent.elements
    return max(byte, 0) // (extent.element_size * ALIGNMENT) * ALIGNMENT


def tiling_fault(ranges: Iterable[tuple[int, int]], elements: int) -> str | None:
    """Say what is wrong with (start, stop) ranges that should hold each of `elements` exactly once; None if nothing is."""
    end = 0
    for start, stop in sorted(ranges):
        if not 0 <= start < stop <= elements:
            return f"{start} to {stop} is no range of its {elements} elements"
        if start > end:
            break
        if start < end:
            return f"elements {start} to {min(end, stop)} of {elements} are there twice"
        end = stop
    else:
        start = elements
    return None if end == elements else f"elements {end} to {start} of {elements} are missing"
