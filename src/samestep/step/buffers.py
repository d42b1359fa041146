"""Module buffers: every lane starts a step from the same values, and all workers agree after it.

A floating-point buffer (BatchNorm's running statistics) becomes the tree mean of the values of the
lanes that had samples. Any other buffer takes the value of the first such lane. A buffer that no
lane wrote stays unchanged.

The host must know which buffers were written, but should not wait until a GPU has completed the
backward pass. So a GPU reports what forward wrote. What only backward writes is read with the first
step; a later step must not write other buffers in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from samestep.comm.base import World
from samestep.errors import ModelError
from samestep.step.gradients import Parameters
from samestep.step.layout import Span, lanes_of, subtrees, tree_sum
from samestep.step.replicas import Replicas
from samestep.torch_internals import buffers_in, foreach_copy_

Copy = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # begins to copy from GPUs to the host
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Buffers:
    """The buffers of all replicated modules, saved and restored around each lane."""

    def __init__(self, world: World, lanes: int, replicas: Replicas) -> None:
        self._world, self._lanes, self._replicas = world, lanes, replicas
        self._lanes_by_rank = [lanes_of(rank, world.size, lanes) for rank in range(world.size)]
        self._spans = [subtrees(own_lanes, lanes) for own_lanes in self._lanes_by_rank]
        self._max_spans = max(map(len, self._spans))
        # where each buffer is registered: its module's dict, and its name
        self._homes: list[tuple[dict[str, Any], str]] = []
        self._starts: list[tuple[torch.device, list[Tensor]]] = [
            (replica.device, []) for replica in replicas.all
        ]  # copies of the values at the start of a step, [devices, buffers]
        self._start = self._starts[0][1]  # on the first device
        self._written: dict[int, dict[int, Tensor]] = {}  # values by lane and number of the buffer
        self._groups: dict[tuple[int, torch.device], list[_Group]] = {}
        # what forward of each lane wrote on a GPU: some buffers, and 0 for those not written
        self._flags: list[tuple[int, list[int], Tensor]] = []  # on the host
        self._by_forward: list[Tensor] = []  # of the current lane, by group
        self._by_backward: set[int] = set()  # what only backward writes
        self._first: list[tuple[list[int], Tensor]] = []  # the same, not yet read
        self._learned: set[tuple[int, ...]] = set()  # keys of parameters for which it is known
        self._parameters: Parameters = []  # of the current step
        self._is_in_step = False

    def add(self, module: Module) -> None:
        """Manage the buffers of a module; shared ones are added once."""
        self._learned.clear()  # the new module may write others
        ids = {id(buffer) for buffer in self._current()}
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if id(buffer) not in ids:
                    ids.add(id(buffer))
                    self._homes.append((buffers_in(owner), name))
                    for device, start in self._starts:
                        start.append(buffer.detach().to(device, copy=True))

    def begin_step(self, parameters: Parameters) -> None:
        """Save each device's current values, from which all of its lanes start.

        The step computes gradients of `parameters`.
        """
        self._written, self._flags, self._by_forward, self._first = {}, [], [], []
        self._parameters, self._is_in_step = parameters, True
        groups = self._all_groups()
        if groups and self._key() not in self._learned:
            self.check()  # before what is lost could be mistaken for this step's
            for group in groups:
                group.late.zero_()
        for replica, (_, starts) in zip(self._replicas.all, self._starts, strict=True):
            if starts:
                with self._replicas.on(replica):
                    foreach_copy_(starts, self._detached())

    def restore(self) -> None:
        """Return to the values at the start of a step that failed."""
        if self._is_in_step:
            self._is_in_step = False
            for replica, (_, starts) in zip(self._replicas.all, self._starts, strict=True):
                if starts:
                    with self._replicas.on(replica):
                        foreach_copy_(self._detached(), starts)

    def end_forward(self, lane: int, device: int, copy: Copy) -> None:
        """Note what a lane's forward pass wrote on a GPU; `copy` begins to copy to the host."""
        starts, groups = self._starts[device][1], self._groups_on(device)
        current = self._detached() if groups else []
        self._by_forward = [
            group.changed(group.joined(starts), group.joined(current)) for group in groups
        ]
        for group, flags in zip(groups, copy(self._by_forward), strict=True):
            self._flags.append((lane, group.numbers, flags))

    def end_lane(self, lane: int, device: int = 0) -> None:
        """Save the values that a lane wrote on device number `device`; restore the start values.

        Bits are compared, because BatchNorm's kernels do not increase the tensor's version.
        A GPU compares by itself.
        """
        written = self._written[lane] = {}
        where, starts = self._starts[device]
        current = self._detached()
        if where.type == "cpu":  # the host compares now, and copies only what differs
            for number, (start, buffer) in enumerate(zip(starts, current, strict=True)):
                if not _same_bits(start, buffer):
                    written[number] = buffer.clone()
                    buffer.data.copy_(start)
        elif current:  # keeps all, because the host does not know yet; `written` drops the others
            for n, group in enumerate(self._groups_on(device)):
                after = group.joined(current)  # 1-D, a copy of all buffers of one dtype
                if self._by_forward:
                    changed = group.changed(group.joined(starts), after)
                    # int64 [buffers]; what forward wrote as well is not late
                    group.late.add_(changed * (self._by_forward[n] == 0))
                parts = after.split(group.sizes)
                for number, part in zip(group.numbers, parts, strict=True):
                    written[number] = part.view(starts[number].shape)
            foreach_copy_(current, starts)
            self._by_forward = []

    def end_lanes(self, copy: Copy) -> None:
        """End the lanes of a step; in the first one, `copy` copies what backward alone wrote."""
        groups = self._all_groups()
        if groups and self._key() not in self._learned:
            self._learned.add(self._key())
            copies = copy([group.late for group in groups])
            self._first = [
                (group.numbers, late) for group, late in zip(groups, copies, strict=True)
            ]

    def late(self) -> list[int]:
        """Return what only backward of this worker wrote, if this is the first step with lanes.

        The copies that `copy` of `end_forward` and `end_lanes` began must be complete.
        """
        return _nonzero(self._first)

    def learn(self, late: Iterable[int]) -> None:
        """Remember what only backward writes on any worker."""
        new = set(late) - self._by_backward
        if new and not self._first:
            self.check()  # whether this worker has lost them in this step
        self._by_backward |= new

    def written(self) -> list[int]:
        """Return the numbers of the buffers that a lane of this worker wrote, as for `late`."""
        self.learn(self.late())
        for lane, numbers, flags in self._flags:
            for number, value in zip(numbers, flags.tolist(), strict=True):
                if not value and number not in self._by_backward:
                    del self._written[lane][number]
        device = self._starts[0][0]
        for written in self._written.values():
            written.update(_fetched(written, device))
        return sorted({number for values in self._written.values() for number in values})

    def check(self) -> None:
        """Raise `ModelError` if backward wrote buffers that it did not write in the first step."""
        for number in _nonzero([(group.numbers, group.late) for group in self._all_groups()]):
            if number not in self._by_backward:
                raise ModelError(
                    f"the buffer {self._homes[number][1]!r} was written during backward, but not"
                    " during forward, and not in the first step; its new values are lost, because"
                    " workers agree on buffers before a GPU has completed backward. Change it in"
                    " forward, or in the first step as well"
                )

    def end_step(self, written: Sequence[int], lanes_with_items: Sequence[int]) -> None:
        """Agree on the buffers that any lane wrote; collective if there are any."""
        self._is_in_step = False
        if not written or not lanes_with_items:  # the same on all workers
            return
        averaged = [number for number in written if self._start[number].is_floating_point()]
        copied = [number for number in written if not self._start[number].is_floating_point()]
        sizes = [self._start[number].numel() for number in averaged]
        rows = self._gather(averaged, copied, lanes_with_items)
        size = 8 * sum(sizes)  # bytes of a sum, in float64
        nodes: dict[Span, Tensor] = {}
        for spans, row in zip(self._spans, rows, strict=True):
            # float64 [spans, elements]; cloned, because a view as float64 needs aligned memory
            sums = row[: size * len(spans)].clone().view(torch.float64).view(len(spans), -1)
            nodes.update(zip(spans, sums, strict=True))
        mean = tree_sum((0, self._lanes), nodes.get, torch.add) / len(lanes_with_items)
        current = self._current()
        for number, values in zip(averaged, mean.split(sizes), strict=True):
            current[number].data.copy_(values.view(self._start[number].shape))
        owns_first = [lanes_with_items[0] in rank_lanes for rank_lanes in self._lanes_by_rank]
        first = rows[owns_first.index(True)]
        offset = self._max_spans * size  # after the sums
        for number in copied:
            start = self._start[number]
            values = first[offset : offset + start.numel() * start.element_size()].clone()
            current[number].data.copy_(values.view(start.dtype).view(start.shape))
            offset += len(values)

    def _gather(
        self, averaged: Sequence[int], copied: Sequence[int], lanes_with_items: Sequence[int]
    ) -> Tensor:
        """Return a row of bytes per worker: sums of its subtrees, values of its first lane."""
        rank = self._world.rank
        own_lanes = [lane for lane in lanes_with_items if lane in self._lanes_by_rank[rank]]

        def value(lane: int, number: int) -> Tensor:
            # a lane that did not write a buffer left its start value there
            return self._written[lane].get(number, self._start[number]).reshape(-1)

        def leaf(span: Span) -> Tensor | None:
            if span[1] - span[0] > 1:
                return None
            if span[0] not in own_lanes or not averaged:  # a lane without items adds zeros
                size = sum(self._start[number].numel() for number in averaged)
                return torch.zeros(size, dtype=torch.float64, device=self._start[0].device)
            return torch.cat([value(span[0], number).double() for number in averaged])

        parts = [tree_sum(span, leaf, torch.add).view(torch.uint8) for span in self._spans[rank]]
        # workers with fewer subtrees send zeros, so that all rows have one length
        parts += [parts[0].new_zeros(len(parts[0]))] * (self._max_spans - len(parts))
        for number in copied:
            first = value(own_lanes[0], number) if own_lanes else self._start[number].reshape(-1)
            parts.append(first.contiguous().view(torch.uint8))
        row = torch.cat(parts)  # uint8 [nbytes]: sums and values of any dtype in one message
        rows = row.new_empty(self._world.size * len(row))
        self._world.all_gather(rows, row, "averaging buffers")
        return rows.view(self._world.size, -1)  # [workers, nbytes]

    def _current(self) -> list[Tensor]:
        return [registry[name] for registry, name in self._homes]

    def _detached(self) -> list[Tensor]:
        return [buffer.detach() for buffer in self._current()]

    def _groups_on(self, device: int) -> list[_Group]:
        """Return the groups of all buffers on a device, none on a CPU."""
        where, starts = self._starts[device]
        if where.type == "cpu" or not starts:
            return []
        key = len(starts), where
        if key not in self._groups:
            self._groups[key] = _groups_of(starts)
        return self._groups[key]

    def _key(self) -> tuple[int, ...]:
        """Return the ids of the step's parameters; only needed for GPUs."""
        return tuple(map(id, self._parameters))

    def _all_groups(self) -> list[_Group]:
        return [group for groups in self._groups.values() for group in groups]


