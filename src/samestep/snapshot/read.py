"""The snapshots in a run's directory: find, check, load, export and remove them.

A snapshot is data, never code, and its content is used only after its checksums were verified.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from samestep.errors import SnapshotError
from samestep.snapshot.files import Destination, file_size, read_data_file
from samestep.snapshot.manifest import LARGEST_BYTES, NAME, Manifest
from samestep.snapshot.state import restore
from samestep.storage import atomic_path, sync

READ_ERRORS: Final = (LookupError, OSError, RuntimeError, SnapshotError, TypeError, ValueError)
_DIRECTORY: Final = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Snapshot:
    """A loaded snapshot. `state` maps objects by name to their states, with tensors on the CPU.

    If the snapshot was `in_memory`, `path` is only its name in messages and events.
    """

    path: Path
    step: int
    info: Mapping[str, Any]
    score: float | None
    state: dict[str, Any]
    in_memory: bool = False


def directory_name(step: int) -> str:
    """Return the name of a step's snapshot; names sort in the order of steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a snapshot directory, None for other names."""
    match = _DIRECTORY.fullmatch(path.name)
    return int(match[1]) if match and path.name == directory_name(int(match[1])) else None


def list_snapshots(directory: Path) -> list[Path]:
    """Return the paths that are named as snapshots, complete or not, in the order of steps."""
    return sort_snapshots(directory.glob("step-*"))


def sort_snapshots(paths: Iterable[Path]) -> list[Path]:
    """Return those of `paths` that are named as snapshots, in the order of steps."""
    steps = {path: step for path in paths if (step := step_of(path)) is not None}
    return sorted(steps, key=steps.__getitem__)


def inspect(path: Path) -> Manifest:
    """Return the manifest of a snapshot after checking that all files have their full size.

    Raises `SnapshotError` that names the snapshot and its fault.
    """
    with _faults_of(path):
        if (size := file_size(path / NAME)) > LARGEST_BYTES:
            raise SnapshotError(f"{NAME} must have at most {LARGEST_BYTES} bytes, got {size}")
        manifest = Manifest.from_bytes((path / NAME).read_bytes())
        manifest.check_sizes(lambda name: file_size(path / name))
    return manifest


def check(path: Path) -> Manifest:
    """Read every byte of a snapshot and return its manifest.

    Raises `SnapshotError` that names the snapshot and its fault.
    """
    manifest = inspect(path)
    with _faults_of(path):
        for file in manifest.files:
            read_data_file(path, file)
    return manifest


def fault(path: Path, examine: Callable[[Path], Manifest] = check) -> str | None:
    """Return the fault that `check` (or `inspect`) finds in a snapshot, None if it is complete."""
    try:
        examine(path)
    except SnapshotError as error:
        return str(error)
    return None


def find_newest(directory: Path, report: Callable[..., object]) -> Path | None:
    """Return the newest complete snapshot in a run's directory, None if there is none.

    Calls `report("snapshot_rejected", path=..., reason=...)` for each newer one with a fault.
    """
    for path in reversed(list_snapshots(directory)):
        if (reason := fault(path)) is None:
            return path
        report("snapshot_rejected", path=str(path), reason=reason)
    return None


def load(path: Path, objects: Collection[str] | None = None) -> Snapshot:
    """Check a snapshot, written by any number of workers, and load all or some of its objects.

    Tensors have the memory order (such as channels last) that they were saved with. Raises
    `SnapshotError` that names the snapshot and its fault.
    """
    manifest = inspect(path)
    with _faults_of(path):
        state = read_state(path, manifest, objects)
    return Snapshot(path, manifest.step, manifest.info, manifest.score, state)


