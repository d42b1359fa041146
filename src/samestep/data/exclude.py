"""Samples that training leaves out: their indices, in files and arrays, and in the option."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from samestep.data.plan import NONE, Indices, checked_array
from samestep.errors import ConfigError, DataError
from samestep.storage import write_atomically

Exclude = ArrayLike | str | os.PathLike[str] | Mapping[str, ArrayLike]
NAME: Final = "exclude.json"  # in the directory of a run
ONLY_LOOP: Final = ""  # the name of a run's only loop, whatever it is called
_NUMBER: Final = re.compile(r"\d{1,19}", re.ASCII)


def read_loops(path: Path) -> dict[str, Indices]:
    """Read the indices in a file by loop, `ONLY_LOOP` if it names none: sorted, without repeats.

    It has one number per line (`#` begins a comment), or is a .npy array or JSON: a list, or lists
    by loop. Raises `ConfigError` if it cannot be read, and `DataError` for anything but indices.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"exclude={path} cannot be read: {error.strerror}; pass a file with one index of a"
            " sample per line, a .npy array or a .json list"
        ) from error
    try:
        if path.suffix == ".npy":
            return {ONLY_LOOP: sorted_indices(np.load(io.BytesIO(content)), str(path))}
        if path.suffix == ".json":
            values = json.loads(content)
            loops = values if isinstance(values, dict) else {ONLY_LOOP: values}
            return {loop: sorted_indices(indices, str(path)) for loop, indices in loops.items()}
        lines = content.decode("utf-8-sig").splitlines()  # as Windows may write it
    except (EOFError, RecursionError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no {path.suffix or 'text'} file: {error}") from error
    numbers = list[int]()
    for count, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text and not (_NUMBER.fullmatch(text) and int(text) < 2**63):
            raise DataError(
                f"{path}, line {count}: expected the index of a sample, a whole number of at least"
                f" 0, got {text[:40]!r}"
            )
        numbers += [int(text)] if text else []
    return {ONLY_LOOP: sorted_indices(numbers, str(path))}


def sorted_indices(values: Any, name: str) -> Indices:
    """Return different indices of at least 0, sorted; raise `DataError` for anything else."""
    if isinstance(values, (set, frozenset)):
        values = list(values)
    is_empty = isinstance(values, (list, tuple, range)) and not values
    if is_empty or tuple(getattr(values, "shape", ())) == (0,):
        return NONE
    array = checked_array(values, name, "indices of samples", "iu")
    ordered = np.unique(array.astype(np.int64))
    if ordered[0] < 0:
        raise DataError(f"{name} must have indices of at least 0, got {ordered[0]}")
    return ordered


def indices_of(exclude: Exclude, size: int, sources: Mapping[str, int]) -> Indices:
    """Return the sorted indices of `exclude=` for a data set of `size` samples.

    A mixture has `sources`, with the size of each, by whose names a dict has their rows. Raises
    `ConfigError` and `DataError`.
    """
    if isinstance(exclude, (str, os.PathLike)):
        loops = read_loops(Path(exclude))
        if loops.keys() - {ONLY_LOOP}:
            raise ConfigError(
                f"exclude={exclude} has lists by loop, which only the option exclude of ss.init and"
                " samestep run takes; pass a list to run.batches"
            )
        return within(loops[ONLY_LOOP], size)
    if not isinstance(exclude, Mapping):
        return within(sorted_indices(exclude, "exclude"), size)
    parts, first = [NONE], 0
    if unknown := [name for name in exclude if name not in sources]:
        known = ", ".join(sources) or "none, because the data set is no mixture"
        raise ConfigError(f"exclude has no source {unknown[0]!r} to leave rows out of: {known}")
    for name, rows in sources.items():
        of_source = sorted_indices(exclude.get(name, ()), f"exclude[{name!r}]")
        parts.append(within(of_source, rows, f"exclude[{name!r}]") + first)
        first += rows
    return np.concatenate(parts)


def within(indices: Indices, size: int, name: str = "exclude") -> Indices:
    """Return sorted indices; raise `DataError` unless they are of a data set of `size` samples."""
    if len(indices) and indices[-1] >= size:
        raise DataError(
            f"{name} must have indices from 0 to {size - 1}, got {indices[-1]}; are they those of"
            " another data set?"
        )
    if len(indices) == size:
        raise DataError(f"{name} leaves out all {size} samples; leave out fewer")
    return indices


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the indices by loop that any of the parts has, as JSON."""
    loops: dict[str, set[int]] = {}
    for part in parts:
        for loop, indices in part.items():
            loops.setdefault(loop, set()).update(np.asarray(indices, dtype=np.int64).tolist())
    return {loop: sorted(numbers) for loop, numbers in loops.items()}


def write_loops(directory: Path, loops: Mapping[str, list[int]]) -> Path:
    """Write indices by loop to the file of a run's directory, and return its path."""
    path = directory / NAME
    write_atomically(path, json.dumps(loops).encode())
    return path


class Exclusion:
    """What the option `exclude` leaves out: sorted indices by loop."""

    def __init__(self, loops: Mapping[str, list[int]]) -> None:
        self._loops = {loop: np.asarray(indices, dtype=np.int64) for loop, indices in loops.items()}
        self._seen: set[str] = set()

    def of(self, loop: str, *, is_stream: bool = False) -> Indices:
        """Return the indices that a loop leaves out, when the script creates it.

        Raises `ConfigError` if that is unclear, because the run has several loops, or if the loop
        `is_stream`.
        """
        self._seen.add(loop)
        if len(self._seen) > 1 and ONLY_LOOP in self._loops:
            raise ConfigError(
                f"exclude does not say which of the loops {', '.join(sorted(self._seen))} leaves"
                f' out its samples; write a JSON file with lists by loop, as in {{"{loop}": [96]}}'
            )
        excluded = [self._loops[name] for name in (ONLY_LOOP, loop) if name in self._loops]
        if excluded and is_stream:
            raise ConfigError(
                f"exclude cannot leave out samples of the stream {loop!r}, whose items have no"
                " indices; skip them in make_stream"
            )
        return np.unique(np.concatenate([NONE, *excluded]))

    def state_dict(self) -> dict[str, Indices]:
        """Return the indices by loop, which snapshots keep."""
        return dict(self._loops)

    @property
    def unused(self) -> list[str]:
        """The names of loops that the script has not created."""
        return sorted(self._loops.keys() - self._seen - {ONLY_LOOP})
