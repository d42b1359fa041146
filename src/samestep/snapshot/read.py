"""Find, check and load snapshots. What a snapshot says of itself is checked before it is believed: it is data, never code."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.snapshot import files
from samestep.snapshot.manifest import LARGEST_BYTES, NAME, DataFile, Manifest, TensorSpec
from samestep.snapshot.state import restore

Place = tuple[int, memoryview]  # from which byte of a file on, and where to

# threads: one copies and compares while the other waits for the disk or for new pages
READERS: Final = 2
_DIRECTORY: Final = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Snapshot:
    """A loaded snapshot, or hot copy: then `path` is but a name. `state` maps objects by name to their states, whole tensors on the CPU."""

    path: Path
    step: int
    info: Mapping[str, Any]
    score: float | None
    state: dict[str, Any]
    hot: bool = False


def directory_name(step: int) -> str:
    """Return the name of a step's snapshot: steps in order sort in order."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a snapshot directory, None for other names."""
    match = _DIRECTORY.fullmatch(path.name)
    return int(match[1]) if match and path.name == directory_name(int(match[1])) else None


def list_snapshots(directory: Path) -> list[Path]:
    """Return what is named as a snapshot in a run's directory, whole or not, in order of steps."""
    steps = {path: step for path in directory.glob("step-*") if (step := step_of(path)) is not None}
    return sorted(steps, key=lambda path: steps[path])


def inspect(path: Path) -> Manifest:
    """Return the manifest of a snapshot of which all files are there in full size.

    Raises `SnapshotError` that names the snapshot and what is wrong with it.
    """
    with _faults_of(path):
        if (size := files.file_size(path / NAME)) > LARGEST_BYTES:
            raise SnapshotError(f"{NAME} has {size} bytes; expected at most {LARGEST_BYTES}")
        manifest = Manifest.from_bytes((path / NAME).read_bytes())
        for file in manifest.files:
            if (size := files.file_size(path / file.name)) != file.size:
                raise SnapshotError(f"{file.name} has {size} bytes; expected {file.size}")
    return manifest


def check(path: Path) -> Manifest:
    """Read every byte of a snapshot and return its manifest.

    Raises `SnapshotError` that names the snapshot and what is wrong with it.
    """
    manifest = inspect(path)
    with _faults_of(path):
        for file in manifest.files:
            _read(path, file, [])
    return manifest


def fault(path: Path, examine: Callable[[Path], Manifest] = check) -> str | None:
    """Return what `check` (or `inspect`) finds wrong with a snapshot, None if it is whole."""
    try:
        examine(path)
    except SnapshotError as error:
        return str(error)
    return None


def find_newest(directory: Path, report: Callable[..., object]) -> Path | None:
    """Return the newest whole snapshot in a run's directory, None if there is none.

    Each newer one that is not whole is told by `report("snapshot_rejected", path=..., reason=...)`.
    """
    for path in reversed(list_snapshots(directory)):
        if (reason := fault(path)) is None:
            return path
        report("snapshot_rejected", path=str(path), reason=reason)
    return None


def load(path: Path, objects: Collection[str] | None = None) -> Snapshot:
    """Check a snapshot and load the state of all objects, or of those named. It may have been written by any number of workers.

    Tensors keep the memory order (such as channels last) they had. Raises `SnapshotError` that
    names the snapshot and what is wrong with it.
    """
    manifest = inspect(path)
    with _faults_of(path):
        return Snapshot(
            path, manifest.step, manifest.info, manifest.score, read_state(path, manifest, objects)
        )


def read_state(
    directory: Path, manifest: Manifest, objects: Collection[str] | None = None, first_byte: int = 0
) -> dict[str, Any]:
    """Return the state of all objects, or of those named, from the data files in a directory; each begins at `first_byte` there.

    Every byte is checked. Raises `SnapshotError` where one is damaged, and what reading files
    raises.
    """
    memory: dict[str, torch.Tensor] = {}
    state = _restored(manifest, objects, partial(_tensor, memory, manifest.forms))
    for file, places in zip(manifest.files, _places(manifest, memory), strict=True):
        _read(directory, file, places, first_byte)
    return state


