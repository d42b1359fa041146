"""Refusals of state that lanes leave behind: parameters, and tensors that later lanes read.

The lanes of a worker run one after another, and their number depends on the number of workers. So
what a lane reads must not depend on the lanes before it. Buffers have rules (`buffers.py`). Here,
what the loss function and the model reach is searched in the first calls, then at growing
intervals, at every check, and when a container has got entries: tensors that a lane changed in
place are found by their versions and addresses in every call, and by their bits in some calls,
because writes through `.data` change no version. A hidden state is a tensor or float that each lane
reads and replaces; a cache is not replaced, and the result of a layer is not read by the next lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from samestep.data.search import Reference
from samestep.errors import LossError
from samestep.guards.reach import Marks, Place, Reach, is_plain, readable
from samestep.step.hidden import FloatOfAnotherLane, placeholder_of
from samestep.step.lane_pass import NO_CONTEXT, LanePass, StepPlugin


class LaneState(StepPlugin):
    """What lanes may not change: the parameters and tensors that they reach."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._before: Marks | None = None
        self._set: dict[Place, Any] = {}  # by a lane, in watched calls
        self._replaced: set[Place] = set()  # by lanes, with other values each time

    def begin(self, lane_pass: LanePass) -> None:
        """Note the state before the lanes of this worker."""
        if self._reach.begins_to_watch:
            self._set.clear()
            self._replaced.clear()
        self._before = self._reach.marks()

    def report(self) -> None:
        """Raise `LossError` if a lane changed a parameter, or another tensor in place."""
        before, self._before = self._before, None
        if before is not None and (changed := self._reach.changed(before)) is not None:
            raise self._changed(changed, before)
        if self._reach.is_last_watched:
            self._set.clear()

    def lane(self, lane_pass: LanePass, lane: int, batch: Any) -> AbstractContextManager[None]:
        """Return the context of a lane.

        Raises `LossError` if it reads a tensor that each lane replaces; only in watched calls.
        """
        return self._watched_lane(lane) if self._reach.is_watched else NO_CONTEXT

    @contextmanager
    def _watched_lane(self, lane: int) -> Iterator[None]:
        reach = self._reach
        places = {**reach.places, **reach.numbers}
        before = {place: reference.value() for place, reference in places.items()}
        with self._hidden(places, before, lane):
            yield
        if reach.looks_again:
            reach.look_again()
        for place, reference in chain(reach.places.items(), reach.numbers.items()):
            value, earlier = reference.value(), before.get(place)
            if value is earlier or not (type(value) is float or is_plain(value)):
                continue
            was_set = self._set.get(place)  # by the lane before
            if earlier is was_set and was_set is not None and _differ(value, was_set):
                self._replaced.add(place)
            self._set[place] = value

    @contextmanager
    def _hidden(
        self, places: Mapping[Place, Reference], before: Mapping[Place, Any], lane: int
    ) -> Iterator[None]:
        """In this block, hide values that lanes replace; `before` has the values of `places`."""
        hidden = []
        for place in self._replaced & self._set.keys() & places.keys():
            if before[place] is self._set[place]:
                placeholder = placeholder_of(before[place], readable(places[place]), lane)
                places[place].put(placeholder)
                hidden.append((places[place], placeholder, before[place]))
        try:
            yield
        finally:
            values = {id(placeholder): value for _, placeholder, value in hidden}
            for reference in places.values() if hidden else ():
                if id(kept := reference.value()) in values:  # also where the lane copied it to
                    reference.put(values[id(kept)])
            for _, placeholder, _ in hidden:
                if isinstance(placeholder, FloatOfAnotherLane):
                    placeholder.show()

    def _changed(self, tensor: Tensor, marks: Marks) -> LossError:
        if (parameter := self._reach.parameter_name(tensor)) is not None:
            return LossError(
                f"a lane changed the parameter {parameter}, in the loss"
                " function or the model: workers compute different lanes, so its values would"
                " depend on their number. What updates parameters, such as the moving average of a"
                " teacher, belongs in the body of the loop, after optimizer.step(). To compute a"
                " loss at other parameters, change them around a loop over lanes of its own, or"
                " pass them to torch.func.functional_call"
            )
        name = next(readable(reference) for reference, value in marks.others if value is tensor)
        return LossError(
            f"a lane changed the tensor {name} in place, so its value would depend on the number of"
            " workers, each of which computes some lanes. Return scalars in the dict of the loss"
            " function, make it a buffer with a rule of run.replicate, or change it in the body of"
            " the loop, after run.backward. Memory that each lane overwrites before it reads it is"
            " made in the lane (torch.empty_like), or is a buffer: register_buffer(name, tensor,"
            " persistent=False) and run.replicate(model, buffers={'*name': 'first'})"
        )


def _differ(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return bool(left != right)
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False  # such as a cache that grows
    return not torch.equal(left.detach(), right.detach())
