"""The snapshots in a run's directory: find, check, load, export and remove them.

A snapshot is data, never code, and its content is used only after its checksums were verified.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from samestep.comm.base import World
from samestep.comm.shared_memory import share_files
from samestep.errors import SnapshotError
from samestep.host import printable, total_bytes
from samestep.snapshot.dcp import write_dcp
from samestep.snapshot.files import (
    READING,
    Destination,
    Holders,
    Segment,
    buffers_of,
    checksum,
    damage,
    file_size,
    read_data_file,
    read_into,
    transfer,
)
from samestep.snapshot.manifest import LARGEST_BYTES, NAME, Manifest
from samestep.snapshot.state import restore
from samestep.storage import atomic_path, open_regular, read_regular, sync

Value = TypeVar("Value")

ALIGNMENT: Final = 64  # bytes: any dtype, and vectorized kernels
SMALL_BYTES: Final = 2**30  # every host has as much
READ_ERRORS: Final = (LookupError, OSError, RuntimeError, SnapshotError, TypeError, ValueError)
_DIRECTORY: Final = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Snapshot:
    """A loaded snapshot.

    Attributes:
        path (Path): Directory of the snapshot. One in memory has no directory, only this name.
        step (int): Number of completed steps.
        info (Mapping[str, Any]): What the run recorded about itself: `lanes`, `seed`, `workers`,
            `epoch`, `environment` (versions, threads and devices) and `run` (its `id`, `dir` and
            `script`); in `nonfinite` the names of tensors with infinities or NaNs, if there are
            any.
        score (float | None): The score that `run.snapshot` got.
        state (dict[str, Any]): What `load_state_dict` accepts, for each tracked object by the name
            that `run.track` got, and for the run itself as `run`. Tensors are on the CPU.
        in_memory (bool): Whether it was read from memory of the workers.
        shared (bool): Whether workers of this host share the memory of tensors. It is copied when a
            worker changes it, and stays while any worker has a tensor.
    """

    path: Path
    step: int
    info: Mapping[str, Any]
    score: float | None
    state: dict[str, Any]
    in_memory: bool = False
    shared: bool = False


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
        return _manifest(path)


def _manifest(path: Path) -> Manifest:
    # before reading a file that may be anything
    if (size := file_size(path / NAME)) > LARGEST_BYTES:
        raise SnapshotError(f"{NAME} must have at most {LARGEST_BYTES} bytes, got {size}")
    manifest = Manifest.from_bytes(read_regular(path / NAME, LARGEST_BYTES))
    # finds truncated files without reading them
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


def load(path: Path, objects: Collection[str] | None = None) -> Snapshot:
    """Check a snapshot, written by any number of workers, and load all or some of its objects.

    Tensors have the memory order (such as channels last) that they were saved with. Raises
    `SnapshotError` that names the snapshot and its fault.
    """
    manifest = inspect(path)
    with _faults_of(path):
        state = read_state(path, manifest, objects)
    return Snapshot(path, manifest.step, manifest.info, manifest.score, state)


def read_snapshot(
    directory: str | Path, step: int | None = None, objects: Collection[str] | None = None
) -> Snapshot:
    """Return a snapshot of a run without starting a run, after checking every byte of its files.

    Nothing is unpickled. The run may still be training.

    Args:
        directory: Directory of a run, or of one snapshot.
        step: Step of the snapshot; default: that of the run's newest complete snapshot.
        objects: Names of the tracked objects to load; default: all of them, and `run`.

    Returns:
        The snapshot, with the state of each object in `state`.

    Raises:
        SnapshotError: There is no such snapshot or object, or the snapshot is damaged.

    Example:
        >>> with ss.init(lanes=2, dir="runs/one") as run:
        ...     run.track(model=torch.nn.Linear(2, 1))
        ...     run.snapshot(score=0.5)
        >>> snapshot = ss.read_snapshot("runs/one", objects=["model"])
        >>> snapshot.step, snapshot.score, list(snapshot.state["model"])
        (0, 0.5, ['weight', 'bias'])
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise SnapshotError(f"expected the directory of a run or snapshot, got {directory}")
    if step_of(directory) is not None or (directory / NAME).exists():
        loaded = load(directory, objects)
    elif step is not None:
        loaded = load(directory / directory_name(step), objects)
    else:
        loaded = _load_newest(directory, objects)
    if step is not None and loaded.step != step:
        place = loaded.path
        raise SnapshotError(f"expected a snapshot of step {step}, got {place} of {loaded.step}")
    return loaded