def _restored(
    manifest: Manifest, objects: Collection[str] | None, tensor: Callable[[str], torch.Tensor]
) -> dict[str, Any]:
    pairs = manifest.state["dict"]
    held = [name for name, _ in pairs]
    if missing := [name for name in objects or () if name not in held]:
        raise SnapshotError(
            f"it holds no {' and no '.join(missing)}; it holds {', '.join(map(str, held))}"
        )
    state: dict[str, Any] = restore(
        {"dict": [pair for pair in pairs if objects is None or pair[0] in objects]}, tensor
    )
    return state


def _tensor(
    memory: dict[str, torch.Tensor], forms: Mapping[str, TensorSpec], name: str
) -> torch.Tensor:
    """Show memory, which is still to be filled in storage order, in a tensor's own shape."""
    form = forms[name]
    if name not in memory:
        memory[name] = torch.empty(form.extent.nbytes, dtype=torch.uint8)
    stored_shape = [form.shape[dim] for dim in form.order]
    return (
        memory[name]
        .view(form.dtype)
        .view(stored_shape)
        .permute([form.order.index(dim) for dim in range(len(form.order))])
    )


def _places(manifest: Manifest, memory: Mapping[str, torch.Tensor]) -> list[list[Place]]:
    """Return where the bytes of each data file go, in their order."""
    places: list[list[Place]] = [[] for _ in manifest.files]
    for name, whole in memory.items():
        size, data = manifest.forms[name].dtype.itemsize, whole.numpy().data
        for piece in manifest.pieces[name]:
            places[piece.file].append((piece.offset, data[piece.start * size : piece.stop * size]))
    return [sorted(found, key=_offset) for found in places]


def _read(path: Path, file: DataFile, places: Sequence[Place], first_byte: int = 0) -> None:
    """Read all of a data file, into `places` what belongs there, and compare checksums. Raises `SnapshotError` where they differ."""
    segments = list(file.segments())
    share = max(-(-len(segments) // READERS), 1)
    with ThreadPoolExecutor(READERS) as readers:
        shares = [segments[start : start + share] for start in range(0, len(segments), share)]
        list(readers.map(partial(_read_segments, path, file, places, first_byte), shares))


def _read_segments(
    path: Path,
    file: DataFile,
    places: Sequence[Place],
    first_byte: int,
    segments: Sequence[tuple[int, int, str]],
) -> None:
    spare = memoryview(bytearray(min(file.segment_bytes, file.size)))
    descriptor = os.open(path / file.name, os.O_RDONLY)
    try:
        for start, stop, expected in segments:
            if (
                files.read_into(descriptor, first_byte + start, _cover(start, stop, places, spare))
                != expected
            ):
                raise SnapshotError(
                    f"{file.name} is damaged: bytes {start} to {stop} do not have their checksum in {NAME}"
                )
    finally:
        os.close(descriptor)


def _cover(
    start: int, stop: int, places: Sequence[Place], spare: memoryview
) -> Iterator[memoryview]:
    """Yield where bytes [start, stop) of a file go: into places, and what lies between these into spare memory."""
    for index in range(max(bisect_right(places, start, key=_offset) - 1, 0), len(places)):
        offset, place = places[index]
        low, high = max(offset, start), min(offset + len(place), stop)
        if offset >= stop:
            break
        if low < high:
            if start < low:
                yield spare[: low - start]
            yield place[low - offset : high - offset]
            start = high
    if start < stop:
        yield spare[: stop - start]


def _offset(place: Place) -> int:
    return place[0]


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn whatever reading a snapshot may raise into a `SnapshotError` that names it."""
    try:
        yield
    except (LookupError, OSError, RuntimeError, SnapshotError, TypeError, ValueError) as error:
        if not path.is_dir():
            raise SnapshotError(f"there is no snapshot {path}") from error
        if not (path / NAME).exists():
            raise SnapshotError(f"snapshot {path} has no {NAME}: it was never finished") from error
        raise SnapshotError(f"snapshot {path}: {error}") from error
