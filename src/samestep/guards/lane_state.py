"""Refusals of state that lanes leave behind: parameters, and tensors that later lanes read.

The lanes of a worker run one after another, and their number depends on the number of workers. So
what a lane reads must not depend on the lanes before it. Buffers have rules (`buffers.py`). Here,
what the loss function and the model reach is searched in the first calls, then at growing
intervals, at every check, and when a container has got entries: tensors that a lane changed in
place are found by their versions and addresses in every call, and by their bits in some calls,
because writes through `.data` change no version. A hidden state is a value that each lane reads and
replaces, or an entry that it adds to a list: a tensor, an array, a number, or an object with some.
A cache is not replaced, and the result of a layer is not read by the next lane. What a lane must
not read is replaced by a placeholder while it runs.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from operator import getitem
from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from samestep.data.search import Reference
from samestep.errors import LossError
from samestep.guards.reach import MOST_PARTS, Marks, Place, Reach, is_leaf, leaves_in, readable
from samestep.step.hidden import ArrayOfAnotherLane, IntOfAnotherLane, placeholder_of, read, show
from samestep.step.lane_pass import NO_CONTEXT, LanePass, StepPlugin
from samestep.torch_internals import reading_arrays

NO_STATE: Final = (int, str, NoneType)  # whose objects may be shared
ENDS: Final = 16  # entries at each end of a sequence, where lanes may add some


class LaneState(StepPlugin):
    """What lanes may not change: the parameters, tensors and values that they reach."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._before: Marks | None = None
        self._set: dict[Place, Any] = {}  # by a lane, in watched calls
        self._replaced: set[Place] = set()  # by lanes, with other values each time
        self._growths: Counter[int] = Counter()  # lanes that changed a sequence, by its id
        self._added: list[Any] = []  # to sequences, by lanes

    def begin(self, lane_pass: LanePass) -> None:
        """Note the state before the lanes of this worker."""
        if self._reach.begins_to_watch:
            self._forget()
            self._replaced.clear()
        self._before = self._reach.marks()

    def report(self) -> None:
        """Raise `LossError` if a lane changed a parameter, or another tensor in place."""
        before, self._before = self._before, None
        if before is not None and (changed := self._reach.changed(before)) is not None:
            raise self._changed(changed, before)
        if self._reach.is_last_watched:
            self._forget()

    def _forget(self) -> None:
        """Hold nothing that lanes have left."""
        self._set.clear()
        self._growths.clear()
        self._added.clear()

    def lane(self, lane_pass: LanePass, lane: int, batch: Any) -> AbstractContextManager[None]:
        """Return the context of a lane.

        Raises `LossError` if it reads a tensor that each lane replaces; only in watched calls.
        """
        return self._watched_lane(lane) if self._reach.is_watched else NO_CONTEXT

    @contextmanager
    def _watched_lane(self, lane: int) -> Iterator[None]:
        reach = self._reach
        places = {**reach.places, **reach.values}
        values = {place: reference.value() for place, reference in places.items()}
        before = {place: id(value) for place, value in values.items()}
        # a leaf that is freed could give its id to another one; other values may have a graph
        alive = [value for value in values.values() if is_leaf(value) or isinstance(value, tuple)]
        del values
        sequences = {id(value): (each, value) for each, value in self._sequences()}
        ends = {number: _ends(value) for number, (_, value) in sequences.items()}
        started = _clocks()
        with self._hidden([*self._replaced_in(places, before), *self._added_to(sequences)], lane):
            yield
        if reach.looks_again:
            reach.look_again()
        for number, (_, value) in sequences.items():
            self._note_growth(number, ends[number], _ends(value))
        times = [*zip(started, _clocks(), strict=True)]
        for place, reference in chain(reach.places.items(), reach.values.items()):
            value = reference.value()
            is_clock = type(value) is float and any(low <= value <= high for low, high in times)
            if id(value) != before.get(place) and not is_clock and _may_be_state(value):
                was_set = self._set.get(place)  # by the lane before
                if before.get(place) == id(was_set) and _differ(value, was_set):
                    self._replaced.add(place)
                self._set[place] = value
        alive.clear()

    def _note_growth(self, number: int, before: Sequence[Any], now: Sequence[Any]) -> None:
        """Note what a lane has added to a sequence; texts and integers are no state."""
        former = [*map(id, before)]
        if [*map(id, now)] != former:
            self._growths[number] += 1
            new = [each for each in now if id(each) not in former]
            self._added += [each for each in new if not isinstance(each, NO_STATE)]

    def _sequences(self) -> list[tuple[Reference, Any]]:
        found = [(each, each.value()) for each in self._reach.sequences]
        return [(each, value) for each, value in found if isinstance(value, (list, deque))]

    def _replaced_in(
        self, places: Mapping[Place, Reference], before: Mapping[Place, int]
    ) -> Iterator[Reference]:
        """Yield the leaves of values that lanes replace; `before` has the ids of those now."""
        for place in self._replaced & self._set.keys() & places.keys():
            if before[place] == id(self._set[place]):
                yield from leaves_in(places[place])

    def _added_to(self, sequences: Mapping[int, tuple[Reference, Any]]) -> Iterator[Reference]:
        """Yield the leaves of entries that lanes have added to sequences, if several lanes do."""
        added = {*map(id, self._added)}
        for number, (reference, sequence) in sequences.items():
            if self._growths[number] > 1:
                for key, entry in enumerate(sequence):
                    if id(entry) in added:
                        part = Reference(f"{reference.name}[{key}]", getitem, sequence, key)
                        yield from leaves_in(part)

    @contextmanager
    def _hidden(self, leaves: Sequence[Reference], lane: int) -> Iterator[None]:
        """In this block, hide leaves that earlier lanes have left."""
        hidden: dict[int, tuple[Any, Any]] = {}  # placeholders and values, by placeholder
        for reference in leaves:
            value = reference.value()
            placeholder = _placeholder(value, readable(reference), lane)
            if placeholder is not value:
                reference.put(placeholder)
                hidden[id(placeholder)] = placeholder, value
        has_arrays = any(type(each) is ArrayOfAnotherLane for each, _ in hidden.values())
        try:
            with reading_arrays(read) if has_arrays else NO_CONTEXT:
                yield
        finally:
            if hidden:
                self._restore(hidden, leaves)

    def _restore(self, hidden: Mapping[int, tuple[Any, Any]], leaves: Sequence[Reference]) -> None:
        """Put hidden values back, also where the lane has copied them to."""
        reach = self._reach
        entries = [
            Reference("", getitem, sequence, key)
            for _, sequence in self._sequences()
            for key in range(len(sequence))
        ]
        for reference in chain(leaves, reach.places.values(), reach.values.values(), entries):
            kept = reference.value()
            if id(kept) in hidden:
                reference.put(hidden[id(kept)][1])
            elif type(kept) is IntOfAnotherLane:  # what a lane has counted on
                reference.put(kept.plain())
        for placeholder, _ in hidden.values():
            show(placeholder)

    def _changed(self, value: Any, marks: Marks) -> LossError:
        if (parameter := self._reach.parameter_name(value)) is not None:
            return LossError(
                f"a lane changed the parameter {parameter}, in the loss"
                " function or the model: workers compute different lanes, so its values would"
                " depend on their number. What updates parameters, such as the moving average of a"
                " teacher, belongs in the body of the loop, after optimizer.step(). What"
                " initializes them from samples, such as ActNorm, belongs before run.replicate. To"
                " compute a loss at other parameters, change them around a loop over lanes of its"
                " own, or pass them to torch.func.functional_call"
            )
        name = next(readable(reference) for reference, each in marks.others if each is value)
        kind = "array" if isinstance(value, np.ndarray) else "tensor"
        return LossError(
            f"a lane changed the {kind} {name} in place, so its value would depend on the number of"
            " workers, each of which computes some lanes. Return scalars in the dict of the loss"
            " function, or pass them to batch.backward, and change it behind the lanes, from their"
            " means; or make it a buffer with a rule of run.replicate. Memory that each lane"
            " overwrites before it reads it is made in the lane (torch.empty_like), or is a buffer:"
            " register_buffer(name, tensor, persistent=False) and run.replicate(model,"
            " buffers={'*name': 'first'})"
        )


