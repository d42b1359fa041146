"""The Python values that a loss function and its model reach, and whether they have changed.

A CUDA graph repeats kernels with the arguments of its capture. So a number that Python passed, the
address of a tensor, or an object that decided about a branch must still be the same. The search is
that of `data/generators.py`, and as bounded; the modules of a model are always complete.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from samestep.data.generators import can_seed, find, get_state
from samestep.data.search import (
    KINDS,
    MOST_ENTRIES,
    Reference,
    global_references,
    own_dict,
    walk,
)
from samestep.torch_internals import buffers_in, parameters_in
from samestep.user_code import is_installed

SCALARS: Final = (
    bool, int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype, torch.device,
)  # fmt: skip
CONTAINERS: Final = (list, dict, set, deque)
SMALL_ELEMENTS: Final = 16  # of a tensor or array of the host whose values are compared


class ReachedValues:
    """Attributes, entries, closures and globals that the `roots` reached when this was created."""

    def __init__(self, **roots: Any) -> None:
        self._names: list[str] = []  # of all values, for messages
        # (what returns a tuple of values, the container that it reads)
        self._getters: list[tuple[Callable[[Any], Any], Any]] = []
        self._references: list[Reference] = []
        self._sized: list[Any] = []  # containers, which may grow
        self._sized_names: list[str] = []
        self._owners: dict[int, Any] = {}  # that are read, by id
        self._kinds: set[type] = set()  # classes of the user, whose attributes are read
        for name, root in roots.items():
            for path, module in root.named_modules() if isinstance(root, Module) else ():
                place = f"{name}.{path}" if path else name
                for content in own_dict(module), parameters_in(module), buffers_in(module):
                    self._add(place, content)
        seen: set[tuple[int, Any]] = set()
        for reference, value, held, _ in walk(**roots):
            parts = (part for part, _ in held)
            self._add_object(reference.name, value)
            for part in chain(parts, global_references(reference.name, value)):
                place_key = id(part.owner), part.key if isinstance(part.key, (str, int)) else None
                if id(part.owner) not in self._owners and place_key not in seen:
                    seen.add(place_key)
                    self._references.append(part)
        self._names += [reference.name for reference in self._references]
        self._values: list[Any] = []  # at the last reading
        self._tensors: list[Tensor] = []  # of these
        self._addresses: list[Any] = []
        self._lengths: list[int] = []
        self._read()

    def is_same(self) -> bool:
        """Return whether all values are those of the last reading; otherwise, read them again."""
        before, lengths, addresses = self._values, self._lengths, self._addresses
        values = self._current()
        if (
            all(map(is_, values, before))
            and list(map(len, self._sized)) == lengths
            and list(map(_address, self._tensors)) == addresses
        ):
            return True
        marks = self.marks
        self._read(values)
        return self.marks == marks

    def difference(self, before: Sequence[Any]) -> str | None:
        """Return what differs from earlier `marks` of this object, None if nothing does."""
        names = [*self._names, *self._sized_names]
        for name, former, mark in zip(names, before, self.marks, strict=True):
            if former != mark:
                return _described(name, former, mark)
        return None

    def _read(self, values: list[Any] | None = None) -> None:
        self._values = self._current() if values is None else values
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._addresses = list(map(_address, self._tensors))
        self._lengths = list(map(len, self._sized))
        # what can be compared later, also if the objects are gone
        self.marks = (*map(_mark, self._values), *map(Scalar.of, self._lengths))

    def _current(self) -> list[Any]:
        values: list[Any] = []
        for getter, owner in self._getters:
            try:
                values += getter(owner)
            except (KeyError, IndexError):  # it has fewer entries now, which its length says
                values += [None] * len(getter(_Nothing()))
        values += [reference.value() for reference in self._references]
        return values

    def _add_object(self, name: str, value: Any) -> None:
        if isinstance(value, CONTAINERS):
            self._add(name, value)
        if attributes := own_dict(value):
            self._add(name, attributes, is_own=not is_installed(type(value)))
        for kind in type(value).__mro__:
            if kind not in self._kinds and not is_installed(kind):
                self._kinds.add(kind)
                self._add(kind.__name__, vars(kind))

    def _add(self, name: str, owner: Any, *, is_own: bool = True) -> None:
        """Read the entries of a container; of another package's object, numbers and tensors."""
        if id(owner) in self._owners:
            return
        self._owners[id(owner)] = owner
        keys: list[Any] = []
        if isinstance(owner, (list, deque)):
            keys = list(range(min(len(owner), MOST_ENTRIES)))
        elif isinstance(owner, Mapping):
            keys = list(islice(owner, MOST_ENTRIES))
        if is_own:
            self._sized.append(owner)
            self._sized_names.append(f"the length of {_short(name)}")
        else:  # it may also have caches and counters
            keys = [key for key in keys if _is_public(key, owner[key])]
        if keys:  # the last key twice: of a single one, itemgetter returns no tuple
            self._getters.append((itemgetter(*keys, keys[-1]), owner))
            self._names += [f"{name}.{key}" for key in [*keys, keys[-1]]]


