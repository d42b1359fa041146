"""What the lanes of a worker reach, for those who refuse that lanes change it.

The first call with a loss function searches to the end, once before and once after its first lane.
A search is repeated when there may be more: in the calls after the first, at growing intervals, at
every check, and when a container has got entries. Each later call then takes a few objects further,
so that no step is longer than others. Once a search is complete, lanes are watched for some calls.
What is compared in each call are versions and addresses of tensors; their bits, because writes
through `.data` change no version, are compared along with each search.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from operator import getitem
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from samestep.data.search import NAMESPACES, Found, Reference, Search, is_metric, own_dict
from samestep.step.hashing import hashes_of
from samestep.step.lane_pass import LanePass, StepPlugin
from samestep.torch_internals import MODULE_ATTRIBUTES, MODULE_DICTS, versions_and_addresses
from samestep.user_code import is_installed

WATCHED_CALLS: Final = 3  # a worker with one lane sets a state, replaces it, and then reads it
MOST_OBJECTS: Final = 48  # that a later call searches
MOST_GROWTHS: Final = 2  # of a container; one that grows all the time is a list of results
MOST_KNOWN: Final = 256  # loss functions
MOST_CLOSURES: Final = 16
FEWEST_HASHED: Final = 16  # tensors whose bits a call compares
PASS_CALLS: Final = 16  # that compare the bits of all tensors
REGISTERED: Final = re.compile(r"\._(?:parameters|buffers)\['([^']*)'\]")
OF_BODY: Final = re.compile(r"""^body\[(['"])(.*?)\1\]""")
MOST_PARTS: Final = 64  # of a value that a lane replaces
DEPTH: Final = 3  # of its parts
MOST_BYTES: Final = 2**24  # of an array that is compared
FIXED: Final = (tuple, GeneratorType, partial, MethodType, BuiltinMethodType)  # in their parts
Place = tuple[int, Any]  # the id of a reference's owner, and the key there


@dataclass
class _Pass:
    """A search, and what it has found so far."""

    search: Search
    first_call: int
    tensors: list[Reference] = field(default_factory=list)
    values: list[Reference] = field(default_factory=list)  # numbers and arrays, and what has some
    sequences: list[Reference] = field(default_factory=list)  # lists and deques
    metrics: dict[int, tuple[str, Any]] = field(default_factory=dict)  # by id, with their names
    containers: list[Any] = field(default_factory=list)  # lists, dicts, attributes of objects
    lengths: list[int] = field(default_factory=list)  # of the containers, when they were found
    of_all: dict[str, Any] = field(default_factory=dict)  # what computes the loss of all lanes

    def add(self, roots: Mapping[str, Any]) -> None:
        """Search what these roots reach, too."""
        variables = roots["variables"]  # of the body of a loop
        of_lanes = {name: root for name, root in roots.items() if root is not variables}
        if roots["embed"] is not None:
            # then all workers call the loss function the same way, so it may update metrics
            self.of_all["loss_fn"] = of_lanes.pop("loss_fn")
        self.search.add(of_lanes)
        self.search.add(variables)

    def go_on(self, most: int | None) -> bool:
        """Search `most` further objects, or all; return whether the search is complete."""
        for match in islice(self.search, most):
            self._note(match)
            if is_metric(match.value):
                self.metrics.setdefault(id(match.value), (readable(match.reference), match.value))
        if self.search.is_complete and self.of_all:  # not what lanes reach, too
            self.search.add(self.of_all)
            self.of_all = {}
            for match in self.search:
                self._note(match)
        return self.search.is_complete

    def _note(self, match: Found) -> None:
        """Note the tensors and values that an object holds, where others can be put.

        Values of classes of installed packages are left out: they are settings, and times of
        progress bars. Of modules, the containers are their attributes and buffers.
        """
        reference, value, parts, is_of_user = match
        container = None
        if isinstance(value, (list, dict, deque)):
            container = value if reference.key not in MODULE_ATTRIBUTES else None
        elif type(value).__module__ != "builtins":  # not functions and methods
            container = own_dict(value)
        if container is not None:
            self.containers.append(container)
            self.lengths.append(len(container))
        if is_of_user and isinstance(value, (list, deque)):
            self.sequences.append(reference)
        if isinstance(value, FIXED):
            return
        for part, content in parts:
            if isinstance(content, Tensor):
                self.tensors.append(part)
            elif is_of_user and part.key not in MODULE_DICTS and may_be_replaced(content):
                self.values.append(part)


class Marks(NamedTuple):
    """What changes if a lane changes a tensor in place."""

    tensors: list[Tensor]
    hashed: list[Tensor]  # those whose bits are compared in this call
    others: list[tuple[Reference, Any]]  # those that are no parameters, and arrays
    values: list[list[Any]]  # versions and addresses of the tensors, hashes of the hashed ones
    arrays: list[Any]  # those whose bits are compared in this call
    hashes: list[int]  # of the arrays


class Reach(StepPlugin):
    """The parameters, other tensors, arrays, numbers and metrics that lanes reach."""

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
        self.places: dict[Place, Reference] = {}  # of tensors that are no parameters
        self.values: dict[Place, Reference] = {}  # of numbers, arrays, and what has some
        self.looks_again = False  # after the first lane of this call
        self.begins_to_watch = False  # in this call
        self._roots: dict[str, Any] = {}
        self._parameters: dict[int, tuple[Tensor, str]] = {}  # by id, with their names
        self._calls = 0
        self._watched_until = 0  # the last call in which lanes are compared
        self._known = set[Any]()  # loss functions
        self._of_closures: dict[Any, dict[int, tuple[str, Any]]] = {}  # metrics, by closure
        self._current: _Pass | None = None  # that goes on
        self._last = _Pass(Search({}), 0)
        self._growths: Counter[int] = Counter()  # of containers, by their id
        self._hashed: int | None = None  # tensors in the comparison that goes on

    def begin(self, lane_pass: LanePass) -> None:
        """Find what lanes reach, before those of a step; all of it if the loss function is new."""
        loss = lane_pass.loss
        # a body that gets the embeddings of all lanes does the same on all workers
        body, variables = (loss.body, loss.variables) if loss.embed is None else ({}, {})
        roots = {"loss_fn": loss.fn, "embed": loss.embed, "model": loss.model, "body": body}
        roots["variables"] = variables
        self.begins_to_watch = self._find(lane_pass.seed[0], roots)

    def _find(self, step: int, roots: Mapping[str, Any]) -> bool:
        """Return whether lanes are watched from now on, which were not until now."""
        self._calls += 1
        is_watched = self.is_watched
        self._roots = {**roots, "modules": list(self._modules)}
        is_unknown = self._is_unknown()
        is_due = self._is_due(step)
        compares_bits = is_unknown or (is_due and self._calls != WATCHED_CALLS)
        if self._hashed is None and compares_bits:
            self._hashed = 0
        if self._current is None:
            if is_due or (not is_watched and self._have_grown()):
                self._current = _Pass(Search({}, only_state=True), self._calls)
            elif is_watched or is_unknown:
                self._current = self._last
        self.looks_again = False
        if self._current is None:
            return False
        self._current.add(self._roots)
        if not self._current.go_on(None if is_unknown else MOST_OBJECTS):
            return False
        self.looks_again = is_unknown or self._current.first_call == self._calls
        if not is_watched:  # such as those of earlier loss functions
            self.places, self.values = {}, {}
        if is_unknown or self._current is not self._last:
            self._watched_until = self._calls + WATCHED_CALLS - 1
        self._end(self._current)
        self._current = None
        return not is_watched

    @property
    def is_watched(self) -> bool:
        """Whether lanes are compared in this call."""
        return self._calls <= self._watched_until

    @property
    def is_last_watched(self) -> bool:
        """Whether this is the last call in which lanes are compared."""
        return self._calls == self._watched_until

    def look_again(self) -> None:
        """Find what the first lane has made.

        Its modules may have the parameters of another device, which are copied each step.
        """
        self.looks_again = False
        after = _Pass(Search({}, only_state=True), self._calls)
        after.add(self._roots)
        after.go_on(None)
        self._end(after, in_lane=True)

    def report(self) -> None:
        """Forget the variables of the step, after its lanes."""
        self._roots = {}
        self.looks_again = False  # no search for a lane that is computed again later
        if self.is_watched:
            self._last.lengths = [*map(len, self._last.containers)]
        if self.is_last_watched:  # hold only what is compared in later calls
            self._last.sequences.clear()
            is_kept = {place: is_array(each.value()) for place, each in self.values.items()}
            self.values = {place: self.values[place] for place in is_kept if is_kept[place]}

    def metrics(self, loss_fn: Any) -> Sequence[tuple[str, Any]]:
        """Return the metrics that lanes reach, with their names, also by a new closure."""
        if len(self._of_closures) == MOST_CLOSURES:  # such as those that a loop makes in each step
            self._of_closures.clear()
        key = code_of(loss_fn), id(loss_fn)
        if key not in self._of_closures:
            closure = _Pass(self._last.search.beyond({"loss_fn": loss_fn}), self._calls)
            closure.go_on(MOST_OBJECTS)
            self._of_closures[key] = closure.metrics
        return [*(self._of_closures[key] | self._last.metrics).values()]

    def marks(self) -> Marks:
        """Return the marks of what no lane may change."""
        # not what belongs to a graph, such as stored activations, which would stay in memory
        others = [
            (reference, value)
            for reference in self.places.values()
            if is_plain(value := reference.value()) and value.grad_fn is None
        ]
        tensors = [tensor for tensor, _ in self._parameters.values()]
        tensors += [tensor for _, tensor in others]
        arrays: list[Any] = []
        if self._hashed == 0:  # at the start of a comparison
            values = [(reference, reference.value()) for reference in self.values.values()]
            others += [(reference, value) for reference, value in values if is_array(value)]
            arrays = [value for _, value in values if is_array(value)]
        hashed = self._next_hashed(tensors)
        if hashed:
            self._wait_for_gpu()
        marks = _values(tensors, hashed)
        return Marks(tensors, hashed, others, marks, arrays, [*map(_hash_of, arrays)])

    def changed(self, marks: Marks) -> Any:
        """Return the first tensor or array that differs from its marks, None if none does."""
        for array, before in zip(marks.arrays, marks.hashes, strict=True):
            if _hash_of(array) != before:
                return array
        values = _values(marks.tensors, marks.hashed)
        if values == marks.values:
            return None
        changed = {
            id(tensor)
            for tensors, before, after in zip(
                (marks.tensors, marks.hashed), marks.values, values, strict=True
            )
            for tensor, old, new in zip(tensors, before, after, strict=True)
            if old != new
        }
        return next(tensor for tensor in marks.tensors if id(tensor) in changed)

    def parameter_name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter, None for other tensors."""
        return self._parameters.get(id(tensor), (None, None))[1]

    def _next_hashed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors whose bits this call compares: all of them in the first one."""
        if (start := self._hashed) is None:
            return []
        size = max(FEWEST_HASHED, -(-len(tensors) // PASS_CALLS))
        # a GPU hashes all of them as fast as some, and each time has to be awaited
        is_on_gpu = bool(tensors) and tensors[0].device.type != "cpu"
        end = len(tensors) if self._calls == 1 or is_on_gpu else start + size
        self._hashed = end if end < len(tensors) else None
        return tensors[start:end]

    def _is_unknown(self) -> bool:
        """Return whether a loss function, or a model, is not one of those before."""
        roots = self._roots
        codes = code_of(roots["loss_fn"]), code_of(roots["embed"])
        key = (*codes, type(roots["model"]), len(self._modules), frozenset(roots["variables"]))
        if key in self._known:
            return False
        if len(self._known) == MOST_KNOWN:
            self._known.clear()
        self._known.add(key)
        return True

    def _is_due(self, step: int) -> bool:
        """Return whether this is one of the first calls, a check, or a power of two from 8 on."""
        if self._every is not None and step % self._every == 0:
            return True
        return self._calls <= WATCHED_CALLS or (self._calls >= 8 and self._calls.bit_count() == 1)

    def _have_grown(self) -> bool:
        """Return whether a container has other entries than after the last search."""
        last = self._last
        lengths = [*map(len, last.containers)]
        if lengths == last.lengths:
            return False
        changed = {
            id(container)
            for container, before, now in zip(last.containers, last.lengths, lengths, strict=True)
            if before != now
        }
        last.lengths = lengths
        self._growths.update(changed)
        return any(self._growths[number] <= MOST_GROWTHS for number in changed)

    def _end(self, found: _Pass, *, in_lane: bool = False) -> None:
        """Take over what a search has found, except buffers with rules."""
        self._last = found
        found.search.keep_modules()
        buffers = self._buffers()
        registered = set(map(id, buffers.values()))  # a module may hold one under two names
        for reference in found.values:
            self.values[id(reference.owner), reference.key] = reference
        for reference in found.tensors:
            place, tensor = (id(reference.owner), reference.key), reference.value()
            if isinstance(tensor, Parameter):
                if not in_lane and is_plain(tensor):
                    self._parameters.setdefault(id(tensor), (tensor, readable(reference)))
            elif place not in buffers and id(tensor) not in registered:
                self.places[place] = reference
        found.values.clear()
        found.tensors.clear()

    @property
    def sequences(self) -> Sequence[Reference]:
        """The lists and deques of the last search."""
        return self._last.sequences


def code_of(function: Any) -> Any:
    """Return what identifies a function, but not which of its closures."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def readable(reference: Reference) -> str:
    """Return the name of a tensor, for messages."""
    return OF_BODY.sub(r"\2", REGISTERED.sub(r".\1", reference.name))


def is_plain(value: Any) -> bool:
    """Return whether it is a tensor with a version, an address and bytes."""
    return (
        type(value) in {Tensor, Parameter}
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_nested or value.is_inference() or value.is_conj() or value.is_neg())
    )


def is_array(value: Any) -> bool:
    """Return whether it is an array of numbers."""
    is_number = issubclass(type(value), np.ndarray) and value.dtype.kind in "iufcb"
    return is_number and value.nbytes <= MOST_BYTES


def is_leaf(value: Any) -> bool:
    """Return whether it is a number, an array or a tensor."""
    return (
        is_plain(value)
        or type(value) in {float, int}
        or isinstance(value, np.number)
        or is_array(value)
    )


def leaves_in(reference: Reference, depth: int = DEPTH) -> Iterator[Reference]:
    """Yield references to the leaves in a value, or to a tuple that has some, to replace them."""
    value = reference.value()
    if is_leaf(value):
        yield reference
    elif depth == 0:
        return
    elif isinstance(value, tuple):
        if any(map(is_leaf, value)):
            yield reference
    elif isinstance(value, (list, deque)):
        for number in range(min(len(value), MOST_PARTS)):
            part = Reference(f"{reference.name}[{number}]", getitem, value, number)
            yield from leaves_in(part, depth - 1)
    elif isinstance(value, dict) or may_be_replaced(value):
        is_dict = isinstance(value, dict)
        owner = value if is_dict else own_dict(value)
        for key in [*islice(owner, MOST_PARTS)]:
            name = f"{reference.name}[{key!r}]" if is_dict else f"{reference.name}.{key}"
            yield from leaves_in(Reference(name, getitem, owner, key), depth - 1)


def may_be_replaced(value: Any) -> bool:
    """Return whether a value, or what it has, may be a state: not modules or functions."""
    return _may_be_replaced(type(value))  # type: ignore[arg-type]


@lru_cache(maxsize=MOST_KNOWN)
def _may_be_replaced(kind: type) -> bool:
    if issubclass(kind, (bool, Module, type)):
        return False
    if issubclass(kind, (float, int, np.number, np.ndarray, list, tuple, dict, deque)):
        return True
    return issubclass(kind, NAMESPACES) or (
        kind.__module__ != "builtins" and not is_installed(kind)
    )


def _hash_of(array: Any) -> int:
    return crc32(array.tobytes())


def _values(tensors: Sequence[Tensor], hashed: Sequence[Tensor]) -> list[list[Any]]:
    # one pass over the tensors, which backward has pushed out of the cache
    return [versions_and_addresses(tensors), hashes_of(hashed) if hashed else []]
