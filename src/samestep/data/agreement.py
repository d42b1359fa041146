"""Comparison of the workers' data sets, by their lengths, a few samples and the plans of epochs.

Each worker loads the same few samples and sends digests of their parts with the next exchange, so a
comparison needs no separate exchange. A digest is text that must be equal, or of floating-point
values a number that must be close, because another kind of CPU rounds them differently.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import itemgetter
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.data.random_state import key
from samestep.errors import DataError

SAMPLES: Final = 3  # of a data set in one comparison
SHARE: Final = 300  # samples that a worker loads for each one that it compares
NEW_DATASETS: Final = 32  # compared at their first use; a script that makes more may make thousands
MAX_DATASETS: Final = 1024  # remembered
LOADS: Final = 16  # of a sample that differs, to find out whether it is the same in every load
PARTS: Final = 32  # of a sample, at most
FEW: Final = 8  # numbers in a list that are compared one by one
ELEMENTS: Final = 1 << 14  # of an array, at most
SHOWN: Final = 40  # characters of text that a message may show
TOLERANCE: Final = 1e-3  # of the norm; other values differ by about the norm

Digest: TypeAlias = str | list[Any]  # text, or [text, number, norm]
Sample: TypeAlias = dict[str, Digest] | None  # digests by part; None if it could not be loaded
Reload: TypeAlias = Callable[[int], list[list[Sample]]]
Gather: TypeAlias = Callable[[Any, str], list[Any]]

CAUSES: Final = (
    "All workers need the same samples in the same order. Usual causes: files listed without"
    " sorting (os.listdir, glob, iterdir); a shuffle or split that is drawn before ss.init; the"
    " order of a set, which differs between processes unless PYTHONHASHSEED is set; a condition on"
    " the rank; or other files on that host. Sort lists of files, write sorted(set(...)), and"
    " shuffle or split after ss.init"
)
PLAN_CAUSES: Final = (
    "All workers need the same options of run.batches. Usual causes: an order or weights drawn from"
    " a generator without a fixed seed, or taken from a set; a condition on the rank; or weights"
    " that processors of other kinds round differently. Compute them from sorted values and the"
    " epoch, or send those of rank 0 to all workers: weights = run.broadcast(weights)"
)


@dataclass(frozen=True)
class Use:
    """One use of a data set of `size` samples: which of them are compared, and when.

    They are compared at the start of the first use, and of each epoch or evaluation whose number is
    a multiple of `every` (0: never). `earlier` is the number of earlier uses.
    """

    where: str
    size: int
    seed: int
    every: int
    earlier: int = 0

    def is_due(self, number: int, *, at_start: bool = True) -> bool:
        """Return whether to compare now, at the start of the use or of a later epoch."""
        is_first = at_start and self.earlier == 0
        return self.every > 0 and (is_first or number % self.every == 0)

    def indices(self, number: int) -> list[int]:
        """Return the indices of the compared samples."""
        return sorted({key(self.seed, "compare", number, n) % self.size for n in range(SAMPLES)})


class DataCheck:
    """Compares the data sets of all workers; `gather` exchanges JSON between them.

    All workers load and compare at the same points of the program. One worker compares nothing.
    """

    def __init__(self, seed: int, rank: int, workers: int, gather: Gather) -> None:
        self._seed, self._rank, self._workers, self._gather = seed, rank, workers, gather
        self._uses: dict[int, tuple[Any, int]] = {}  # by id: a weak reference, and their number
        self._datasets = 0
        self._pending: dict[str, dict[str, Any]] = {}
        self._reloads: dict[str, Reload] = {}
        self._warned: set[str] = set()

    def begin(self, dataset: Any, size: int, where: str) -> Use:
        """Start and return a use of a data set; `where` describes it in errors."""
        if self._workers == 1:
            return Use(where, size, self._seed, every=0)
        reference, earlier = self._uses.get(id(dataset), (None, 0))
        if reference is not None and reference() is not dataset:  # its address was used again
            earlier = 0
        if len(self._uses) == MAX_DATASETS:
            self._uses.clear()
        self._uses[id(dataset)] = (_reference(dataset), earlier + 1)
        self._datasets += earlier == 0
        if earlier == 0 and self._datasets > NEW_DATASETS:
            earlier = self._datasets
        return Use(where, size, self._seed, -(-SHARE * SAMPLES * self._workers // size), earlier)

    def add(self, use: Use, number: int, samples: list[Sample], reload: Reload) -> None:
        """Send samples with the next exchange; `reload(n)` loads them n times again."""
        name = f"{use.where}, {number}"
        self._pending[name] = {
            "where": use.where,
            "size": use.size,
            "indices": use.indices(number),
            "samples": samples,
        }
        self._reloads[name] = reload

    def add_plan(self, use: Use, epoch: int, plan: Mapping[str, Any]) -> None:
        """Send the values that identify an epoch's plan with the next exchange."""
        if self._workers > 1:
            name = f"plan of {use.where}, {epoch}"
            values = {option: str(value) for option, value in plan.items()}
            self._pending[name] = {"where": f"{use.where} in epoch {epoch}", "plan": values}

    def note(self) -> dict[str, Any]:
        """Return the JSON to send to all workers and to pass to `compare_notes`."""
        return self._pending

    def compare(self, value: Any, what: str) -> list[Any]:
        """Return every worker's JSON value by rank, and compare what is pending."""
        notes, values = zip(*self._gather([self.note(), value], what), strict=True)
        self.compare_notes(notes)
        return list(values)

    def compare_notes(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Compare all workers' notes, by rank. Raises `DataError` on all workers."""
        reloads, self._pending, self._reloads = self._reloads, {}, {}
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
            # all workers find the same, so all of them reload
            if differs([entry["samples"] for entry in entries.values()]) is not None:
                own_entry = notes[self._rank].get(name)
                loads = [] if own_entry is None else [own_entry["samples"], *reloads[name](LOADS)]
                self._confirm(where, first["indices"], loads)

    def _compare_plans(self, where: str, plans: Mapping[int, Mapping[str, str]]) -> None:
        names = dict.fromkeys(name for plan in plans.values() for name in plan)
        differ = [name for name in names if len({plan.get(name) for plan in plans.values()}) > 1]
        if differ:
            values = {
                rank: ", ".join(f"{name}={plan.get(name)}" for name in differ)
                for rank, plan in plans.items()
            }
            self._raise(f"the plan of {where}", values, PLAN_CAUSES)

    def _confirm(self, where: str, indices: Sequence[int], loads: list[list[Sample]]) -> None:
        """Raise `DataError` if samples differ in parts that are the same in every load.

        Other parts are drawn from a generator that samestep does not seed.
        """
        own_samples = [_steady(sample_loads) for sample_loads in zip(*loads, strict=False)]
        gathered = self._gather(own_samples, "comparing samples")
        steady = {rank: samples for rank, samples in enumerate(gathered) if samples}
        difference = differs(list(steady.values()))
        if difference is not None:
            number, part = difference
            parts = {rank: samples[number] or {} for rank, samples in steady.items()}
            texts = {
                rank: _digest_text(sample[part]) for rank, sample in parts.items() if part in sample
            }
            self._raise(f"sample {indices[number]}{part} of the data set of {where}", texts)
        if where not in self._warned and self._rank == 0:
            logging.getLogger("samestep").warning(
                "samples of the data set of %s differ between two loads with the same "
                "seed, so results depend on the number of workers; draw from random, numpy.random "
                "or torch instead of your own generator, a clock or a process id",
                where,
            )
        self._warned.add(where)

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


def digest(sample: Any) -> dict[str, Digest]:
    """Return digests of a sample's parts, by their path in it, outer parts first.

    They contain what is the same on all workers, not addresses and folders.
    """
    digests: dict[str, Digest] = {}
    waiting = deque([("", sample)])
    while waiting and len(digests) < PARTS:
        path, value = waiting.popleft()
        inner = _parts(value)
        kind = type(value).__qualname__
        if inner is None:
            digests[path] = _digest(value, kind)
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


def _digest(value: Any, kind: str) -> Digest:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    # lists of numbers, arrays and scalars of NumPy, images of Pillow
    if isinstance(value, (list, tuple)) or hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        return _array(array, f"{array.dtype} {list(array.shape)}")
    if isinstance(value, float):
        return _number(np.array(value), kind)
    if isinstance(value, Enum):
        kind = f"{kind} {value.name}"
    elif isinstance(value, (str, os.PathLike)):
        kind = str(value).rpartition("/")[2]  # each host may have it in another folder
    elif isinstance(value, AbstractSet):
        kind = f"{kind} of {len(value)}"
    elif value is None or isinstance(value, (int, bytes)):
        kind = repr(value)
    return _text(kind)


def _tensor(tensor: torch.Tensor) -> Digest:
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return kind
    flat = _sampled(tensor.detach().reshape(-1)).cpu().resolve_conj().resolve_neg()
    return _array((flat.double() if flat.is_floating_point() else flat).numpy(), kind)


def _array(array: NDArray[Any], kind: str) -> Digest:
    """Return the digest of an array, only its dtype and shape if it does not hold numbers."""
    flat = _sampled(array.reshape(-1))
    if array.dtype.kind in "fc":
        return _number(np.stack([flat.real, flat.imag]) if array.dtype.kind == "c" else flat, kind)
    return f"{kind} {_hash(flat.tobytes())}" if array.dtype.kind in "biu" else kind


def _sampled(flat: Any) -> Any:
    return flat[:: max(1, -(-len(flat) // ELEMENTS))]


def _number(values: NDArray[Any], kind: str) -> Digest:
    """Return a weighted sum of floating-point values and its scale."""
    flat = np.nan_to_num(values.reshape(-1).astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    weights = np.resize(_weights(), flat.shape)
    return [kind, float(flat @ weights), float(np.linalg.norm(flat))]


@cache
def _weights() -> NDArray[np.float64]:
    return np.random.Generator(np.random.PCG64(0)).standard_normal(1021)


def _text(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… {_hash(text.encode(errors='replace'))}"


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _digest_text(value: Digest) -> str:
    return value if isinstance(value, str) else f"{value[0]} with a weighted sum of {value[1]:.6g}"


def _same(first: Digest, second: Digest) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    close = abs(first[1] - second[1]) <= TOLERANCE * max(first[2], second[2])
    return bool(first[0] == second[0] and close)


def _steady(loads: Sequence[Sample]) -> Sample:
    """Return the parts of a sample that are the same in every load."""
    first, *others = loads
    if first is None or None in others:
        return None
    return {
        part: value
        for part, value in first.items()
        if all(part in other and _same(value, other[part]) for other in others if other)
    }


def differs(workers: Sequence[Sequence[Sample]]) -> tuple[int, str] | None:
    """Return the number of the first sample in which workers differ, and the part."""
    for number, samples in enumerate(zip(*workers, strict=False)):
        loaded = [sample for sample in samples if sample is not None]
        for part in loaded[0] if loaded else ():
            values = [sample[part] for sample in loaded if part in sample]
            if not all(_same(values[0], value) for value in values):
                return number, part
    return None
