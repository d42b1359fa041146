"""What user code reaches: one search, from which each guard takes what it needs.

The search follows attributes, lists, tuples, dicts, iterators, and the closures and globals of the
user's functions. It is bounded: a data set of many objects is not searched to the end.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from argparse import Namespace
from collections import ChainMap, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from operator import getitem
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from typing_extensions import Self

from samestep.torch_internals import MODULE_ATTRIBUTES, submodules_in
from samestep.user_code import is_installed, is_users

MOST_REFERENCES: Final = 20_000  # examined in one search
MOST_ENTRIES: Final = 256  # of one list or dict
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
STATE: Final = (torch.Tensor, float, int, np.ndarray, np.number)  # what lanes may update
_OPTIMIZERS: Final = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_CONTAINERS: Final = (dict, list, tuple, deque)
NAMESPACES: Final = (SimpleNamespace, Namespace)  # of the standard library, for anything
NO_FILE: Final = os.__file__  # of a module that is not the user's
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


class Found(NamedTuple):
    """An object that a search has found, with what it holds. Generators have no parts."""

    reference: Reference
    value: Any
    parts: list[tuple[Reference, Any]]
    is_of_user: bool  # whether user code made it, or the object that holds this container


def walk(**roots: Any) -> Iterator[Found]:
    """Yield what the roots reach, breadth first.

    Generators may come more than once; the global ones are left out.
    """
    return Search(roots)


class Search(Iterator[Found]):
    """A search of what the roots reach, breadth first, which may go on later.

    With `only_state`, parts are tensors, arrays, numbers, and what may hold some. Classes of the
    user are searched then, too, but not optimizers, which lanes do not change.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        only_state: bool = False,
        known: MutableMapping[int, Any] | None = None,
    ) -> None:
        self._only_state = only_state
        self._shared = _global_generators()
        # holds objects, because the id of a freed one may be used again
        self._seen: MutableMapping[int, Any] = {} if known is None else ChainMap({}, known)
        self._kinds: dict[type, _Kind] = {}
        self._skipped = set[type]()  # classes whose objects hold no state
        self._queue: deque[tuple[Reference, bool]] = deque()
        self.add(roots)

    def add(self, roots: Mapping[str, Any]) -> None:
        """Search what these roots reach, too."""
        if not self._queue:
            self._left = MOST_REFERENCES
        self._push((Reference(name, getitem, roots, name) for name in roots), is_of_user=True)

    def keep_modules(self) -> None:
        """Keep only modules in memory, which are most of what a search finds, after its end."""
        self._seen = {
            n: value for n, value in self._seen.items() if self._kind_of(type(value)).is_module
        }

    def beyond(self, roots: Mapping[str, Any]) -> Search:
        """Return a search of what other roots reach, except the modules that this one has kept."""
        return Search(roots, only_state=self._only_state, known=self._seen)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to search."""
        return not self._queue

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Found:
        while self._queue:
            reference, is_of_user = self._queue.popleft()
            value = reference.value()
            kind = self._kind_of(type(value))
            number = id(value)
            if kind.is_plain or number in self._shared:
                continue
            if kind.is_generator:
                return Found(reference, value, [], is_of_user)
            if number in self._seen:
                continue
            self._seen[number] = value
            if kind.is_user is not None:
                is_of_user = kind.is_user
            parts = self._push(self._parts(reference.name, value, kind), is_of_user=is_of_user)
            return Found(reference, value, parts, is_of_user)
        raise StopIteration

    def _push(
        self, references: Iterator[Reference], *, is_of_user: bool
    ) -> list[tuple[Reference, Any]]:
        """Let the search go on to references; return them with what they refer to."""
        parts = []
        for reference in references:
            value = reference.value()
            kind = self._kind_of(type(value))
            if not kind.is_plain and self._left > 0:
                self._queue.append((reference, is_of_user))
            self._left -= 1
            parts.append((reference, value))
        return parts

    def _kind_of(self, kind: type) -> _Kind:
        if (cached := self._kinds.get(kind)) is None:
            cached = self._kinds[kind] = _Kind.of(kind, only_state=self._only_state)
            if self._only_state and cached.is_plain and not cached.is_state:
                self._skipped.add(kind)
        return cached

    def _parts(self, name: str, value: Any, kind: _Kind) -> Iterator[Reference]:
        """Yield references to the objects that an object holds."""
        if kind.container is not None:
            yield from self._entries(name, value, kind.container)
        elif kind.parts is not None:
            yield from kind.parts(name, value)
        if kind.has_attributes:
            yield from self._attributes(name, value, kind)

    def _entries(self, name: str, value: Any, kind: Any) -> Iterator[Reference]:
        """Yield the first entries, not through methods of a subclass, which may load data."""
        entries = dict.items(value) if kind is dict else enumerate(kind.__iter__(value))
        for number, (key, entry) in enumerate(islice(entries, MOST_ENTRIES)):
            if type(entry) not in self._skipped:
                label = repr(key) if isinstance(key, (str, int)) else number
                yield Reference(f"{name}[{label}]", kind.__getitem__, value, key)

    def _attributes(self, name: str, value: Any, kind: _Kind) -> Iterator[Reference]:
        if kind.is_module:
            children = submodules_in(value)
            for child in children:
                yield Reference(f"{name}.{child}", getitem, children, child)
        attributes = own_dict(value)
        for attribute, part in islice(attributes.items(), MOST_ENTRIES):
            if type(part) in self._skipped:
                continue
            if type(part) is int and self._only_state and kind.is_user is False:  # such as a size
                continue
            # a module has 20 dicts of its own, mostly of hooks and mostly empty
            is_empty = self._only_state and type(part) in {dict, OrderedDict} and not part
            if not (is_empty and kind.is_module and attribute in MODULE_ATTRIBUTES):
                yield Reference(f"{name}.{attribute}", getitem, attributes, attribute)
        yield from _members_of(name, value, kind)


@dataclass(frozen=True)
class _Kind:
    """How the search goes on from the objects of a class."""

    is_plain: bool  # they have no parts
    is_state: bool
    is_generator: bool
    is_module: bool
    is_user: bool | None  # None for containers and functions, which have no maker of their own
    has_attributes: bool
    container: type | None
    parts: Callable[[str, Any], Iterator[Reference]] | None
    # slots and generators, and functions of the user; state with the class that has it
    members: list[tuple[str, Any, type | None]]

    @classmethod
    def of(cls, kind: type, *, only_state: bool) -> _Kind:
        """Return how the search goes on from the objects of a class."""
        of_module = kind.__module__.partition(".")[0]
        is_builtin = of_module == "builtins"
        is_iterator = of_module in {"builtins", "itertools"} and hasattr(kind, "__next__")
        parts = next((parts for kinds, parts in _PARTS if issubclass(kind, kinds)), None)
        container = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        is_namespace = issubclass(kind, NAMESPACES)
        is_opaque = of_module in _OPAQUE or kind.__module__.startswith("torch.distributed.")
        has_attributes = is_namespace or not is_opaque
        # nothing reads the values of a sharded parameter
        is_plain = issubclass(kind, _PLAIN) or hasattr(kind, "is_sharded")
        if only_state:
            has_attributes = has_attributes and not issubclass(kind, _OPTIMIZERS)
            is_plain = is_plain and not issubclass(kind, type)
        is_own = not is_builtin and not is_installed(kind)
        return cls(
            is_plain=is_plain,
            is_state=issubclass(kind, STATE) and kind is not bool,
            is_generator=issubclass(kind, KINDS),
            is_module=issubclass(kind, torch.nn.Module),
            is_user=(
                None
                if is_builtin or is_namespace or issubclass(kind, (list, dict, deque, partial))
                else is_own
            ),
            has_attributes=has_attributes,
            container=container,
            parts=parts or (_iterator_parts if is_iterator else None),
            members=(
                []
                if is_plain or not has_attributes
                else [*_class_members(kind, has_state=only_state and is_own)]
            ),
        )


def _members_of(name: str, value: Any, kind: _Kind) -> Iterator[Reference]:
    for member, of_class, owner in kind.members:
        if isinstance(of_class, FunctionType):
            yield from _function_parts(f"{name}.{member}", of_class)
        elif owner is None:  # a slot, or a generator of the class
            yield Reference(f"{name}.{member}", getattr, value, member)
        elif member not in own_dict(value):  # the state of the class
            yield Reference(f"{name}.{member}", getattr, owner, member)


def _method_parts(name: str, method: Any) -> Iterator[Reference]:
    for attribute in ("__self__", "__func__", "func", "args", "keywords"):
        yield Reference(name, getattr, method, attribute)


def _iterator_parts(name: str, iterator: Any) -> Iterator[Reference]:
    for number, referent in enumerate(gc.get_referents(iterator)):  # of map, zip, chain, ...
        yield Reference(f"{name} {number}", getitem, [referent], 0)


def _class_members(kind: type, *, has_state: bool) -> Iterator[tuple[str, Any, type | None]]:
    """Yield slots, generators of the class, functions of the user, and state, with their names."""
    for base in kind.__mro__:
        has_own_state = has_state and not is_installed(base)
        slots = base.__dict__.get("__slots__", ())
        yield from ((slot, None, None) for slot in ((slots,) if isinstance(slots, str) else slots))
        for name, member in vars(base).items():
            # functions first: a module has 100, mostly of torch, and asking whether an object is
            # one of KINDS calls Python code of torch
            if isinstance(member, FunctionType):
                if is_users(member.__code__.co_filename):
                    yield name, member, None
            elif isinstance(member, KINDS):
                yield name, member, None
            elif has_own_state and not name.startswith("__") and _may_be_state(member):
                yield name, member, base


def _class_parts(name: str, kind: type) -> Iterator[Reference]:
    """Yield what a class of the user holds, which may be a namespace, and its functions reach."""
    if not is_installed(kind):
        for member, value in list(vars(kind).items()):
            is_wrapped = isinstance(value, (staticmethod, classmethod))
            content = value.__func__ if is_wrapped else value
            if isinstance(content, FunctionType):
                yield from _function_parts(f"{name}.{member}", content)
            elif not member.startswith("__") and _may_be_state(content):
                yield Reference(f"{name}.{member}", getattr, kind, member)


def _may_be_state(value: Any) -> bool:
    return isinstance(value, (*STATE, *_CONTAINERS)) and not isinstance(value, bool)


def is_metric(value: Any) -> bool:
    """Return whether an object accumulates a metric: torchmetrics, torcheval, ignite, or alike."""
    return is_metric_class(type(value))  # type: ignore[arg-type]


@lru_cache(maxsize=MOST_ENTRIES)
def is_metric_class(kind: type) -> bool:
    """Return whether the objects of a class accumulate a metric."""
    methods = ("update", "compute"), ("reset", "merge", "merge_state")
    required, any_of = ([callable(getattr(kind, m, None)) for m in names] for names in methods)
    return all(required) and any(any_of)


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


def _global_parts(code: CodeType, names: dict[str, Any]) -> Iterator[Reference]:
    module = str(names.get("__name__")).replace("__mp_main__", "__main__")
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, ModuleType):
            if is_users(getattr(value, "__file__", None) or NO_FILE):
                yield from _module_parts(name, value, code.co_names)
        elif is_part(value):
            yield Reference(f"{module}.{name}", getitem, names, name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_parts(constant, names)


def is_part(value: Any) -> bool:
    """Return whether a variable may be, or hold, a state: not a text, nor None, nor a package."""
    if isinstance(value, (type, bool)):
        return isinstance(value, type) and not is_installed(value)
    return isinstance(value, STATE) or not isinstance(value, _PLAIN)


def _module_parts(name: str, module: ModuleType, used: Iterable[str]) -> Iterator[Reference]:
    """Yield those names of a module of the user that a function may use."""
    names = vars(module)
    for part in used:
        if part in names and is_part(names[part]):
            yield Reference(f"{name}.{part}", getitem, names, part)


def _frame_parts(name: str, generator: GeneratorType[Any, Any, Any]) -> Iterator[Reference]:
    if (frame := generator.gi_frame) is not None:
        for local in frame.f_locals:
            yield Reference(f"{name}: {local}", _local, generator, local)
        yield from _global_parts(frame.f_code, frame.f_globals)


def _local(generator: Any, name: str) -> Any:
    return generator.gi_frame.f_locals[name]


def _global_generators() -> set[int]:
    return {
        id(random.random.__self__),  # type: ignore[attr-defined]
        id(mtrand._rand),  # noqa: SLF001  no public name
        id(mtrand.get_bit_generator()),
        id(torch.default_generator),
        *map(id, torch.cuda.default_generators if torch.cuda.is_initialized() else ()),
    }


_PARTS: Final[Sequence[tuple[Any, Callable[[str, Any], Iterator[Reference]]]]] = (
    (FunctionType, _function_parts),
    ((MethodType, BuiltinMethodType, partial), _method_parts),
    (type, _class_parts),
    (GeneratorType, _frame_parts),
)
