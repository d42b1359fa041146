"""What a lane wrote to the buffers of one device: the host compares, or a GPU by itself.

Bits are compared, because BatchNorm's kernels do not increase the tensor's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from samestep.torch_internals import foreach_copy_

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class HostWrites:
    """Compares buffers of the host at the end of each lane, and copies only what differs.

    `starts` has the values at the start of the step, by number of the buffer.
    """

    def __init__(self, starts: list[Tensor]) -> None:
        self._starts = starts

    @property
    def groups(self) -> list[Group]:
        """The buffers of which forward's changes are noted, one group per dtype."""
        return []

    def changed_by_forward(self, current: Sequence[Tensor]) -> list[Tensor]:
        """Return how many words forward changed: int64 [buffers] per group."""
        return []

    def end_forward(self, changes: Sequence[Tensor]) -> None:
        """Note `changed_by_forward` of the current lane, which a graph may have computed."""

    def end_lane(self, current: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return copies of what the lane wrote, by number, and restore the start values.

        A GPU copies all, because the host does not know yet what forward wrote.
        """
        are_same = map(_same_bits, self._starts, current)
        own = [number for number, is_same in enumerate(are_same) if not is_same]
        written = {number: current[number].clone() for number in own}
        if own:
            foreach_copy_([current[n] for n in own], [self._starts[n] for n in own])
        return written

    def late(self) -> list[int]:
        """Return the numbers of the buffers that backward alone wrote; waits for a GPU."""
        return []

    def forget_groups(self) -> None:
        """Group the buffers anew, because user code has changed them."""


class GpuWrites(HostWrites):
    """Compares buffers on a GPU after forward, and again after backward, without waiting for it."""

    def __init__(self, starts: list[Tensor]) -> None:
        super().__init__(starts)
        self._groups: dict[int, list[Group]] = {}  # by the number of buffers at that time
        self._by_forward: list[Tensor] = []  # of the current lane, by group

    @property
    def groups(self) -> list[Group]:
        count = len(self._starts)
        if count and count not in self._groups:
            self._groups[count] = _groups_of(self._starts)
        return self._groups.get(count, [])

    def changed_by_forward(self, current: Sequence[Tensor]) -> list[Tensor]:
        return [
            group.changed(group.joined(self._starts), group.joined(current))
            for group in self.groups
        ]

    def end_forward(self, changes: Sequence[Tensor]) -> None:
        self._by_forward = list(changes)

    def end_lane(self, current: Sequence[Tensor]) -> dict[int, Tensor]:
        written: dict[int, Tensor] = {}
        for n, group in enumerate(self.groups):
            after = group.joined(current)  # 1-D, a copy of all buffers of one dtype
            if self._by_forward:
                changed = group.changed(group.joined(self._starts), after)
                # int64 [buffers]; what forward wrote as well is not late
                group.late.add_(changed * (self._by_forward[n] == 0))
            parts = after.split(group.sizes)
            for number, part in zip(group.numbers, parts, strict=True):
                written[number] = part.view(self._starts[number].shape)
        foreach_copy_([*current], self._starts)
        self._by_forward = []
        return written

    def late(self) -> list[int]:
        return [
            number
            for groups in self._groups.values()
            for group in groups
            for number, words in zip(group.numbers, group.late.tolist(), strict=True)
            if words
        ]

    def forget_groups(self) -> None:
        self._groups.clear()


@dataclass(frozen=True)
class Group:
    """The buffers of one dtype on one GPU, compared together. `bounds` has their ends in words.

    `late` counts, for each buffer, changes by backward that forward had not made.
    """

    numbers: list[int]
    sizes: list[int]
    words: torch.dtype  # integers, of which an element has one or two
    bounds: Tensor  # int64 [buffers + 1]
    late: Tensor  # int64 [buffers]

    def joined(self, buffers: Sequence[Tensor]) -> Tensor:
        return torch.cat([buffers[number].reshape(-1) for number in self.numbers])

    def changed(self, before: Tensor, after: Tensor) -> Tensor:
        """Return how many words of each buffer differ, int64 [buffers]."""
        differ = before.view(self.words) != after.view(self.words)
        # sums up to each word, from 0, at the bounds: [buffers + 1], and their differences
        totals = torch.nn.functional.pad(differ.cumsum(0), (1, 0)).index_select(0, self.bounds)
        return totals.diff()


def _groups_of(buffers: Sequence[Tensor]) -> list[Group]:
    groups = []
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        numbers = [number for number, buffer in enumerate(buffers) if buffer.dtype == dtype]
        sizes = [buffers[number].numel() for number in numbers]
        words = INTEGERS[min(dtype.itemsize, 8)]
        per_element = dtype.itemsize // words.itemsize
        bounds = list(accumulate((size * per_element for size in sizes), initial=0))
        ends = torch.tensor(bounds, device=buffers[0].device)
        groups.append(Group(numbers, sizes, words, ends, torch.zeros_like(ends[1:])))
    return groups


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Compare as integers: a NaN equals itself, and 0.0 differs from -0.0."""
    size = left.element_size()
    if size > 8:  # two words each, in the last dim
        left, right, size = left.reshape(-1), right.reshape(-1), 8
    return torch.equal(left.view(INTEGERS[size]), right.view(INTEGERS[size]))


def differs(left: Tensor, right: Tensor) -> Tensor:
    """Return whether any bit differs, as a tensor, to avoid waiting for a GPU."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return torch.full((), fill_value=True, device=left.device)
    words = INTEGERS[min(left.element_size(), 8)]  # complex128 is two words per element
    right = right.to(left.device)
    return (left.reshape(-1).view(words) != right.reshape(-1).view(words)).any()
