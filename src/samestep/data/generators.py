"""Random generators of other code, found in data sets and transforms, and seeded by samestep.

The search follows attributes, lists, tuples, dicts, iterators, and the closures and globals of the
user's functions. It is bounded: a data set of many objects is not searched to the end.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import getitem
from pathlib import Path
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.random import mtrand

from samestep.data.random_state import key, keyed, set_generators
from samestep.torch_internals import MODULE_ATTRIBUTES, submodules_in
from samestep.user_code import is_installed, is_users

T = TypeVar("T")

MOST_OBJECTS: Final = 20_000  # examined in one search
MOST_ENTRIES: Final = 256  # of one list or dict
OBSERVED: Final = "SAMESTEP_INTERNAL_OBSERVED"  # folder for observations; set by samestep verify
KINDS: Final = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
)
_PLAIN: Final = (
    str, bytes, int, float, complex, type(None), type, ModuleType, np.ndarray, np.generic,
    torch.Tensor, torch.dtype, torch.device,
)  # fmt: skip
_METHODS: Final = ("set_random_seed", "set_random_state")  # of albumentations, MONAI
_OPAQUE: Final = {*sys.stdlib_module_names, "samestep"}  # modules of objects with own attributes


class Reference(NamedTuple):
    """A reference to an object: `get(owner, key)` returns the one that its owner holds now."""

    name: str
    get: Callable[[Any, Any], Any]
    owner: Any
    key: Any

    def value(self) -> Any:
        """Return the object that is referenced now, None if there is none."""
        try:
            return self.get(self.owner, self.key)
        except (AttributeError, LookupError, TypeError, ValueError):
            return None

    def put(self, value: Any) -> None:
        """Let the owner hold another object, if it can."""
        if self.get is getattr:
            setattr(self.owner, self.key, value)
        else:
            self.owner[self.key] = value


class ForeignGenerators:
    """The generators that the `roots` reach: found at the first draw, and seeded for each draw.

    Each gets a separate seed, made from the draw's key and the generator's name.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self._references: list[Reference] | None = None

    def draw(self, value: int, fn: Callable[[], T], *, repeatable: bool = True) -> T:
        """Return `fn()` with all generators seeded by `value`, then restore their states.

        If the first call creates generators, it is repeated with these seeded.
        """
        with keyed(value):
            is_first = self._references is None
            if is_first:
                self._references = find(**self._roots)
            with self._seeded(value):
                result = fn()
            created = self._search_again() if is_first else []
            if created and repeatable:
                set_generators(value)
                with self._seeded(value):
                    return fn()
            for name in created:
                observe(kind="unseeded", name=name)
            return result

    def _search_again(self) -> list[str]:
        """Return the names of the generators that the first draw created."""
        before = {reference.name for reference in self._references or ()}
        self._references = find(**self._roots)
        return [reference.name for reference in self._references if reference.name not in before]

    @contextmanager
    def _seeded(self, value: int) -> Iterator[None]:
        if not self._references:
            yield
            return
        states: dict[int, tuple[Any, Any]] = {}
        try:
            for reference in self._references:
                generator = reference.value()
                if generator is None or id(generator) in states:
                    continue
                if not isinstance(generator, KINDS):
                    states[id(generator)] = generator, None
                    method = seed_method(generator)
                    if method is not None:
                        method(key(value, reference.name) % 2**32)
                elif can_seed(generator):
                    states[id(generator)] = generator, get_state(generator)
                    seed(generator, key(value, reference.name))
                else:
                    observe(kind="unseeded", name=reference.name)
            yield
        finally:
            for generator, state in states.values():
                if state is not None:
                    set_state(generator, state)


def find(**roots: Any) -> list[Reference]:
    """Return references to all generators, and to objects with a method that seeds them.

    The global generators of Python, NumPy and torch are left out. A generator may have several
    references, because any of them may get another generator later.
    """
    return [
        reference
        for reference, value, parts in walk(**roots)
        if isinstance(value, KINDS)
        or (seed_method(value) and not any(isinstance(part.value(), KINDS) for part in parts))
    ]