def _load_newest(directory: Path, objects: Collection[str] | None) -> Snapshot:
    """Load the newest complete snapshot; a run that still trains may remove it meanwhile."""
    while True:
        paths = list_snapshots(directory)
        newest = next((path for path in reversed(paths) if fault(path, inspect) is None), None)
        if newest is not None:
            try:
                return load(newest, objects)
            except SnapshotError:
                if fault(newest, inspect) is None:  # it is still there
                    raise
        elif set(paths) >= set(list_snapshots(directory)):
            raise SnapshotError(f"{directory} has no complete snapshot")


def read_state(
    directory: Path, manifest: Manifest, objects: Collection[str] | None = None, first_byte: int = 0
) -> dict[str, Any]:
    """Return the state of all or some objects from data files that begin at `first_byte`.

    Checks every byte. Raises `SnapshotError` if one is damaged, and the errors of reading files.
    """
    _check_memory(manifest, objects)
    memory = StateMemory(manifest)
    # Views first, then their bytes: each is read into its place, without a copy. What was not asked
    # for has no memory, and is read only for its checksum.
    state: dict[str, Any] = restore({"dict": _objects(manifest, objects)}, memory.tensor)
    for file, targets in zip(manifest.files, memory.destinations(), strict=True):
        read_data_file(directory, file, targets, first_byte)
    return state


def _check_memory(manifest: Manifest, objects: Collection[str] | None = None) -> None:
    """Raise `SnapshotError` if this host cannot hold the tensors of all or some objects.

    Files with holes may declare terabytes, and would end the process when they are read.
    """
    needed = sum(
        spec.nbytes
        for name, spec in manifest.specs.items()
        if objects is None or name.partition("/")[0] in objects
    )
    if needed > SMALL_BYTES and (total := total_bytes()) is not None and needed > total:
        raise SnapshotError(
            f"its tensors take {needed} bytes, but this host has only {total} of memory and swap"
        )


def _objects(manifest: Manifest, objects: Collection[str] | None) -> list[Any]:
    """Return the names and plain states of all or some objects."""
    pairs: list[Any] = manifest.state["dict"]
    present = [name for name, _ in pairs]
    if missing := [name for name in objects or () if name not in present]:
        raise SnapshotError(
            f"it has no {' and no '.join(missing)}; it has {', '.join(map(str, present))}"
        )
    return [pair for pair in pairs if objects is None or pair[0] in objects]  # [name, plain state]


class StateMemory:
    """Memory for the tensors of a snapshot: one mapping per object, freed with its last tensor.

    With `use`, all workers of a host write to the same memory, and each sees it as its own: what it
    changes later is copied first, page by page.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.sizes: dict[str, int] = {}  # bytes by object
        self._offsets: dict[str, int] = {}  # by tensor
        for name, spec in manifest.specs.items():
            owner = name.partition("/")[0]
            # All workers of a host compute the same layout, so they can fill each other's memory.
            self._offsets[name] = start = -(-self.sizes.get(owner, 0) // ALIGNMENT) * ALIGNMENT
            self.sizes[owner] = start + spec.nbytes
        self._written: dict[str, mmap.mmap] = {}  # by object
        self._kept: dict[str, mmap.mmap] = {}  # the same bytes

    def use(self, files: Iterable[int]) -> None:
        """Use files that the workers of this host share, with the `sizes` of the objects."""
        for (owner, size), file in zip(self.sizes.items(), files, strict=True):
            if size:
                # MAP_SHARED: what is read reaches all workers
                self._written[owner] = mmap.mmap(file, size)
                self._kept[owner] = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE)  # copy on write

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view, in the tensor's shape, of memory that is read in storage order later."""
        spec, owner = self._manifest.specs[name], name.partition("/")[0]
        stored = torch.empty(0, dtype=torch.uint8)
        if spec.nbytes:
            if owner not in self._kept:  # this worker reads alone, or there is no shared memory
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                mapping = mmap.mmap(-1, self.sizes[owner], flags=flags)
                self._written[owner] = self._kept[owner] = mapping
            offset = self._offsets[name]
            # The tensor keeps the mapping alive. Its bytes arrive later, through `destinations`.
            stored = torch.frombuffer(
                self._kept[owner], dtype=torch.uint8, count=spec.nbytes, offset=offset
            )
        # slowest dim first
        stored = stored.view(spec.dtype).view([spec.shape[dim] for dim in spec.order])
        # in the logical order of dims
        return stored.permute([spec.order.index(dim) for dim in range(len(spec.order))])

    def destinations(self) -> list[list[Destination]]:
        """Return where the bytes of each data file go, for all objects that are in use."""
        # by data file
        places: list[list[Destination]] = [[] for _ in self._manifest.files]
        for name, pieces in self._manifest.pieces.items():
            memory = self._written.get(name.partition("/")[0])
            if memory is None:
                continue
            offset, size = self._offsets[name], self._manifest.specs[name].dtype.itemsize
            data = memoryview(memory)  # uint8 [bytes of the object]
            for piece in pieces:
                target = data[offset + piece.start * size : offset + piece.stop * size]
                places[piece.file].append((piece.offset, target))
        return [sorted(targets, key=itemgetter(0)) for targets in places]


