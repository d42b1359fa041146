"""Buffers that lanes wrote become one value each, by their rules, on all workers.

Means, sums, minima and maxima follow the tree over lanes; others are those of the first lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from samestep.comm.base import World
from samestep.step.buffer_rules import Home
from samestep.step.layout import Assignment, Span, tree_sum

Join = Callable[[Tensor, Tensor], Tensor]
# how the values of two subtrees become that of their parent
JOINS: Final[Mapping[str | None, Join]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class _Part(NamedTuple):
    """Buffers that are combined in one way along the tree, with elements of 8 bytes."""

    join: Join
    dtype: torch.dtype
    numbers: list[int]


class BufferSums:
    """Combines what the lanes of all workers wrote to the buffers `homes`.

    `starts` has their values at the start of the step, by number.
    """

    def __init__(
        self,
        world: World,
        assignment: Assignment,
        homes: Sequence[Home],
        starts: Sequence[Tensor],
    ) -> None:
        self._world, self._assignment = world, assignment
        self._homes, self._start = homes, starts

    @property
    def _spans(self) -> list[list[Span]]:
        """The subtrees of each worker, by rank."""
        ranks = range(self._world.size)
        return [self._assignment.subtrees(range(rank, rank + 1)) for rank in ranks]

    def of(
        self,
        written: Sequence[int],
        by_lane: Mapping[int, Mapping[int, Tensor]],
        lanes_with_items: Sequence[int],
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the value of each buffer that any lane wrote, by number; collective.

        Also whether lanes differ, for those without a rule. `by_lane` has what this worker's lanes
        wrote, by lane and number.
        """
        parts = self._parts_of(written)
        joined = {number for part in parts for number in part.numbers}
        copied = [number for number in written if number not in joined]
        rows = self._gather(parts, copied, by_lane, lanes_with_items)
        sizes = [sum(self._start[number].numel() for number in part.numbers) for part in parts]
        size = 8 * sum(sizes)  # bytes of a node: all parts have elements of 8 bytes
        nodes: dict[Span, list[Tensor]] = {}  # of the tree over lanes: the values of each part, 1-D
        all_spans = self._spans
        for spans, row in zip(all_spans, rows, strict=True):
            # int64 [spans, elements]; cloned, because a view needs aligned memory
            words = row[: size * len(spans)].clone().view(torch.int64).view(len(spans), -1)
            for span, values in zip(spans, words, strict=True):
                pieces = values.split(sizes)
                nodes[span] = [
                    piece.view(part.dtype) for part, piece in zip(parts, pieces, strict=True)
                ]
        results = {}  # of the shape of the buffer, in the dtype of the sum
        totals = tree_sum((0, self._assignment.lanes), nodes.get, partial(_join, parts))
        for part, values in zip(parts, totals, strict=True):
            pieces = values.split([self._start[number].numel() for number in part.numbers])
            for number, piece in zip(part.numbers, pieces, strict=True):
                start, result = self._start[number], piece
                if self._homes[number].rule == "mean":
                    result = piece / len(lanes_with_items)
                elif self._homes[number].rule == "sum":  # of the lanes' changes
                    result = start.reshape(-1).to(part.dtype) + piece
                results[number] = result.view(start.shape)
        first, differing = self._first(
            copied, rows, max(map(len, all_spans)) * size, lanes_with_items
        )
        return results | first, differing

    def _first(
        self, copied: Sequence[int], rows: Tensor, offset: int, lanes_with_items: Sequence[int]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the first lane's value of buffers, from their rows of bytes after `offset`.

        Also whether lanes differ, for those without a rule.
        """
        # in the order of their first lanes
        with_items = list(dict.fromkeys(map(self._assignment.worker_of, lanes_with_items)))
        # uint8 [workers, nbytes]; the first one has the first lane
        rows = torch.stack([rows[rank] for rank in with_items])  # an index would be copied to a GPU
        first = {}
        unknown = {}  # [workers, nbytes] each, by number
        for number in copied:
            start = self._start[number]
            values = rows[:, offset : offset + start.nbytes]
            offset += start.nbytes
            first[number] = values[0].clone().view(start.dtype).view(start.shape)
            if self._homes[number].rule is None:
                unknown[number] = values
        differing = {
            # in or between workers
            number: rows[:, place].any() | (values != values[0]).any()
            for place, (number, values) in enumerate(unknown.items(), offset)
        }
        return first, differing

    def _parts_of(self, written: Sequence[int]) -> list[_Part]:
        """Group the buffers whose values are combined along the tree."""
        parts: dict[tuple[Join, torch.dtype], list[int]] = {}
        for number in written:
            rule = self._homes[number].rule
            if rule in JOINS:
                is_float = self._start[number].is_floating_point()
                dtype = torch.float64 if is_float else torch.int64
                parts.setdefault((JOINS[rule], dtype), []).append(number)
        return [_Part(*kind, numbers) for kind, numbers in parts.items()]

    def _gather(
        self,
        parts: Sequence[_Part],
        copied: Sequence[int],
        by_lane: Mapping[int, Mapping[int, Tensor]],
        lanes_with_items: Sequence[int],
    ) -> Tensor:
        """Return a row of bytes per worker.

        It has the values of its subtrees, those of its first lane, and whether its lanes differ.
        """
        rank = self._world.rank
        own_lanes = [lane for lane in lanes_with_items if lane in self._assignment.of(rank)]

        def value(lane: int, number: int) -> Tensor:
            # a lane that did not write a buffer left its start value there
            return by_lane[lane].get(number, self._start[number]).reshape(-1)

        def leaf(span: Span) -> list[Tensor] | None:
            if span[1] - span[0] > 1:
                return None
            if span[0] in own_lanes:
                return [self._leaf(part, partial(value, span[0])) for part in parts]
            return [self._nothing(part) for part in parts]

        spans = self._spans
        nodes = [tree_sum(span, leaf, partial(_join, parts)) for span in spans[rank]]
        pieces = [values.view(torch.uint8) for node in nodes for values in node]
        # workers with fewer subtrees send zeros, so that all rows have one length
        missing = max(map(len, spans)) - len(nodes)
        pieces += [torch.zeros_like(piece) for piece in pieces[: len(parts)]] * missing
        flags = []  # uint8 [1] each
        for number in copied:
            first = value(own_lanes[0], number) if own_lanes else self._start[number].reshape(-1)
            first = first.contiguous().view(torch.uint8)
            pieces.append(first)
            if self._homes[number].rule is None:
                others = [value(lane, number).contiguous() for lane in own_lanes[1:]]
                unequal = [(other.view(torch.uint8) != first).any().view(1) for other in others]
                flags.append(torch.cat([first.new_zeros(1), *unequal]).amax(0, keepdim=True))
        row = torch.cat([*pieces, *flags])  # uint8 [nbytes]: values of any dtype in one message
        rows = row.new_empty(self._world.size * len(row))
        self._world.all_gather(rows, row, "averaging buffers")
        return rows.view(self._world.size, -1)  # [workers, nbytes]

    def _leaf(self, part: _Part, value: Callable[[int], Tensor]) -> Tensor:
        """Return what a lane contributes to the buffers of a part, 1-D."""
        return torch.cat(
            [
                value(number).to(part.dtype) - self._start[number].reshape(-1).to(part.dtype)
                if self._homes[number].rule == "sum"
                else value(number).to(part.dtype)
                for number in part.numbers
            ]
        )

    def _nothing(self, part: _Part) -> Tensor:
        """Return what a lane without items contributes: it changes no result."""
        size = sum(self._start[number].numel() for number in part.numbers)
        low: float = -math.inf
        high: float = math.inf
        if part.dtype == torch.int64:
            low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        fill = {torch.add: 0, torch.minimum: high, torch.maximum: low}[part.join]
        return torch.full((size,), fill, dtype=part.dtype, device=self._start[0].device)


def _join(parts: Sequence[_Part], left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    return [part.join(a, b) for part, a, b in zip(parts, left, right, strict=True)]