def walk(**roots: Any) -> Iterator[tuple[Reference, Any, list[Reference]]]:
    """Yield (reference, object, references to its parts) of what the roots reach, breadth first.

    Generators may come more than once, and have no parts; the global ones are left out.
    """
    shared = _global_generators()
    seen = {}  # holds objects, because the id of a freed one may be used again
    queue = deque(Reference(name, getitem, roots, name) for name in roots)
    for _ in range(MOST_OBJECTS):
        if not queue:
            break
        reference = queue.popleft()
        value = reference.value()
        if isinstance(value, _PLAIN) or id(value) in shared:
            continue
        if isinstance(value, KINDS):
            yield reference, value, []
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        parts = list(_parts(reference.name, value)) if len(queue) < MOST_OBJECTS else []
        queue += parts
        yield reference, value, parts


class Found(NamedTuple):
    """What `find_state` found: references to tensors and floats, and what may get more of them."""

    tensors: list[Reference]
    floats: list[Reference]
    containers: list[Any]  # lists, dicts, and the attributes of objects


def find_state(**roots: Any) -> Found:
    """Return references to the tensors and floats that the roots reach, where others can be put.

    Floats of classes of installed packages are left out: they are settings, and times of progress
    bars. Of modules, the containers are their attributes and buffers.
    """
    found, seen = Found([], [], []), {}
    # with whether user code made the object that holds it
    queue = deque((Reference(name, getitem, roots, name), True) for name in roots)
    for _ in range(MOST_OBJECTS):
        if not queue:
            break
        reference, is_of_user = queue.popleft()
        value = reference.value()
        if isinstance(value, torch.Tensor) or (type(value) is float and is_of_user):
            if not isinstance(reference.owner, (tuple, GeneratorType)):
                (found.tensors if isinstance(value, torch.Tensor) else found.floats).append(
                    reference
                )
        elif not isinstance(value, (*_PLAIN, *KINDS)) and id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, (list, dict, deque)):
                if reference.key not in MODULE_ATTRIBUTES:
                    found.containers.append(value)
            elif type(value).__module__ != "builtins":  # not functions and methods
                is_of_user = not is_installed(type(value))
                found.containers.append(own_dict(value))
            if len(queue) < MOST_OBJECTS:
                queue += ((part, is_of_user) for part in _parts(reference.name, value))
    return found


def seed(generator: Any, value: int) -> None:
    """Seed a generator with 63 bits."""
    if isinstance(generator, random.Random):
        generator.seed(value)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif not isinstance(generator, np.random.RandomState):
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(value).state
    else:
        generator.seed(value % 2**32)


def get_state(generator: Any) -> Any:
    """Return the state of a generator, for `set_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def set_state(generator: Any, state: Any) -> None:
    """Restore a state that `get_state` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def can_seed(generator: Any) -> bool:
    """Return whether `seed` supports a generator: not the system's, nor one of another library."""
    if isinstance(generator, random.Random):
        return not isinstance(generator, random.SystemRandom)
    if isinstance(generator, torch.Generator):
        return True
    if isinstance(generator, np.random.RandomState):
        return bool(generator.get_state(legacy=False)["bit_generator"] == "MT19937")
    bits = getattr(generator, "bit_generator", generator)
    return type(bits).__module__.startswith("numpy.")


def seed_method(value: Any) -> Callable[[int], Any] | None:
    """Return the method of an object that seeds its generators, None if it has none."""
    for name in _METHODS:
        if callable(getattr(type(value), name, None)):
            method: Callable[[int], Any] = getattr(value, name)
            try:
                first = next(iter(inspect.signature(method).parameters), None)
            except (TypeError, ValueError):
                continue
            if first == "seed":
                return method
    return None


def is_observed() -> bool:
    """Return whether `samestep verify` runs the script."""
    return OBSERVED in os.environ


def observe(**observation: Any) -> None:
    """Record what may explain a difference, if `samestep verify` runs the script."""
    if folder := os.environ.get(OBSERVED):
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(observation) + "\n")


def _global_generators() -> set[int]:
    return {
        id(random.random.__self__),  # type: ignore[attr-defined]
        id(mtrand._rand),  # noqa: SLF001  no public name
        id(mtrand.get_bit_generator()),
        id(torch.default_generator),
        *map(id, torch.cuda.default_generators if torch.cuda.is_initialized() else ()),
    }


def _parts(name: str, value: Any) -> Iterator[Reference]:
    """Yield references to the objects that an object holds."""
    if isinstance(value, (dict, list, tuple, deque)):
        yield from _entries(name, value)
    elif isinstance(value, FunctionType):
        yield from _function_parts(name, value)
    elif isinstance(value, (MethodType, BuiltinMethodType, partial)):
        for attribute in ("__self__", "__func__", "func", "args", "keywords"):
            yield Reference(name, getattr, value, attribute)
    elif isinstance(value, GeneratorType):
        yield from _frame_parts(name, value)
    elif type(value).__module__ in {"builtins", "itertools"} and hasattr(type(value), "__next__"):
        for number, referent in enumerate(gc.get_referents(value)):  # of map, zip, chain, ...
            yield Reference(f"{name} {number}", getitem, [referent], 0)
    if type(value).__module__.partition(".")[0] not in _OPAQUE:
        yield from _attributes(name, value)


