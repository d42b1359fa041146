"""Module buffers: every lane starts a step from the same values, and all workers agree after it.

A floating-point buffer (BatchNorm's running statistics) becomes the tree mean of the values of the
lanes that had samples. Any other buffer takes the value of the first such lane. A buffer that no
lane wrote stays unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from samestep.comm.base import World
from samestep.step.tree import Span, lanes_of, subtrees, tree_sum

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Buffers:
    """The buffers of all replicated modules, saved and restored around each lane."""

    def __init__(self, world: World, lanes: int, devices: Sequence[torch.device]) -> None:
        self._world, self._lanes = world, lanes
        self._lanes_by_rank = [lanes_of(rank, world.size, lanes) for rank in range(world.size)]
        self._spans = [subtrees(own, lanes) for own in self._lanes_by_rank]
        self._most_spans = max(map(len, self._spans))
        self._homes: list[tuple[dict[str, Any], str]] = []
        self._starts: list[tuple[torch.device, list[Tensor]]] = [(device, []) for device in devices]
        self._start = self._starts[0][1]
        self._written: dict[int, dict[int, Tensor]] = {}

    def add(self, module: Module) -> None:
        """Manage the buffers of a module; shared ones are added once."""
        known = {id(buffer) for buffer in self._current()}
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if id(buffer) not in known:
                    known.add(id(buffer))
                    self._homes.append((owner._buffers, name))  # noqa: SLF001 (no public access)
                    for device, start in self._starts:
                        start.append(buffer.detach().to(device, copy=True))

    def begin_step(self) -> None:
        """Save the current values, from which every lane starts."""
        self._written = {}
        current = self._current()
        for _, starts in self._starts if current else ():
            torch._foreach_copy_(starts, [buffer.detach() for buffer in current])

    def end_lane(self, lane: int, device: int = 0) -> None:
        """Save the values that a lane wrote on device number `device`; restore the start values.

        Bits are compared, because BatchNorm's kernels do not increase the tensor's version.
        On a GPU, the comparison is postponed until all lanes are enqueued.
        """
        written = self._written[lane] = {}
        pairs = zip(self._starts[device][1], self._current(), strict=True)
        for number, (start, buffer) in enumerate(pairs):
            if start.is_cuda or not _same_bits(start, buffer):
                written[number] = buffer.detach().clone()
                buffer.data.copy_(start)

    def written(self) -> list[int]:
        """Return the numbers of the buffers that a lane of this worker wrote."""
        start = self._start
        for lane, values in self._written.items():
            moved = {n: value.to(start[n].device) for n, value in values.items()}
            self._written[lane] = {n: v for n, v in moved.items() if not _same_bits(start[n], v)}
        return sorted({number for values in self._written.values() for number in values})

    def end_step(self, written: Sequence[int], lanes_with_items: Sequence[int]) -> None:
        """Agree on the buffers that any lane wrote; collective if there are any."""
        if not written or not lanes_with_items:
            return
        averaged = [number for number in written if self._start[number].is_floating_point()]
        taken = [number for number in written if not self._start[number].is_floating_point()]
        sizes = [self._start[number].numel() for number in averaged]
        rows = self._gather(averaged, taken, lanes_with_items)
        size = 8 * sum(sizes)
        nodes: dict[Span, Tensor] = {}
        for spans, row in zip(self._spans, rows, strict=True):
            # cloned, because a view as float64 needs aligned memory
            sums = row[: size * len(spans)].clone().view(torch.float64).view(len(spans), -1)
            nodes.update(zip(spans, sums, strict=True))
        mean = tree_sum((0, self._lanes), nodes.get, torch.add) / len(lanes_with_items)
        current = self._current()
        for number, values in zip(averaged, mean.split(sizes), strict=True):
            current[number].data.copy_(values.view(self._start[number].shape))
        owns_first = [lanes_with_items[0] in own for own in self._lanes_by_rank]
        first = rows[owns_first.index(True)]
        offset = self._most_spans * size
        for number in taken:
            start = self._start[number]
            values = first[offset : offset + start.numel() * start.element_size()].clone()
            current[number].data.copy_(values.view(start.dtype).view(start.shape))
            offset += len(values)

    def _gather(
        self, averaged: Sequence[int], taken: Sequence[int], lanes_with_items: Sequence[int]
    ) -> Tensor:
        """Return a row of bytes per worker: sums of its subtrees, values of its first lane."""
        rank = self._world.rank
        own_lanes = [lane for lane in lanes_with_items if lane in self._lanes_by_rank[rank]]

        def value(lane: int, number: int) -> Tensor:
            return self._written[lane].get(number, self._start[number]).reshape(-1)

        def leaf(span: Span) -> Tensor | None:
            if span[1] - span[0] > 1:
                return None
            if span[0] not in own_lanes or not averaged:
                size = sum(self._start[number].numel() for number in averaged)
                return torch.zeros(size, dtype=torch.float64, device=self._start[0].device)
            return torch.cat([value(span[0], number).double() for number in averaged])

        parts = [tree_sum(span, leaf, torch.add).view(torch.uint8) for span in self._spans[rank]]
        parts += [parts[0].new_zeros(len(parts[0]))] * (self._most_spans - len(parts))
        for number in taken:
            first = value(own_lanes[0], number) if own_lanes else self._start[number].reshape(-1)
            parts.append(first.contiguous().view(torch.uint8))
        row = torch.cat(parts)
        rows = row.new_empty(self._world.size * len(row))
        self._world.all_gather(rows, row, "averaging buffers")
        return rows.view(self._world.size, -1)

    def _current(self) -> list[Tensor]:
        return [registry[name] for registry, name in self._homes]


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Compare as integers: a NaN equals itself, and 0.0 differs from -0.0."""
    words = INTEGERS[min(left.element_size(), 8)]
    return torch.equal(left.reshape(-1).view(words), right.reshape(-1).view(words))
