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

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

from samestep.data.search import Reference
from samestep.errors import LossError
from samestep.step.lane_pass import NO_CONTEXT
from samestep.step.reach import Marks, Place, Reach, is_plain, readable
from samestep.torch_internals import without_storage


class LaneState:
    """What lanes may not change: the parameters and tensors that they reach."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._set: dict[Place, Any] = {}  # by a lane, in watched calls
        self._replaced: set[Place] = set()  # by lanes, with other values each time

    @contextmanager
    def lanes(self, step: int, **roots: Any) -> Iterator[None]:
        """Compute this worker's lanes in the block; they reach what `roots` reach.

        Raises `LossError` if one of them changed a parameter, or another tensor in place.
        """
        reach = self._reach
        if reach.begin(step, **roots):
            self._set.clear()
            self._replaced.clear()
        before = reach.marks()
        try:
            yield
        finally:
            reach.end()
        if (changed := reach.changed(before)) is not None:
            raise self._changed(changed, before)
        if reach.is_last_watched:
            self._set.clear()

    def lane(self, lane: int) -> AbstractContextManager[None]:
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
                placeholder = _placeholder(before[place], readable(places[place]), lane)
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
                " teacher, belongs in the body of the loop, after optimizer.step()"
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


class _OfAnotherLane(Tensor):
    """A placeholder for a tensor that an earlier lane left; all operations raise `LossError`."""

    place: str
    lane: int

    @classmethod
    def of(cls, tensor: Tensor, name: str, lane: int) -> _OfAnotherLane:
        """Return a placeholder that says which lane it is hidden from."""
        kind = type(cls.__name__, (cls,), {"place": name, "lane": lane})
        return without_storage(kind, tensor)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> None:
        arguments = [*args, *(kwargs or {}).values()]
        parts = [part for each in arguments for part in (each if type(each) is list else [each])]
        placeholder = next(part for part in parts if isinstance(part, cls))
        raise _was_read(placeholder.place, placeholder.lane)


class FloatOfAnotherLane(float):
    """A placeholder for a float that an earlier lane left; arithmetic raises `LossError`.

    It is a float, so that code in C, such as that of torch, reads its value.
    """

    place: str
    lane: int
    is_hidden: bool

    def __new__(cls, value: float, place: str, lane: int) -> Self:
        self = super().__new__(cls, value)
        self.place, self.lane, self.is_hidden = place, lane, True
        return self

    def __reduce__(self) -> tuple[type[float], tuple[str]]:
        """Be copied and pickled as a plain float, such as in a list of results."""
        return float, (float.__repr__(self),)

    def show(self) -> None:
        """Be a float like any other, because the lane has ended, which may have kept it."""
        self.is_hidden = False


def _refusing(name: str) -> Callable[..., Any]:
    def operation(self: FloatOfAnotherLane, *args: Any) -> Any:
        if self.is_hidden:
            raise _was_read(self.place, self.lane)
        return getattr(float, name)(self, *args)

    return operation


BINARY: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for each in (*BINARY, *(f"r{name}" for name in BINARY), "neg", "abs", "lt", "le", "gt", "ge"):
    setattr(FloatOfAnotherLane, f"__{each}__", _refusing(f"__{each}__"))


def _placeholder(value: Any, name: str, lane: int) -> Any:
    """Return a placeholder for a tensor or float, which says which lane it is hidden from."""
    if isinstance(value, Tensor):
        return _OfAnotherLane.of(value, name, lane)
    return FloatOfAnotherLane(value, name, lane)


def _was_read(place: str, lane: int) -> LossError:
    return LossError(
        f"lane {lane} read {place}, which an earlier lane of this"
        " worker had set, so the result would depend on the number of workers. Start each lane"
        " from a fixed value; a state of a sequence comes with the batch of run.streams, an"
        " average over samples is a buffer with a rule of run.replicate, and a metric is"
        " returned in the dict of the loss function. Or set it in the body of the loop"
    )


def _differ(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return bool(left != right)
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False  # such as a cache that grows
    return not torch.equal(left.detach(), right.detach())