def read_state(
    directory: Path, manifest: Manifest, objects: Collection[str] | None = None, first_byte: int = 0
) -> dict[str, Any]:
    """Return the state of all or some objects from data files that begin at `first_byte`.

    Checks every byte. Raises `SnapshotError` if one is damaged, and the errors of reading files.
    """
    pairs = manifest.state["dict"]
    present = [name for name, _ in pairs]
    if missing := [name for name in objects or () if name not in present]:
        raise SnapshotError(
            f"it has no {' and no '.join(missing)}; it has {', '.join(map(str, present))}"
        )
    memory: dict[str, torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        """Return a view, in the tensor's shape, of memory that is read in storage order later."""
        spec = manifest.specs[name]
        if name not in memory:
            memory[name] = torch.empty(spec.nbytes, dtype=torch.uint8)
        stored = memory[name].view(spec.dtype).view([spec.shape[dim] for dim in spec.order])
        return stored.permute([spec.order.index(dim) for dim in range(len(spec.order))])

    state: dict[str, Any] = restore(
        {"dict": [pair for pair in pairs if objects is None or pair[0] in objects]}, tensor
    )
    destinations: list[list[Destination]] = [[] for _ in manifest.files]
    for name, complete in memory.items():
        size, data = manifest.specs[name].dtype.itemsize, complete.numpy().data
        for piece in manifest.pieces[name]:
            target = data[piece.start * size : piece.stop * size]
            destinations[piece.file].append((piece.offset, target))
    for file, targets in zip(manifest.files, destinations, strict=True):
        read_data_file(directory, file, sorted(targets, key=itemgetter(0)), first_byte)
    return state


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn errors of reading a snapshot into a `SnapshotError` that names it."""
    try:
        yield
    except READ_ERRORS as error:
        if not path.is_dir():
            raise SnapshotError(f"there is no snapshot {path}") from error
        if not (path / NAME).exists():
            raise SnapshotError(f"snapshot {path} has no {NAME}: it was never committed") from error
        raise SnapshotError(f"snapshot {path}: {error}") from error


def export(snapshot: Path, destination: Path, name: str = "model") -> list[str]:
    """Write the tensors of object `name` to a plain safetensors file that other tools read.

    Tensors have their usual names, with nested names joined by dots, and their logical shapes; tied
    tensors appear under each name. An existing file is replaced in one step. Returns the names of
    values that are not tensors and were left out. Raises `SnapshotError` if the snapshot is not
    complete or has no such tensors, or if the file cannot be written.
    """
    loaded = load(snapshot, [name])
    leaves = list(_leaves(loaded.state[name], ""))
    what = f"{name!r} of snapshot {snapshot}"
    tensors = {key: value.contiguous() for key, value in leaves if isinstance(value, torch.Tensor)}
    if not tensors:
        raise SnapshotError(f"{what} has no tensors to export; choose another object")
    if len({key for key, _ in leaves}) < len(leaves):
        raise SnapshotError(
            f"{what} has two tensors with the same name once nested names are joined by dots"
        )
    metadata = {"format": "pt", "samestep.step": str(loaded.step), "samestep.object": name}
    try:
        with atomic_path(destination) as temporary:
            save_file(tensors, temporary, metadata)
    except (KeyError, OSError, SafetensorError, ValueError) as error:
        raise SnapshotError(f"cannot export {what} to {destination}: {error}") from error
    return [key for key, _ in leaves if key not in tensors]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


class Retention:
    """Removes old snapshots of a run's directory.

    The `keep_last` newest complete ones and the `keep_best` with the highest score stay.
    """

    def __init__(self, directory: Path, keep_last: int, keep_best: int) -> None:
        self._directory, self._keep_last, self._keep_best = directory, keep_last, keep_best
        self._checked: set[Path] = set()  # this process wrote them or verified their checksums

    def apply(self, written: Path) -> list[Path]:
        """Remove and return old snapshots now that `written` is committed.

        Ignores links, and steps after `written`, which belong to another history. Removes earlier
        directories without a manifest. A damaged snapshot does not count towards `keep_last` and
        `keep_best`, and is removed like a complete one of its age.
        """
        self._checked.add(written)
        paths = [path for path in list_snapshots(self._directory) if not path.is_symlink()]
        steps = {path: step_of(path) or 0 for path in paths}
        candidates = [path for path in reversed(steps) if steps[path] <= steps[written]]
        scores = {path: inspect(path).score for path in candidates if fault(path, inspect) is None}
        staying, horizon = choose(scores, self._keep_last, self._keep_best, self._is_complete)
        old = [path for path in candidates if path != written and path not in staying]
        removed = [path for path in old if steps[path] < horizon or not (path / NAME).exists()]
        for path in removed:
            remove(path)
        return removed

    def _is_complete(self, path: Path) -> bool:
        if path not in self._checked and fault(path) is None:
            self._checked.add(path)
        return path in self._checked


def choose(
    scores: Mapping[Path, float | None],
    keep_last: int,
    keep_best: int,
    is_complete: Callable[[Path], bool] = lambda _: True,
) -> tuple[set[Path], int]:
    """Return which snapshots stay, and the step before which all others may be removed.

    `scores` has the snapshots that seem complete; `is_complete` is called until enough are found.
    """
    steps = {path: step_of(path) or 0 for path in scores}
    scored = [
        (score, steps[path], path)
        for path, score in scores.items()
        if score is not None and not math.isnan(score)
    ]
    by_step = sorted(steps, key=steps.__getitem__, reverse=True)
    by_score = [path for _, _, path in sorted(scored, reverse=True)]
    newest = list(islice(filter(is_complete, by_step), keep_last))
    best = islice(filter(is_complete, by_score), keep_best)
    return {*newest, *best}, steps[newest[-1]] if len(newest) == keep_last else 0


def remove(path: Path) -> None:
    """Remove a snapshot, its manifest first: an incomplete one is never taken for complete."""
    (path / NAME).unlink(missing_ok=True)
    sync(path)
    shutil.rmtree(path)
