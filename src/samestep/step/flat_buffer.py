"""Parameters in flat storage, of which a sharded optimizer updates this worker's slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import is_

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.step.exchange import Exchange
from samestep.step.gradients import SlicedGradient, have_none, row_squares
from samestep.step.guards import Contents, refuse_unless_zero
from samestep.step.layout import ALIGNMENT, Fragment, flattened, view_like
from samestep.step.optimizer_state import copied, is_elementwise, state_of


@dataclass
class Segment:
    """Adjacent fragments, from `start` of a worker's slice, updated as one tensor `parameter`."""

    fragments: list[Fragment]
    parameter: Parameter  # a view of flat storage: 1-D, or a parameter that has one owner
    start: int

    def view_in(self, own_slice: Tensor) -> Tensor:
        """Return this segment's elements of the worker's slice."""
        if self.parameter.ndim == 1:
            return own_slice[self.start : self.start + self.parameter.numel()]
        return view_like(own_slice, self.start, self.parameter)

    def part(self, values: Tensor, fragment: Fragment) -> Tensor:
        """Return a fragment's elements of `values`, which has one per element of the segment."""
        start = fragment.offset - self.start
        flat = values if values.ndim == 1 else flattened(values)
        return flat[start : start + fragment.stop - fragment.start]


class FlatBuffer:
    """Parameters of one dtype in flat storage; the optimizer updates segments of a worker's slice.

    Across "host", they are segments of all slices that the worker holds, of which it saves its own.
    Adjacent fragments share a segment if their sizes are multiples of 64 elements (so that no
    kernel's tail moves), they are in one parameter group, and all or none had a gradient. If each
    parameter has one owner, `is_whole`, each is a segment, with its own shape.
    """

    def __init__(self, exchange: Exchange, contents: Contents) -> None:
        self.exchange, self._contents = exchange, contents
        self.is_whole = exchange.layout.owners is not None
        parameters = exchange.parameters
        # [local_workers, flat_size], in the memory that they share
        self.flats = [flat for (flat,) in exchange.shared_storage(1, parameters[0].dtype)]
        flat = self.flats[exchange.local_rank]
        for parameter, view in zip(parameters, exchange.views(flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view  # the module keeps its Parameter objects
        self.own = exchange.slices(flat, exchange.held)  # 1-D, all held slices
        self.fragments = exchange.layout.fragments(exchange.held.start, len(exchange.held))
        self.segments = [self._segment(group) for group in self._adjacent()]
        self._cleared: set[int] = set()
        self._stand_ins = [
            SlicedGradient.of(parameter, index, self._cleared)
            for index, parameter in enumerate(parameters)
        ]
        self._visible: list[SlicedGradient | None] = [None] * len(parameters)  # in `.grad`
        self._are_visible = False  # any of them
        self.is_in_step = False  # of the optimizer
        # Across "host", sums still arrive from other hosts when backward ends:
        # their segments, with placeholders, of which some were cleared
        self.arriving: list[tuple[Segment, SlicedGradient]] = []
        self._unused: set[int] = set()
        self._arrived: Callable[[], Tensor] | None = None  # waits for all of them
        self._parts: Callable[[], Iterator[Tensor]] | None = None  # of the same, as they arrive

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The complete parameters."""
        return self.exchange.parameters

    def parameter_of(self, fragment: Fragment) -> Tensor:
        """Return the complete parameter of a fragment."""
        return self.exchange.parameters[fragment.index]

    def _segment(self, fragments: list[Fragment]) -> Segment:
        first, last = fragments[0], fragments[-1]
        if self.is_whole:
            values = view_like(self.own, first.offset, self.parameter_of(first))
        else:
            values = self.own[first.offset : last.offset + last.stop - last.start]
        return Segment(fragments, Parameter(values), first.offset)

    def _adjacent(self) -> list[list[Fragment]]:
        """Group the fragments that can share a segment."""
        group_of = {
            id(parameter): number
            for number, group in enumerate(self._contents.updated)  # complete ones until now
            for parameter in group
        }
        numbers = [group_of[id(parameter)] for parameter in self.exchange.parameters]
        # [segments, fragments]
        groups = [self.fragments[:1]] if self.fragments else []
        for left, right in pairwise(self.fragments):
            aligned = (left.stop - left.start) % self.exchange.layout.alignment == 0
            if aligned and not self.is_whole and numbers[left.index] == numbers[right.index]:
                groups[-1].append(right)
            else:
                groups.append([right])
        return groups

    def split(self, key: Callable[[Fragment], object]) -> None:
        """Split segments, and the optimizer's state, between fragments with different keys."""
        self.complete()
        for segment in self.segments:
            groups = [list(group) for _, group in groupby(segment.fragments, key)]
            if len(groups) > 1:
                self._replace(segment, groups)

    def _replace(self, segment: Segment, groups: list[list[Fragment]]) -> None:
        new = [self._segment(fragments) for fragments in groups]
        at = self.segments.index(segment)
        self.segments = [*self.segments[:at], *new, *self.segments[at + 1 :]]
        for parameters, number in self._places_of(segment.parameter):
            parameters[number : number + 1] = [part.parameter for part in new]
        state = self._contents.state.pop(segment.parameter, {})
        gradient = segment.parameter.grad
        for part in new:
            start = part.start - segment.start
            elements = slice(start, start + part.parameter.numel())
            part.parameter.grad = None if gradient is None else gradient[elements]
            if state:
                parts = state_of(elements, state)
                self._contents.state[part.parameter] = {n: copied(v) for n, v in parts.items()}

    def _places_of(self, parameter: Tensor) -> list[tuple[list[Tensor], int]]:
        """Return the lists of the optimizer that have the parameter, and its place in each."""
        return [
            (parameters, number)
            for parameters in self._contents.updated
            for number, candidate in enumerate(parameters)
            if candidate is parameter
        ]

    def complete(self) -> None:
        """Wait for gradients that still arrive.

        Those that user code has cleared meanwhile are not used.
        """
        wait, self._arrived, self._parts = self._arrived, None, None
        if wait is None:
            return
        values = wait()  # 1-D, all held slices
        for number, (segment, placeholder) in enumerate(self.arriving):
            if segment.parameter.grad is placeholder:
                is_unused = number in self._unused
                segment.parameter.grad = None if is_unused else segment.view_in(values)
        self.arriving, self._unused = [], set()

    def _can_update_in_parts(self) -> bool:
        if self.exchange.parts < 2 or self.is_whole:
            return False
        if len(self.segments) != 1 or len(self.arriving) != 1:
            return False  # a part of a sum may end inside any of them
        ((segment, placeholder),) = self.arriving
        if self._unused or self._is_cleared() or segment.parameter.grad is not placeholder:
            return False
        # the first update makes the state, or a value of it that was loaded as None
        state = self._contents.state.get(segment.parameter, {})
        return bool(state) and all(value is not None for value in state.values())

    def update_in_parts(self, update: Callable[[], None]) -> bool:
        """Call `update` for each part of the only segment, as its gradient arrives.

        For each call, the optimizer has a part of the segment in its place, with that part's state.
        Return False, without any call, if that does not do what `drop_cleared` and an update do.
        """
        parts = self._parts
        if parts is None or not self._can_update_in_parts():
            return False
        ((segment, _),) = self.arriving
        parameter, state = segment.parameter, self._contents.state
        ((parameters, number),) = self._places_of(parameter)
        self._arrived, self._parts, parameter.grad = None, None, None
        self.arriving, self._unused = [], set()
        values, start = state[parameter], 0
        for gradient in parts():  # 1-D, adjacent, at multiples of 64 elements
            elements = slice(start, min(start + len(gradient), parameter.numel()))
            start += len(gradient)
            if elements.start >= elements.stop:  # padding
                continue
            part = Parameter(parameter.detach()[elements])
            part.grad = gradient[: len(part)]
            parameters[number] = part
            state[part] = state_of(elements, values)
            try:
                update()
            finally:
                parameters[number], after = parameter, state.pop(part)
            # every part starts from the old "step", so the new one is stored once, at the end
            scalars = {n: value for n, value in after.items() if not is_elementwise(n, value)}
        values.update(scalars)
        return True

    def _is_cleared(self) -> bool:
        """Whether user code has cleared or set the `.grad` of a parameter."""
        gradients = [parameter.grad for parameter in self.exchange.parameters]
        return bool(self._cleared) or not all(map(is_, gradients, self._visible))

    def drop_cleared(self) -> None:
        """Drop the gradients of parameters whose `.grad` user code has cleared.

        Raises `OptimizerError` if it has set one.
        """
        self.complete()
        if not self._is_cleared():
            return
        dropped = set()
        pairs = zip(self.exchange.parameters, self._visible, strict=True)
        for index, (parameter, visible) in enumerate(pairs):
            if parameter.grad is not visible or index in self._cleared:
                if parameter.grad is not self._stand_ins[index]:
                    refuse_unless_zero(parameter.grad)
                parameter.grad = self._visible[index] = None
                dropped.add(index)
        self._cleared.clear()
        # the optimizer skips a parameter without a gradient, but may not skip its neighbors
        self.split(lambda fragment: fragment.index in dropped)
        for segment in self.segments:
            if segment.fragments[0].index in dropped:
                segment.parameter.grad = None

    def stash_gradients(self, *, are_clear: bool = False) -> None:
        """Move unused gradients of an earlier call out of the exchange's memory.

        `are_clear` says that no parameter has `.grad` now.
        """
        self.complete()
        if self._are_visible or self._cleared or not are_clear:
            self.drop_cleared()
        if self._are_visible:
            for parameter in self.exchange.parameters:
                parameter.grad = None
        for segment in self.segments:
            if segment.parameter.grad is not None:
                # `set_gradients` adds the next one to it
                segment.parameter.grad = segment.parameter.grad.clone()

    def set_gradients(
        self,
        own_slice: Callable[[], Tensor],
        present: Sequence[bool] | None = None,
        parts: Callable[[], Iterator[Tensor]] | None = None,
    ) -> None:
        """Add this worker's slice of the gradient to the segments of `present` parameters.

        None stands for all parameters. Sums that still arrive from other hosts come in adjacent
        `parts` of the slice.
        """
        if present is not None:
            is_present = present
            self.split(lambda fragment: is_present[fragment.index])
        segments = [
            segment
            for segment in self.segments
            if present is None or present[segment.fragments[0].index]
        ]
        self._set(segments, own_slice, parts)
        self._are_visible = True
        if present is None:
            self._visible[:] = self._stand_ins
        else:
            pairs = zip(self._stand_ins, self._visible, present, strict=True)
            self._visible = [stand_in if is_new else before for stand_in, before, is_new in pairs]
        self.show()

    def _set(
        self,
        segments: Sequence[Segment],
        own_slice: Callable[[], Tensor],
        parts: Callable[[], Iterator[Tensor]] | None,
    ) -> None:
        """Add gradients to those of `segments`, now or once they have arrived."""
        # the optimizer's step waits for what other hosts send, unless it needs that now
        waits = self.exchange.across == "host" and not self.is_in_step
        if waits and have_none([segment.parameter for segment in self.segments]):
            self._arrived, self._parts = own_slice, parts
            for number, segment in enumerate(segments):
                placeholder = SlicedGradient.of(segment.parameter, number, self._unused)
                segment.parameter.grad = placeholder
                self.arriving.append((segment, placeholder))
            return
        values = own_slice()
        for segment in segments:
            gradient, earlier = segment.view_in(values), segment.parameter.grad
            segment.parameter.grad = gradient if earlier is None else earlier.add_(gradient)

    def show(self) -> None:
        """Let the `.grad` of each parameter stand in for its gradient, if there is one."""
        for parameter, stand_in in zip(self.exchange.parameters, self._visible, strict=True):
            parameter.grad = stand_in

    def gradients_of(self, ids: set[int]) -> list[Tensor]:
        """Return this worker's parts of the gradients of the parameters with these ids, 1-D."""
        return [
            segment.part(segment.parameter.grad, fragment)
            for segment in self.segments
            if segment.parameter.grad is not None
            for fragment in segment.fragments
            if id(self.parameter_of(fragment)) in ids
        ]

    def own_gradients(self) -> dict[int, list[Tensor]]:
        """Return each parameter's gradient by id, as 1-D parts: over all workers, all of it once.

        The list is empty for a worker without any part of it, and for a missing gradient.
        """
        parts_of: dict[int, list[Tensor]] = {
            id(parameter): [] for parameter in self.exchange.parameters
        }
        for segment in self.segments:
            if segment.parameter.grad is not None:
                for part in filter(None, map(self.own_part, segment.fragments)):
                    values = segment.part(segment.parameter.grad, part)
                    parts_of[id(self.parameter_of(part))].append(values)
        return parts_of

    def squares(self) -> dict[int, Tensor]:
        """Return float64 sums of squares of each row of 64 elements, by the parameter's id.

        Collective.
        """
        held, exchange = torch.zeros_like(self.own), self.exchange
        own, world = exchange.own_elements, exchange.world
        for segment in self.segments:
            if segment.parameter.grad is not None:
                segment.view_in(held).copy_(segment.parameter.grad)
        # across "host", this worker also holds the slices of its partners, and counts its own
        squares = row_squares(held[own.start : own.stop])  # float64 [elements / 64]
        most = max(map(exchange.size_of, range(world.size))) // ALIGNMENT
        rows = squares.new_empty(world.size, most)  # by rank
        if padding := most - len(squares):
            squares = torch.nn.functional.pad(squares, (0, padding))
        world.all_gather(rows.view(-1), squares, "adding up the gradient norm")
        flat = exchange.joined(rows, ALIGNMENT)  # float64 [flat_size / 64]
        # without rows of padding: unsharded gradients have none
        starts = (offset // ALIGNMENT for offset in exchange.layout.offsets)
        return {
            id(parameter): flat[start : start - (-parameter.numel() // ALIGNMENT)]
            for parameter, start in zip(self.parameters, starts, strict=False)
        }

    def own_part(self, fragment: Fragment) -> Fragment | None:
        """Return the part of a fragment that this worker saves, None if there is none."""
        own = self.exchange.own_elements  # all that are held, unless it is sharded across "host"
        shift = fragment.start - fragment.offset
        start = max(fragment.start, own.start + shift)
        stop = min(fragment.stop, own.stop + shift)
        return Fragment(fragment.index, start, stop, start - shift) if start < stop else None

    def clear(self) -> None:
        """Clear the used gradients."""
        for segment in self.segments:
            segment.parameter.grad = None
        for parameter in self.exchange.parameters:
            parameter.grad = None
        self._visible, self._are_visible = [None] * len(self._stand_ins), False
