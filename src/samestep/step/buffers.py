"""Buffers under lanes: all lanes start a step from the same buffers, and the step ends with one agreed value.

A floating-point buffer (BatchNorm's running statistics) becomes the tree mean of the values of the
lanes that had samples; any other takes the value of the first such lane; one that no lane wrote is
left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.comm.base import World
from samestep.step.tree import Span, subtrees, tree_sum

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Buffers:
    """The buffers of all replicated modules, as lanes come and go."""

    def __init__(
        self,
        own: range,
        lanes: int,
        world: World,
        carriers: Sequence[range],
        devices: Sequence[torch.device],
    ) -> None:
        self._own, self._lanes, self._world, self._carriers = own, lanes, world, carriers
        self._homes: list[tuple[torch.nn.Module, str]] = []
        self._starts: list[tuple[torch.device, list[torch.Tensor]]] = [
            (device, []) for device in devices
        ]
        self._start = self._starts[0][1]
        self._written: dict[int, dict[int, torch.Tensor]] = {}

    def add(self, module: torch.nn.Module) -> None:
        """Manage the buffers of a module, each once."""
        known = {id(buffer) for buffer in self._current()}
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if id(buffer) not in known:
                    known.add(id(buffer))
                    self._homes.append((owner, name))
                    for device, start in self._starts:
                        start.append(buffer.detach().to(device, copy=True))

    def begin_step(self) -> None:
        """Take what stands in the buffers now as the value every lane starts from."""
        self._written = {}
        current = self._current()
        for _, starts in self._starts if current else ():
            torch._foreach_copy_(starts, [buffer.detach() for buffer in current])

    def end_lane(self, lane: int, device: int = 0) -> None:
        """Keep what this lane wrote on the worker's device of this number, and put the start values back for its next one.

        Bits are compared, because BatchNorm's kernels write without counting the tensor's version
        up. On a GPU that waits until all lanes are under way.
        """
        written = self._written[lane] = {}
        for number, (start, buffer) in enumerate(
            zip(self._starts[device][1], self._current(), strict=True)
        ):
            if start.is_cuda or not _same_bits(start, buffer):
                written[number] = buffer.detach().clone()
                buffer.data.copy_(start)

    def written(self) -> list[int]:
        """Return the numbers of the buffers that a lane of this worker wrote."""
        for lane, kept in self._written.items():
            on_first_device = {
                number: value.to(self._start[number].device) for number, value in kept.items()
            }
            self._written[lane] = {
                n: value
                for n, value in on_first_device.items()
                if not _same_bits(self._start[n], value)
            }
        return sorted({number for lane in self._written.values() for number in lane})

    def end_step(self, written: Sequence[int], lanes_with_items: Sequence[int]) -> None:
        """Agree on the value of the buffers that any lane wrote; collective when there are any."""
        if not written or not lanes_with_items:
            return
        averaged = [number for number in written if self._start[number].is_floating_point()]
        taken = [number for number in written if not self._start[number].is_floating_point()]
        rows = self._gather(averaged, taken, lanes_with_items)
        size = 8 * sum(self._start[number].numel() for number in averaged)
        nodes: dict[Span, torch.Tensor] = {}
        for own, row in zip(self._carriers, rows, strict=True):
            spans = subtrees(own, self._lanes)
            # a copy is aligned
            sums = row[: size * len(spans)].clone().view(torch.float64).view(len(spans), -1)
            nodes.update(zip(spans, sums, strict=True))
        mean = tree_sum((0, self._lanes), nodes.get, torch.add) / len(lanes_with_items)
        first = next(
            row for own, row in zip(self._carriers, rows, strict=True) if lanes_with_items[0] in own
        )
        current = self._current()
        for number, values in zip(
            averaged, mean.split([self._start[n].numel() for n in averaged]), strict=True
        ):
            current[number].data.copy_(values.view(self._start[number].shape))
        offset = self._most_spans() * size
        for number in taken:
            start = self._start[number]
            values = first[offset : offset + start.numel() * start.element_size()].clone()
            current[number].data.copy_(values.view(start.dtype).view(start.shape))
            offset += len(values)

    def _gather(
        self, averaged: Sequence[int], taken: Sequence[int], lanes_with_items: Sequence[int]
    ) -> torch.Tensor:
        """Return a row of bytes a worker: sums of its subtrees in float64, then its first lane's other buffers."""
        own_lanes = [lane for lane in lanes_with_items if lane in self._own]

        def value(lane: int, number: int) -> torch.Tensor:
            return self._written[lane].get(number, self._start[number]).reshape(-1)

        def leaf(span: Span) -> torch.Tensor | None:
            if span[1] - span[0] > 1:
                return None
            if span[0] not in own_lanes or not averaged:
                sizes = sum(self._start[number].numel() for number in averaged)
                return torch.zeros(sizes, dtype=torch.float64, device=self._start[0].device)
            return torch.cat([value(span[0], number).double() for number in averaged])

        parts = [
            tree_sum(span, leaf, torch.add).view(torch.uint8)
            for span in subtrees(self._own, self._lanes)
        ]
        parts += [parts[0].new_zeros(len(parts[0]))] * (self._most_spans() - len(parts))
        lane = own_lanes[0] if own_lanes else None
        parts += [
            (self._start[n].reshape(-1) if lane is None else value(lane, n))
            .contiguous()
            .view(torch.uint8)
            for n in taken
        ]
        row = torch.cat(parts)
        rows = row.new_empty(self._world.size * len(row))
        self._world.all_gather(rows, row, "averaging buffers")
        return rows.view(self._world.size, -1)

    def _most_spans(self) -> int:
        return max(len(subtrees(own, self._lanes)) for own in self._carriers)

    def _current(self) -> list[torch.Tensor]:
        # as the module sees them now
        return [owner._buffers[name] for owner, name in self._homes]  # type: ignore[misc]  # noqa: SLF001


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare as integers: a NaN is equal to itself, and 0.0 differs from -0.0."""
    words = INTEGERS[min(left.element_size(), 8)]
    return torch.equal(left.reshape(-1).view(words), right.reshape(-1).view(words))