class _Nothing:
    """A container that has None for each key."""

    def __getitem__(self, key: object) -> None:
        return None


def _is_public(key: Any, value: Any) -> bool:
    is_private = isinstance(key, str) and key.startswith("_")
    return isinstance(value, Tensor) or (isinstance(value, SCALARS) and not is_private)


class Scalar(NamedTuple):
    """A number, text or setting, equal only to those of its type with its bits.

    In Python, 1 equals True and 1.0, and 0.0 equals -0.0, for which kernels return other bits.
    """

    kind: type
    value: Any

    @classmethod
    def of(cls, value: Any) -> Scalar:
        """Return the scalar with this value; of a float, it is the text, which has its sign."""
        is_float = isinstance(value, (float, complex, np.inexact))
        return cls(type(value), repr(value) if is_float else value)

    def __repr__(self) -> str:
        is_float = issubclass(self.kind, (float, complex, np.inexact))
        return self.value if is_float else repr(self.value)


def _mark(value: Any) -> Any:
    """Return what is equal for values that do the same in a graph, and keeps no memory."""
    if isinstance(value, Tensor):
        return _address(value)
    if isinstance(value, SCALARS):
        return Scalar.of(value)
    if isinstance(value, np.ndarray) and value.size <= SMALL_ELEMENTS:
        return value.dtype.str, value.shape, value.tobytes()
    if type(value) is tuple and all(isinstance(part, SCALARS) for part in value):
        return tuple(map(Scalar.of, value))
    return id(value)


def _address(tensor: Tensor) -> Any:
    """Return where a tensor is, or the bytes of a small one of the host, and how they are read.

    Kernels get the values of tensors of the host. In Python, 0.0 equals -0.0 and 1.
    """
    if type(tensor) not in {Tensor, Parameter} or tensor.layout != torch.strided:
        return id(tensor), tensor.requires_grad  # it may have no address
    place: int | bytes = tensor.data_ptr()
    if tensor.device.type == "cpu" and tensor.numel() <= SMALL_ELEMENTS:
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        place = values.view(torch.uint8).numpy().tobytes()
    return place, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def _short(name: str) -> str:
    """Return a name as the script has it."""
    return name.rpartition(": ")[2].removeprefix("__main__.")


def _described(name: str, former: Any, mark: Any) -> str:
    short = _short(name)
    if isinstance(former, Scalar) and isinstance(mark, Scalar):
        return f"{short}, from {former!r:.40} to {mark!r:.40}"
    return short


class GeneratorStates:
    """The states of the generators that kernels of a GPU do not draw from as graphs expect.

    These are the host's, and those of GPUs other than torch's own, that the `roots` reach.
    """

    def __init__(self, **roots: Any) -> None:
        self._references = find(**roots)
        self.begin()

    def begin(self) -> None:
        """Note the states, which later draws move."""
        self._before = dict(self._states())

    def moved(self) -> str | None:
        """Return the name of a generator that was drawn from since `begin`, None without one."""
        for name, state in self._states():
            if self._before.get(name) != state:
                return name
        return None

    def _states(self) -> Iterator[tuple[str, Any]]:
        yield "Python's random", random.getstate()
        yield "numpy.random", _plain(np.random.get_state(legacy=False))
        yield "torch's generator of the CPU", _plain(torch.default_generator.get_state())
        for reference in self._references:
            generator = reference.value()
            if isinstance(generator, KINDS) and can_seed(generator):
                yield _short(reference.name), _plain(get_state(generator))


def _plain(state: Any) -> Any:
    """Return the state of a generator as values that can be compared."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: _plain(part) for name, part in state.items()}
    return [_plain(part) for part in state] if isinstance(state, (list, tuple)) else state
