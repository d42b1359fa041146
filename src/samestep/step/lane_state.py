"""Refusals of state that lanes leave behind: parameters, and tensors that later lanes read.

The lanes of a worker run one after another, and their number depends on the number of workers. So
what a lane reads must not depend on the lanes before it. Buffers have rules (`buffers.py`). Here,
what the loss function and the model reach is searched in the first calls: tensors that a lane
changed in place are found by their versions and addresses in every call, and by their bits in some
calls, because writes through `.data` change no version. A hidden state is a tensor that each lane
reads and replaces; a cache is not replaced, and the result of a layer is not read by the next lane.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from xxhash import xxh3_64

from samestep.data.generators import Reference, find_tensors
from samestep.errors import LossError
from samestep.torch_internals import versions_of, without_storage

FIRST_CALLS: Final = 3  # a worker with one lane sets a state, replaces it, and then reads it
BIT_CALLS: Final = 2  # of these, bits are compared in
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
        self._parameters: dict[int, tuple[Tensor, str]] = {}  # by id, with their names
        self._places: dict[Place, Reference] = {}  # of other tensors
        self._set: dict[Place, Tensor] = {}  # by a lane, in the first calls
        self._replaced: set[Place] = set()  # by lanes, with other values each time

    @contextmanager
    def lanes(self, step: int, **roots: Any) -> Iterator[None]:
        """Compute this worker's lanes in the block; they reach what `roots` reach.

        Raises `LossError` if one of them changed a parameter, or another tensor in place.
        """
        self._calls += 1
        is_due = self._every is not None and step % self._every == 0
        if self._calls <= FIRST_CALLS or is_due:
            if self._calls > FIRST_CALLS:
                self._places.clear()  # such as those of earlier loss functions
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
        if self._calls >= FIRST_CALLS:
            self._set.clear()

    def lane(self, lane: int) -> AbstractContextManager[None]:
        """Return the context of a lane.

        Raises `LossError` if it reads a tensor that each lane replaces; only in the first calls.
        """
        return self._first_lane(lane) if self._calls <= FIRST_CALLS else nullcontext()

    @contextmanager
    def _first_lane(self, lane: int) -> Iterator[None]:
        before: dict[Place, Any] = {
            place: reference.value() for place, reference in self._places.items()
        }
        hidden = []
        for place in self._replaced & self._set.keys():
            if before[place] is self._set[place]:
                placeholder = _OfAnotherLane.of(before[place], _readable(self._places[place]), lane)
                self._places[place].put(placeholder)
                hidden.append((self._places[place], placeholder, before[place]))
        try:
            yield
        finally:
            for reference, placeholder, value in hidden:
                if reference.value() is placeholder:
                    reference.put(value)
        if self._is_first:  # it may have made places
            self._is_first = False
            self._search(self._roots, in_lane=True)
        for place, reference in self._places.items():
            value, earlier = reference.value(), before.get(place)
            if not _is_plain(value) or value is earlier:
                continue
            was_set = self._set.get(place)  # by the lane before
            if earlier is was_set and was_set is not None and _differ(value, was_set):
                self._replaced.add(place)
            self._set[place] = value

    def _search(self, roots: dict[str, Any], *, in_lane: bool = False) -> None:
        """Find the parameters and tensors that lanes reach, except buffers with rules.

        In a lane, modules may have the parameters of another device, which are copied each step.
        """
        buffers = self._buffers()
        registered = set(map(id, buffers.values()))  # a module may hold one under two names
        for reference in find_tensors(**roots, modules=list(self._modules)):
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
            " the loop, after run.backward"
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
        raise LossError(
            f"lane {placeholder.lane} read {placeholder.place}, which an earlier lane of this"
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
    return [*marks, _hashes(tensors)] if compares_bits else marks


def _hashes(tensors: Sequence[Tensor]) -> list[int]:
    """Return a hash of the bytes of each tensor; GPUs add them up, with one copy per device."""
    hashes = [0] * len(tensors)
    on_gpus: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.device.type == "cpu":
            hashes[number] = xxh3_64(data.numpy().data).intdigest()
        else:
            on_gpus.setdefault(data.device, []).append(number)
    for numbers in on_gpus.values():
        sums = [tensors[n].detach().reshape(-1).view(torch.uint8).sum() for n in numbers]
        for number, value in zip(numbers, torch.stack(sums).tolist(), strict=True):
            hashes[number] = value
    return hashes


def _differ(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False  # such as a cache that grows
    return not torch.equal(left.detach(), right.detach())


def _readable(reference: Reference) -> str:
    """Return the name of a tensor, for messages."""
    return REGISTERED.sub(r".\1", reference.name)