@dataclass(frozen=True)
class SnapshotSource:
    """A snapshot of which this worker can read the data files with the indices `present`, or all.

    `identity` is equal on all workers that read the same snapshot.
    """

    manifest: Manifest
    directory: Path
    identity: str
    present: list[int] | None = None
    first_byte: int = 0


def load_together(path: Path, world: World) -> Snapshot:
    """Load a snapshot as `load` does, with every byte read once per host; collective.

    Raises the same `SnapshotError` on all workers, even if only one of them cannot read it.
    """

    def find() -> SnapshotSource:
        manifest = _manifest(path)
        _check_memory(manifest)
        return SnapshotSource(manifest, path, f"{manifest.attempt} {manifest.created}")

    manifest, state, shared = read_together(world, find, partial(_faults_of, path))
    return Snapshot(path, manifest.step, manifest.info, manifest.score, state, shared=shared)


def read_together(
    world: World,
    find: Callable[[], SnapshotSource],
    faults: Callable[[], AbstractContextManager[None]],
) -> tuple[Manifest, dict[str, Any], bool]:
    """Return a snapshot's manifest and state, and whether workers of this host share it.

    Collective. The workers of a host read disjoint parts into memory that they share; parts that no
    worker of a host can read are sent by one that can, to one worker of that host. A block in
    `faults()` raises all errors as `SnapshotError`. If any worker fails, all raise its error.
    """
    # Four phases: find, then allocate, read, and exchange what a host lacks. After a failure, a
    # worker does nothing but make the remaining collective calls, so that none of the others hangs.
    reading = _Reading(faults)
    source = reading.attempt(find)
    answer = [
        reading.fault,
        *([None, None] if source is None else [source.identity, source.present]),
    ]
    answers = world.all_gather_json(answer, READING)
    _raise_first(fault for fault, _, _ in answers)
    # Usually each host has a file system of its own at this path.
    if source is None or any(identity != source.identity for _, identity, _ in answers):
        raise SnapshotError("workers see different snapshots; use a directory that all hosts share")
    memory = StateMemory(source.manifest)
    # Where workers cannot share memory, each counts as a host of its own.
    with share_files(world, list(memory.sizes.values()), READING) as (hosts, files):
        holders = Holders([each for _, _, each in answers], hosts, len(source.manifest.files))
        state = reading.attempt(reading.begin, source, memory, files)
        host_ranks = next(host for host in hosts if world.rank in host)
        # from disk, or from this host's slots
        reading.attempt(reading.read, world.rank, host_ranks, holders)
        # of bounded size, and none if no host lacks anything
        for segments in holders.rounds(source.manifest.files):
            transfer(
                world,
                segments,
                holders,
                partial(reading.attempt, reading.send),
                partial(reading.attempt, reading.receive),
            )
        # Also a barrier: nobody may use shared memory before all parts are in it.
        _raise_first(world.all_gather_json(reading.fault, READING))
    return source.manifest, state or {}, bool(files)