def _entries(name: str, value: Any) -> Iterator[Reference]:
    """Yield the first entries, not through methods of a subclass, which may load data."""
    kind: Any = next(kind for kind in (dict, list, tuple, deque) if isinstance(value, kind))
    entries = dict.keys(value) if kind is dict else range(kind.__len__(value))
    for number, entry in enumerate(islice(entries, MOST_ENTRIES)):
        label = repr(entry) if isinstance(entry, (str, int)) else number
        yield Reference(f"{name}[{label}]", kind.__getitem__, value, entry)


def _attributes(name: str, value: Any) -> Iterator[Reference]:
    if isinstance(value, torch.nn.Module):
        children = submodules_in(value)
        for child in children:
            yield Reference(f"{name}.{child}", getitem, children, child)
    attributes = own_dict(value)
    for attribute in islice(attributes, MOST_ENTRIES):
        yield Reference(f"{name}.{attribute}", getitem, attributes, attribute)
    yield from _class_parts(name, value)


def _class_parts(name: str, value: Any) -> Iterator[Reference]:
    """Yield references to slots and generators, and what methods of the user can reach."""
    is_of_user = dict[str, bool]()  # by file
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            yield Reference(f"{name}.{slot}", getattr, value, slot)
        for attribute, member in vars(kind).items():
            # functions first: a module has 100, mostly of torch, and asking whether an object is
            # one of KINDS calls Python code of torch
            if isinstance(member, FunctionType):
                file = member.__code__.co_filename
                if file not in is_of_user:
                    is_of_user[file] = is_users(file)
                if is_of_user[file]:
                    yield from _function_parts(f"{name}.{attribute}", member)
            elif isinstance(member, KINDS):
                yield Reference(f"{name}.{attribute}", getattr, value, attribute)


def own_dict(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, without its class's `__getattr__`."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _function_parts(name: str, function: FunctionType) -> Iterator[Reference]:
    """Yield what a function of the user, not of a package, can reach."""
    code = function.__code__
    if not is_users(code.co_filename):
        return
    for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if free != "__class__":
            yield Reference(f"{name}: {free}", getattr, cell, "cell_contents")
    for attribute in ("__defaults__", "__kwdefaults__", "__dict__"):
        if getattr(function, attribute):
            yield Reference(f"{name}.{attribute}", getattr, function, attribute)
    yield from _global_parts(code, function.__globals__)


def global_references(name: str, value: Any) -> Iterator[Reference]:
    """Yield references to globals, also numbers, that functions of an object of the user read."""
    members = [value] if isinstance(value, FunctionType) else []
    if type(value).__module__.partition(".")[0] not in _OPAQUE:
        members += [member for kind in type(value).__mro__ for member in vars(kind).values()]
    for member in members:
        if isinstance(member, FunctionType) and is_users(member.__code__.co_filename):
            yield from _all_globals(member.__code__, member.__globals__, name)


def _all_globals(code: CodeType, names: dict[str, Any], owner: str) -> Iterator[Reference]:
    for name in code.co_names:
        if name in names:
            yield Reference(f"{owner}: {name}", getitem, names, name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_globals(constant, names, owner)


def _global_parts(code: CodeType, names: dict[str, Any]) -> Iterator[Reference]:
    module = str(names.get("__name__")).replace("__mp_main__", "__main__")
    for name in code.co_names:
        value = names.get(name)
        is_state = isinstance(value, (torch.Tensor, float))
        if is_state or not isinstance(value, _PLAIN):  # nor None
            yield Reference(f"{module}.{name}", getitem, names, name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_parts(constant, names)


def _frame_parts(name: str, generator: GeneratorType[Any, Any, Any]) -> Iterator[Reference]:
    if (frame := generator.gi_frame) is not None:
        for local in frame.f_locals:
            yield Reference(f"{name}: {local}", _local, generator, local)
        yield from _global_parts(frame.f_code, frame.f_globals)


def _local(generator: Any, name: str) -> Any:
    return generator.gi_frame.f_locals[name]
