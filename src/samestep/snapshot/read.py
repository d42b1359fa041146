"""Find, check and load snapshots. What a snapshot says of itself is checked before it is believed: it is data, never code."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from samestep.errors import SnapshotError
from samestep.snapshot import files
from samestep.snapshot.manifest import LARGEST_BYTES, NAME, Manifest, piece_key
from samestep.snapshot.state import restore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

_DIRECTORY = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Snapshot:
    """A loaded snapshot. `state` maps the name of each object to its state, with whole tensors on the CPU."""

    path: Path
    step: int
    info: Mapping[str, Any]
    score: float | None
    state: dict[str, Any]


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
            if files.sha256_of(path / file.name) != file.sha256:
                raise SnapshotError(f"{file.name} is damaged: its checksum is not the one in {NAME}")
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

    Tensors keep the memory order (such as channels last) they had. Raises `SnapshotError` that names the snapshot and
    what is wrong with it.
    """
    manifest = check(path)
    with _faults_of(path), ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path / file.name, framework="pt")) for file in manifest.files]
        state = _restored(manifest, objects, cache(lambda name: _assembled(name, manifest, opened)))
    return Snapshot(path, manifest.step, manifest.info, manifest.score, state)


def _restored(manifest: Manifest, objects: Collection[str] | None, tensor: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    pairs = manifest.state["dict"]
    held = [name for name, _ in pairs]
    if missing := [name for name in objects or () if name not in held]:
        raise SnapshotError(f"it holds no {' and no '.join(missing)}; it holds {', '.join(map(str, held))}")
    state: dict[str, Any] = restore({"dict": [pair for pair in pairs if objects is None or pair[0] in objects]}, tensor)
    return state


def _assembled(name: str, manifest: Manifest, opened: list[Any]) -> torch.Tensor:
    """Put the pieces of a tensor together in storage order, and show them in the tensor's own shape."""
    form = manifest.forms[name]
    size = form.dtype.itemsize
    memory = torch.empty(form.extent.nbytes, dtype=torch.uint8)
    for piece in manifest.pieces[name]:
        part = memory[piece.start * size : piece.stop * size]
        key = piece_key(name, piece.start, piece.stop)
        stored = opened[piece.file].get_tensor(key).reshape(-1).view(torch.uint8)
        if stored.shape != part.shape:
            raise SnapshotError(f"{key} has {stored.numel()} bytes in {manifest.files[piece.file].name}; expected {part.numel()}")
        part.copy_(stored)
    stored_shape = [form.shape[dim] for dim in form.order]
    return memory.view(form.dtype).view(stored_shape).permute([form.order.index(dim) for dim in range(len(form.order))])


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn whatever reading a snapshot may raise into a `SnapshotError` that names it."""
    try:
        yield
    except (LookupError, OSError, RuntimeError, SafetensorError, SnapshotError, TypeError, ValueError) as error:
        if not path.is_dir():
            raise SnapshotError(f"there is no snapshot {path}") from error
        if not (path / NAME).exists():
            raise SnapshotError(f"snapshot {path} has no {NAME}: it was never finished") from error
        raise SnapshotError(f"snapshot {path}: {error}") from error