class _Reading:
    """One worker's part of `read_together`.

    After a failure, it makes the same collective calls as the other workers, and nothing else.
    """

    def __init__(self, faults: Callable[[], AbstractContextManager[None]]) -> None:
        self.fault = ""
        self._faults = faults

    def attempt(self, call: Callable[..., Value], *args: Any) -> Value | None:
        """Return what `call` returned, None after a failure."""
        if not self.fault:
            try:
                with self._faults():
                    return call(*args)
            except SnapshotError as error:
                self.fault = str(error)
        return None

    def begin(
        self, source: SnapshotSource, memory: StateMemory, files: list[int]
    ) -> dict[str, Any]:
        """Return the state, in memory that is read later."""
        self._source = source
        if files:
            memory.use(files)  # before `restore`, which makes views of it
        state: dict[str, Any] = restore(source.manifest.state, memory.tensor)
        self._places = memory.destinations()
        return state

    def read(self, rank: int, host: list[int], holders: Holders) -> None:
        """Read this worker's part of each data file that workers of its host can read."""
        files = self._source.manifest.files
        for index, (file, targets) in enumerate(zip(files, self._places, strict=True)):
            readers = [reader for reader in host if holders.can_read(reader, index)]
            if rank in readers:
                # Rotated by file, so that with small files not all work falls to the first reader.
                part = (readers.index(rank) + index) % len(readers), len(readers)
                read_data_file(self._source.directory, file, targets, self._source.first_byte, part)

    def send(self, segment: Segment, data: memoryview) -> None:
        """Fill `data` with a segment; the receiver compares its checksum."""
        index, start, *_ = segment
        name = self._source.manifest.files[index].name
        descriptor = open_regular(self._source.directory / name, follows_links=True)
        with os.fdopen(descriptor, "rb") as opened:
            read_into(opened.fileno(), self._source.first_byte + start, [data])

    def receive(self, segment: Segment, data: memoryview) -> None:
        """Check and copy a segment."""
        index, start, stop, expected = segment
        if checksum(data) != expected:  # as sent, so this also finds a sender's bad memory
            raise damage(self._source.manifest.files[index].name, start, stop)
        # Bytes between destinations go to the spare buffer, so the targets take all of `data`.
        for target in buffers_of(start, stop, self._places[index], memoryview(bytearray(data))):
            target[:], data = data[: len(target)], data[len(target) :]


def _raise_first(faults: Iterable[str]) -> None:
    if fault := next(filter(None, faults), ""):
        raise SnapshotError(fault)


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turn errors of reading a snapshot into a `SnapshotError` that names it."""
    try:
        yield
    except READ_ERRORS as error:
        # The error that was raised may be about a file inside; these two explain more.
        if not path.is_dir():
            raise SnapshotError(f"there is no snapshot {path}") from error
        if not (path / NAME).exists():
            raise SnapshotError(f"snapshot {path} has no {NAME}: it was never committed") from error
        raise SnapshotError(printable(f"snapshot {path}: {error}")) from error


def export(
    snapshot: Path,
    destination: Path,
    name: str = "model",
    *,
    shard_bytes: int | None = None,
    dcp: bool = False,
) -> list[str]:
    """Write the tensors of object `name` in a format that other tools read.

    `destination` is one safetensors file, or with `shard_bytes` a directory of safetensors files of
    at most that size and their index, as Hugging Face libraries read them (one file without index
    if one is enough; a tensor is never split), or with `dcp` a directory for
    torch.distributed.checkpoint, with the state dict `{name: {tensor's name: tensor}}`.

    Tensors have their usual names, with nested names joined by dots, and their logical shapes; tied
    tensors appear under each name. The same state gives the same bytes. A destination appears in
    one step: a file is replaced, and a directory must be new or empty. Takes memory for one file,
    or with `dcp` for a few tensors, and checks the bytes that it reads. Returns the names of values
    that are not tensors and were left out. Raises `SnapshotError` if the snapshot is damaged or has
    no such tensors, or if the destination cannot be written.
    """
    manifest = inspect(snapshot)
    with _faults_of(snapshot):
        state = restore(
            {"dict": _objects(manifest, [name])},
            lambda stored: _Unread(stored, manifest.specs[stored].nbytes),
        )
    leaves = list(_leaves(state[name], ""))  # (dotted name, tensor or value)
    what = f"{name!r} of snapshot {snapshot}"
    unread = {key: value for key, value in leaves if isinstance(value, _Unread)}
    if not unread:
        raise SnapshotError(f"{what} has no tensors to export; choose another object")
    if len({key for key, _ in leaves}) < len(leaves):
        raise SnapshotError(
            f"{what} has two tensors with the same name once nested names are joined by dots"
        )
    metadata = {"format": "pt", "samestep.step": str(manifest.step), "samestep.object": name}

    def write(path: Path, keys: Iterable[str]) -> None:
        names = {key: unread[key].name for key in keys}  # only this file's tensors are in memory
        write_tensors(path, _read_tensors(snapshot, manifest, names), metadata)
        _sort_header(path)

    try:
        if dcp:
            with _new_directory(destination) as folder:
                # planned from shapes, then read one by one
                specs = {key: manifest.specs[tensor.name] for key, tensor in unread.items()}
                write_dcp(
                    folder,
                    {
                        name: {
                            key: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
                            for key, spec in specs.items()
                        }
                    },
                    lambda key: _read_tensors(snapshot, manifest, {key: unread[key].name})[key],
                )
        elif shard_bytes is not None:
            with _new_directory(destination) as folder:
                _write_shards(
                    folder,
                    {key: tensor.nbytes for key, tensor in unread.items()},
                    shard_bytes,
                    write,
                )
        else:
            with atomic_path(destination) as temporary:
                write(temporary, unread)
    except (KeyError, OSError, SafetensorError, ValueError) as error:
        reason = f"safetensors does not know {error}" if isinstance(error, KeyError) else error
        raise SnapshotError(f"cannot export {what} to {destination}: {reason}") from error
    return [key for key, _ in leaves if key not in unread]


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the mode of any new file; its library makes it private."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata)
    path.chmod(mode)


@dataclass(frozen=True)
class _Unread:
    """Stands for the tensor `name` of a snapshot in a state that is restored without reading."""

    name: str
    nbytes: int

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return memory for an array, which is not exported."""
        return np.empty(self.nbytes, np.uint8)


