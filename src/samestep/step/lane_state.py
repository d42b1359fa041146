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

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import Self

from samestep.data.generators import Reference, find_state
from samestep.errors import LossError
from samestep.step.hashing import hashes_of
from samestep.step.lane_pass import NO_CONTEXT
from samestep.torch_internals import versions_of, without_storage

WATCHED_CALLS: Final = 3  # a worker with one lane sets a state, replaces it, and then reads it
BIT_CALLS: Final = 2  # of the first ones, bits are compared in
MOST_GROWTHS: Final = 2  # of a container; one that grows all the time is a list of results
REGISTERED: Final = re.compile(r"\._(?:parameters|buffers)\['([^']*)'\]")
Place = tuple[int, Any]  # the id of a reference's owner, and the key there


class LaneState:
    """What lanes may not change: the parameters and tensors that they reach."""

    def __init__(
        self,
        modules: Sequence[Module],
        check_every: int | None,
        buffers: Callable[[], Mapping[Place, Any]] = dict,
        wait_for_gpu: Callable[[], None] = lambda: None,
    ) -> None:
        """`buffers` returns those of replicated modules, which have rules of their own.

        `wait_for_gpu` notices a hang of earlier collectives, unlike a copy to the host.
        """
        self._modules, self._every = modules, check_every
        self._buffers, self._wait_for_gpu = buffers, wait_for_gpu
        self._calls = 0
        self._watched_until = WATCHED_CALLS  # the last call in which lanes are compared
        self._parameters: dict[int, tuple[Tensor, str]] = {}  # by id, with their names
        self._places: dict[Place, Reference] = {}  # of other tensors
        self._numbers: dict[Place, Reference] = {}  # of floats
        self._containers: list[Any] = []  # which may get state later
        self._lengths: list[int] = []  # of the containers
        self._growths: Counter[int] = Counter()  # of containers, by their id
        self._set: dict[Place, Any] = {}  # by a lane, in watched calls
        self._replaced: set[Place] = set()  # by lanes, with other values each time

    @contextmanager
    def lanes(self, step: int, **roots: Any) -> Iterator[None]:
        """Compute this worker's lanes in the block; they reach what `roots` reach.

        Raises `LossError` if one of them changed a parameter, or another tensor in place.
        """
        self._calls += 1
        is_due = self._is_due(step)
        if self._calls > self._watched_until and (is_due or self._have_grown()):
            self._watched_until = self._calls + WATCHED_CALLS - 1
            for found in (self._places, self._numbers, self._set, self._replaced):
                found.clear()  # such as those of earlier loss functions
        is_watched = self._calls <= self._watched_until
        if is_watched:
            self._search(roots)
        compares_bits = self._calls <= BIT_CALLS or is_due
        if compares_bits:
            self._wait_for_gpu()
        # not what belongs to a graph, such as stored activations, which would stay in memory
        others = [
            (reference, value)
            for reference in self._places.values()
            if _is_plain(value := reference.value()) and value.grad_fn is None
        ]
        tensors = [tensor for tensor, _ in self._parameters.values()]
        tensors += [tensor for _, tensor in others]
        before = _marks(tensors, compares_bits=compares_bits)
        self._roots, self._is_first = roots, True
        try:
            yield
        finally:
            del self._roots
            self._is_first = False  # no search for a lane that is computed again later
        after = _marks(tensors, compares_bits=compares_bits)
        if before != after:
            marks = zip(tensors, zip(*before, strict=True), zip(*after, strict=True), strict=True)
            changed = next(tensor for tensor, old, new in marks if old != new)
            raise self._changed(changed, others)
        if is_watched:
            self._lengths = [*map(len, self._containers)]
            if self._calls == self._watched_until:
                self._set.clear()

    def _is_due(self, step: int) -> bool:
        """Return whether a check is due, or this call's number is a power of two from 8 on."""
        if self._every is not None and step % self._every == 0:
            return True
        return self._calls >= 8 and self._calls.bit_count() == 1

    def _have_grown(self) -> bool:
        """Return whether a container has other entries than after the last search."""
        lengths = [*map(len, self._containers)]
        if lengths == self._lengths:
            return False
        changed = {
            id(container)
            for container, before, now in zip(self._containers, self._lengths, lengths, strict=True)
            if before != now
        }
        self._lengths = lengths
        self._growths.update(changed)
        return any(self._growths[number] <= MOST_GROWTHS for number in changed)

    def lane(self, lane: int) -> AbstractContextManager[None]:
        """Return the context of a lane.

        Raises `LossError` if it reads a tensor that each lane replaces; only in the first calls.
        """
        return self._watched_lane(lane) if self._calls <= self._watched_until else NO_CONTEXT

    @contextmanager
    def _watched_lane(self, lane: int) -> Iterator[None]:
        places = {**self._places, **self._numbers}
        before = {place: reference.value() for place, reference in places.items()}
        with self._hidden(places, before, lane):
            yield
        if self._is_first:  # it may have made places
            self._is_first = False
            self._search(self._roots, in_lane=True)
        for place, reference in chain(self._places.items(), self._numbers.items()):
            value, earlier = reference.value(), before.get(place)
            if value is earlier or not (type(value) is float or _is_plain(value)):
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
                placeholder = _placeholder(before[place], _readable(places[place]), lane)
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

    def _search(self, roots: dict[str, Any], *, in_lane: bool = False) -> None:
        """Find the parameters and tensors that lanes reach, except buffers with rules.

        In a lane, modules may have the parameters of another device, which are copied each step.
        """
        buffers = self._buffers()
        registered = set(map(id, buffers.values()))  # a module may hold one under two names
        found = find_state(**roots, modules=list(self._modules))
        self._containers = found.containers
        self._lengths = [*map(len, found.containers)]
        for reference in found.floats:
            self._numbers[id(reference.owner), reference.key] = reference
        for reference in found.tensors:
            tensor = reference.value()
            if isinstance(tensor, Parameter):
                if in_lane or not _is_plain(tensor):
                    continue
                self._parameters.setdefault(id(tensor), (tensor, _readable(reference)))
            elif (id(reference.owner), reference.key) in buffers or id(tensor) in registered:
                continue
            else:
                self._places[id(reference.owner), reference.key] = reference

    def _changed(self, tensor: Tensor, others: Iterable[tuple[Reference, Any]]) -> LossError:
        if id(tensor) in self._parameters:
            return LossError(
                f"a lane changed the parameter {self._parameters[id(tensor)][1]}, in the loss"
                " function or the model: workers compute different lanes, so its values would"
                " depend on their number. What updates parameters, such as the moving average of a"
                " teacher, belongs in the body of the loop, after optimizer.step()"
            )
        name = next(_readable(reference) for reference, value in others if value is tensor)
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


def _is_plain(value: Any) -> bool:
    """Return whether it is a tensor with a version, an address and bytes."""
    return (
        type(value) in {Tensor, Parameter}
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_nested or value.is_inference() or value.is_conj() or value.is_neg())
    )


def _marks(tensors: Sequence[Tensor], *, compares_bits: bool) -> list[list[int]]:
    """Return what changes if a tensor is changed, [marks, tensors]."""
    marks = [versions_of(tensors), [tensor.data_ptr() for tensor in tensors]]
    return [*marks, hashes_of(tensors)] if compares_bits else marks


def _differ(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return bool(left != right)
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False  # such as a cache that grows
    return not torch.equal(left.detach(), right.detach())


def _readable(reference: Reference) -> str:
    """Return the name of a tensor, for messages."""
    return REGISTERED.sub(r".\1", reference.name)
