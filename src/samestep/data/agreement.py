"""Comparison of the workers' data sets, by their lengths, a few samples and the plans of epochs.

Each worker loads the same few samples and sends digests of their parts with the next exchange, so a
comparison needs no separate exchange. Of floating-point values, only types and shapes are compared,
because another kind of CPU rounds them differently. Before all that, each worker compares two of
its own loads of them, because a sample must not depend on what this process has loaded before.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from operator import itemgetter
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.data.plan import NONE, Indices, are_in
from samestep.data.random_state import key
from samestep.errors import DataError

SAMPLES: Final = 3  # of a data set in one comparison
SHARE: Final = 300  # samples that a worker loads for each one that it compares
NEW_DATASETS: Final = 32  # compared at their first use; a script that makes more may make thousands
MAX_DATASETS: Final = 1024  # remembered
PARTS: Final = 32  # of a sample, at most
FEW: Final = 8  # numbers in a list that are compared one by one
ELEMENTS: Final = 1 << 14  # of an array, at most
SHOWN: Final = 40  # characters of text that a message may show

Sample: TypeAlias = dict[str, str] | None  # digests by part; None if it could not be loaded
Gather: TypeAlias = Callable[[Any, str], list[Any]]

CAUSES: Final = (
    "All workers need the same samples in the same order. Usual causes: files listed without"
    " sorting (os.listdir, glob, iterdir); a shuffle or split that is drawn before ss.init; the"
    " order of a set, which differs between processes unless PYTHONHASHSEED is set; a condition on"
    " the rank; samples that depend on a clock, a process id or a generator that samestep does not"
    " seed; or other files on that host. Sort lists of files, write sorted(set(...)), shuffle or"
    " split after ss.init, and draw from random, numpy.random or torch"
)
PLAN_CAUSES: Final = (
    "All workers need the same options of run.batches. Usual causes: an order or weights drawn from"
    " a generator without a fixed seed, or taken from a set; a condition on the rank; or weights"
    " that processors of other kinds round differently. Compute them from sorted values and the"
    " epoch, or send those of rank 0 to all workers: weights = run.broadcast(weights)"
)
LOADED_AGAIN: Final = (
    "{what}, the data set of {where}, has another value when it is loaded again with the same"
    " random numbers, so that training would depend on what each process has loaded. Usual causes:"
    " a transform or collate_fn that changes a sample in place that the data set keeps (copy it"
    " first, as in x = self.cache[index].copy() or .clone()); samples made of those loaded before"
    " (draw indices from the whole data set, as in random.choices(range(len(self)), k=3)); a count"
    " of loads; a file or iterator that goes on; a clock; or a generator that samestep does not"
    " seed (run.on_lane_seed)"
)


class Loads(NamedTuple):
    """Digests of samples to compare; what a second load of them `changed`, "" if nothing.

    That may be a time if it `is_number`.
    """

    samples: list[Sample]
    changed: str = ""
    is_number: bool = False


class Change(NamedTuple):
    """A part of a sample that two loads differ in; a single float of Python if it `is_number`."""

    number: int
    part: str
    is_number: bool


@dataclass(frozen=True)
class Use:
    """One use of a data set of `size` samples: which of them are compared, and when.

    They are compared at the start of the first use, and of each epoch or evaluation whose number is
    a multiple of `every` (0: only at the first). `earlier` is the number of earlier uses. Samples
    that are `excluded` (sorted indices) are not loaded.
    """

    where: str
    size: int
    seed: int
    every: int
    earlier: int = 0
    excluded: Indices = field(default_factory=lambda: NONE)

    def is_due(self, number: int, *, at_start: bool = True) -> bool:
        """Return whether to compare now, at the start of the use or of a later epoch."""
        is_first = at_start and self.earlier == 0
        return is_first or (self.every > 0 and number % self.every == 0)

    def indices(self, number: int) -> list[int]:
        """Return the indices of the compared samples."""
        drawn = (key(self.seed, "compare", number, n) % self.size for n in range(SAMPLES))
        return sorted({self._next_kept(index) for index in drawn})

    def _next_kept(self, index: int) -> int:
        while len(self.excluded) and are_in(np.array([index]), self.excluded):
            index = (index + 1) % self.size
        return index


class DataCheck:
    """Compares the data sets of all workers; `gather` exchanges JSON between them.

    All workers load and compare at the same points of the program. One worker compares only its
    first loads of a data set with each other.
    """

    def __init__(self, seed: int, rank: int, workers: int, gather: Gather) -> None:
        self._seed, self._rank, self._workers, self._gather = seed, rank, workers, gather
        self._uses: dict[int, tuple[Any, int]] = {}  # by id: a weak reference, and their number
        self._datasets = 0
        # JSON to send to all workers and to pass to `compare_notes`
        self.pending: dict[str, dict[str, Any]] = {}

    def begin(self, dataset: Any, size: int, where: str, excluded: Indices = NONE) -> Use:
        """Start and return a use of a data set; `where` describes it in errors."""
        reference, earlier = self._uses.get(id(dataset), (None, 0))
        if reference is not None and reference() is not dataset:  # its address was used again
            earlier = 0
        if len(self._uses) == MAX_DATASETS:
            self._uses.clear()
        self._uses[id(dataset)] = (_reference(dataset), earlier + 1)
        self._datasets += earlier == 0
        if earlier == 0 and self._datasets > NEW_DATASETS:
            earlier = self._datasets
        every = -(-SHARE * SAMPLES * self._workers // size) if self._workers > 1 else 0
        return Use(where, size, self._seed, every, earlier, excluded)

    def add(self, use: Use, number: int, loads: Loads) -> None:
        """Send samples with the next exchange. Raises `DataError` if loading changed them."""
        if loads.changed:
            text = LOADED_AGAIN.format(what=loads.changed, where=use.where)
            if not loads.is_number:  # which may be the time that a load took
                raise DataError(text)
            if self._rank == 0:
                logging.getLogger("samestep").warning("%s", text)
        if self._workers == 1:
            return
        self.pending[f"{use.where}, {number}"] = {
            "where": use.where,
            "size": use.size,
            "indices": use.indices(number),
            "samples": loads.samples,
        }

    def add_plan(self, use: Use, epoch: int, plan: Mapping[str, Any]) -> None:
        """Send the values that identify an epoch's plan with the next exchange."""
        if self._workers > 1:
            name = f"plan of {use.where}, {epoch}"
            values = {option: str(value) for option, value in plan.items()}
            self.pending[name] = {"where": f"{use.where} in epoch {epoch}", "plan": values}

    def compare(self, value: Any, what: str) -> list[Any]:
        """Return every worker's JSON value by rank, and compare what is pending."""
        notes, values = zip(*self._gather([self.pending, value], what), strict=True)
        self.compare_notes(notes)
        return list(values)

    def compare_notes(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Compare all workers' notes, by rank. Raises `DataError` on all workers."""
        self.pending = {}
        for name in dict.fromkeys(name for note in notes for name in note):
            entries = {rank: note[name] for rank, note in enumerate(notes) if name in note}
            first = next(iter(entries.values()))
            where = first["where"]
            if "plan" in first:
                self._compare_plans(where, {rank: entry["plan"] for rank, entry in entries.items()})
                continue
            sizes = {rank: f"{entry['size']} samples" for rank, entry in entries.items()}
            if len(set(sizes.values())) > 1:
                self._raise(f"the data set of {where}", sizes)
            difference = differs([entry["samples"] for entry in entries.values()])
            if difference is not None:
                number, part = difference
                parts = {rank: entry["samples"][number] or {} for rank, entry in entries.items()}
                values = {rank: digests[part] for rank, digests in parts.items() if part in digests}
                sample = f"sample {first['indices'][number]}{part}"
                self._raise(f"{sample} of the data set of {where}", values)

    def _compare_plans(self, where: str, plans: Mapping[int, Mapping[str, str]]) -> None:
        names = dict.fromkeys(name for plan in plans.values() for name in plan)
        differ = [name for name in names if len({plan.get(name) for plan in plans.values()}) > 1]
        if differ:
            values = {
                rank: ", ".join(f"{name}={plan.get(name)}" for name in differ)
                for rank, plan in plans.items()
            }
            self._raise(f"the plan of {where}", values, PLAN_CAUSES)

    def _raise(self, what: str, values: Mapping[int, str], causes: str = CAUSES) -> NoReturn:
        hosts = self._gather(socket.gethostname(), "comparing data sets")
        (first, value), *others = values.items()
        rank, other = next(((rank, other) for rank, other in others if other != value), others[-1])
        raise DataError(
            f"workers have different data: {what} is {value} on worker {first} ({hosts[first]}) and"
            f" {other} on worker {rank} ({hosts[rank]}). {causes}"
        )


def _reference(dataset: Any) -> Any:
    try:
        return weakref.ref(dataset)
    except TypeError:  # lists and other builtin types
        return None


def digest(sample: Any, *, has_floats: bool = False) -> dict[str, str]:
    """Return digests of a sample's parts, by their path in it, outer parts first.

    They contain what is the same on all workers, not addresses and folders. Those of one worker may
    also be of its floating-point values.
    """
    digests: dict[str, str] = {}
    waiting = deque([("", sample)])
    while waiting and len(digests) < PARTS:
        path, value = waiting.popleft()
        inner = _parts(value)
        kind = type(value).__qualname__
        if inner is None:
            digests[path] = _digest(value, kind, "biufc" if has_floats else "biu")
        else:
            names = [name for name, _ in inner]
            digests[path] = f"{kind} of {len(names)}, {_text(''.join(names[:PARTS]))}"
            waiting += [(path + name, part) for name, part in inner[:PARTS]]
    return digests


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container by name, None for other values."""
    if isinstance(value, Mapping):
        parts = ((f"[{_name(name)}]", part) for name, part in value.items())
        return sorted(parts, key=itemgetter(0))
    if isinstance(value, (list, tuple)) and not _is_long(value):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    if hasattr(value, "to_dict"):  # graphs of PyTorch Geometric
        return _parts(value.to_dict())
    return None


def _is_long(values: Sequence[Any]) -> bool:
    """Return whether values are compared as one array: many numbers, such as tokens of a text."""
    return len(values) > FEW and all(isinstance(value, (int, float)) for value in values)


def _name(name: Any) -> str:
    """Return a dict's key as text, without addresses and folders."""
    if isinstance(name, str):
        return repr(_text(name.rpartition("/")[2]))
    return repr(name) if isinstance(name, (int, float)) else type(name).__qualname__


def _digest(value: Any, kind: str, hashed: str) -> str:
    """Return the digest of a value; `hashed` has the kinds of dtypes whose values count."""
    if isinstance(value, torch.Tensor):
        kind = f"{value.dtype} {list(value.shape)}"
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return kind
        flat = _sampled(value.detach().reshape(-1)).cpu().resolve_conj().resolve_neg()
        return _array((flat.double() if flat.is_floating_point() else flat).numpy(), kind, hashed)
    # lists of numbers, arrays and scalars of NumPy, images of Pillow
    if isinstance(value, (list, tuple)) or hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        return _array(array, f"{array.dtype} {list(array.shape)}", hashed)
    if isinstance(value, float):
        return _array(np.array(value), kind, hashed)
    if isinstance(value, Enum):
        kind = f"{kind} {value.name}"
    elif isinstance(value, (str, os.PathLike)):
        kind = str(value).rpartition("/")[2]  # each host may have it in another folder
    elif isinstance(value, AbstractSet):
        kind = f"{kind} of {len(value)}"
    elif value is None or isinstance(value, (int, bytes)):
        kind = repr(value)
    return _text(kind)


def _array(array: NDArray[Any], kind: str, hashed: str) -> str:
    flat = _sampled(array.reshape(-1))
    return f"{kind} {_hash(flat.tobytes())}" if array.dtype.kind in hashed else kind


def _sampled(flat: Any) -> Any:
    return flat[:: max(1, -(-len(flat) // ELEMENTS))]


def _text(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… {_hash(text.encode(errors='replace'))}"


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def differs(workers: Sequence[Sequence[Sample]]) -> tuple[int, str] | None:
    """Return the number of the first sample in which workers differ, and the part."""
    for number, samples in enumerate(zip(*workers, strict=False)):
        loaded = [sample for sample in samples if sample is not None]
        for part in loaded[0] if loaded else ():
            values = [sample[part] for sample in loaded if part in sample]
            if len(set(values)) > 1:
                return number, part
    return None


def changes(first: Sequence[Sample], again: Sequence[Sample]) -> Iterator[Change]:
    """Yield what differs between two loads of samples, outer parts first."""
    for number, (digests, others) in enumerate(zip(first, again, strict=False)):
        for part, value in (digests or {}).items():
            other = (others or {}).get(part, value)
            if other != value:
                kinds = {text.partition(" ")[0] for text in (value, other)}
                yield Change(number, part, kinds == {"float"})