@dataclass(frozen=True)
class _Group:
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


def _groups_of(buffers: Sequence[Tensor]) -> list[_Group]:
    groups = []
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        numbers = [number for number, buffer in enumerate(buffers) if buffer.dtype == dtype]
        sizes = [buffers[number].numel() for number in numbers]
        words = INTEGERS[min(dtype.itemsize, 8)]
        per_element = dtype.itemsize // words.itemsize
        bounds = list(accumulate((size * per_element for size in sizes), initial=0))
        ends = torch.tensor(bounds, device=buffers[0].device)
        groups.append(_Group(numbers, sizes, words, ends, torch.zeros_like(ends[1:])))
    return groups


def _fetched(values: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    """Return tensors of another device, by number, on `device`; each dtype takes one copy."""
    fetched: dict[int, Tensor] = {}
    others = {number: value for number, value in values.items() if value.device != device}
    for dtype in {value.dtype for value in others.values()}:
        same_dtype = {number: value for number, value in others.items() if value.dtype == dtype}
        joined = torch.cat([value.reshape(-1) for value in same_dtype.values()]).to(device)  # 1-D
        parts = joined.split([value.numel() for value in same_dtype.values()])
        shaped = (
            part.view(value.shape) for part, value in zip(parts, same_dtype.values(), strict=True)
        )
        fetched.update(zip(same_dtype, shaped, strict=True))
    return fetched


def _nonzero(flags: Sequence[tuple[list[int], Tensor]]) -> list[int]:
    """Return the numbers of buffers whose flag is not 0."""
    return [
        number
        for numbers, values in flags
        for number, value in zip(numbers, values.tolist(), strict=True)
        if value
    ]


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Compare as integers: a NaN equals itself, and 0.0 differs from -0.0."""
    words = INTEGERS[min(left.element_size(), 8)]
    return torch.equal(left.reshape(-1).view(words), right.reshape(-1).view(words))