def _placeholder(value: Any, name: str, lane: int) -> Any:
    """Return a placeholder for a leaf, or for a tuple with some; other values themselves."""
    if isinstance(value, tuple):
        parts = [_placeholder(part, f"{name}[{n}]", lane) for n, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return placeholder_of(value, name, lane) if is_leaf(value) else value


def _clocks() -> list[float]:
    return [time.time(), time.perf_counter(), time.monotonic()]


def _ends(sequence: Any) -> list[Any]:
    """Return the first and the last entries of a list or deque."""
    return [*islice(sequence, ENDS), *islice(reversed(sequence), ENDS)]


def _may_be_state(value: Any) -> bool:
    """Return whether a value has leaves, but does not keep a graph in memory, unless it is one."""
    if is_leaf(value) or isinstance(value, tuple):
        return True
    leaves = _leaves_of(value)
    return bool(leaves) and not any(isinstance(each, Tensor) and each.grad_fn for each in leaves)


def _differ(left: Any, right: Any) -> bool:
    """Return whether leaves of two values differ, which have the same form."""
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple):
        return len(left) == len(right) and any(map(_differ, left, right))
    if isinstance(left, Tensor):
        return _kind(left) == _kind(right) and not torch.equal(left.detach(), right.detach())
    if isinstance(left, np.ndarray):
        return _kind(left) == _kind(right) and left.tobytes() != right.tobytes()
    if is_leaf(left):
        return bool(left != right)
    own, others = map(_leaves_of, (left, right))
    return len(own) == len(others) and any(map(_differ, own, others))


def _kind(value: Any) -> tuple[Any, ...]:
    """Return the form of a tensor or array; that of a cache changes when it grows."""
    return value.shape, value.dtype, getattr(value, "device", None)


def _leaves_of(value: Any) -> list[Any]:
    parts = leaves_in(Reference("", getitem, [value], 0))
    return [part.value() for part in islice(parts, MOST_PARTS)]