def _read_tensors(
    snapshot: Path, manifest: Manifest, names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Read and check tensors, whose names in the manifest are the values of `names`."""
    stored = names.values()
    memory = StateMemory(
        replace(
            manifest,
            specs={stored_name: manifest.specs[stored_name] for stored_name in stored},
            pieces={stored_name: manifest.pieces[stored_name] for stored_name in stored},
        )
    )
    tensors = {key: memory.tensor(stored_name) for key, stored_name in names.items()}
    with _faults_of(snapshot):
        for file, targets in zip(manifest.files, memory.destinations(), strict=True):
            if targets:
                read_data_file(snapshot, file, targets, only_destinations=True)
    # other formats have no memory order
    return {key: tensor.contiguous() for key, tensor in tensors.items()}


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill, which then becomes `path`, a new or an empty directory."""
    if path.exists() and any(path.iterdir()):
        raise FileExistsError("the directory is not empty; choose a new one, or remove its files")
    with atomic_path(path) as temporary:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():  # `atomic_path` syncs only the directory
            sync(file)


def _write_shards(
    folder: Path,
    sizes: Mapping[str, int],
    shard_bytes: int,
    write: Callable[[Path, Iterable[str]], None],
) -> None:
    """Write tensors, in their order, to files of at most `shard_bytes`, and the index of the files.

    Source: https://huggingface.co/docs/safetensors/en/metadata_parsing
    """
    shards: list[list[str]] = []
    room = -1
    for key, nbytes in sizes.items():
        if nbytes > room:  # a tensor larger than a shard has its own
            shards.append([])
            room = shard_bytes
        shards[-1].append(key)
        room -= nbytes
    if len(shards) == 1:
        write(folder / "model.safetensors", shards[0])
        return
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(folder / file, shard)
        files |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
    text = json.dumps(index, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, "utf-8")


def _sort_header(path: Path) -> None:
    """Sort the metadata of a safetensors file, which its library writes in random order.

    The header's size, in the first 8 bytes, stays the same: it is compact JSON, padded by spaces.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        tensors = sorted(
            header.items(), key=lambda item: (item[1].get("data_offsets", []), item[0])
        )
        header = dict(tensors) | {"__metadata__": dict(sorted(header["__metadata__"].items()))}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        file.seek(8)
        file.write(text.ljust(size))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def remove(path: Path) -> None:
    """Remove a snapshot, its manifest first: an incomplete one is never taken for complete."""
    if path.is_symlink():  # what it leads to stays
        path.unlink()
        return
    (path / NAME).unlink(missing_ok=True)  # from here on, it is no snapshot
    sync(path)
    shutil.rmtree(path)  # may be interrupted anywhere
