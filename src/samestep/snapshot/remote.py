"""Snapshots in a remote storage: the same files as in a run's directory, and as there the manifest comes last and goes first.

A file is sent unless one of its name and size is there: names of data files are of one save of one
attempt, and object stores hold a file whole or not at all. What a storage damages later is found by
the manifest's checksums when it is read.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from samestep.errors import SnapshotError
from samestep.snapshot.files import checksum, sync, write_whole
from samestep.snapshot.manifest import LARGEST_BYTES, NAME, DataFile, Manifest
from samestep.snapshot.read import check, fault, inspect, step_of
from samestep.snapshot.retention import remove
from samestep.storage import RETRIES, Retries, Storage, StorageError

_READERS: Final = 4


class Remote:
    """The snapshots below a URL, by name. Raises `StorageError` where the storage does not answer or refuses."""

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        self.storage = Storage(url, retries)
        self.url = self.storage.url

    def names(self) -> list[str]:
        """Return what is named as a snapshot, whole or not, in order of steps."""
        steps = {
            name: step
            for name in self.storage.folders()
            if (step := step_of(Path(name))) is not None
        }
        return sorted(steps, key=lambda name: steps[name])

    def inspect(self, name: str) -> Manifest:
        """Return the manifest of a snapshot of which all files are there in full size.

        Raises `SnapshotError` that names the snapshot and what is wrong with it.
        """
        sizes = self.storage.sizes(name)
        try:
            return self._inspect(name, sizes)
        except StorageError:
            raise
        except SnapshotError as error:
            raise SnapshotError(f"snapshot {self.url}/{name}: {error}") from error

    def _inspect(self, name: str, sizes: Mapping[str, int]) -> Manifest:
        manifest = Manifest.from_bytes(self._manifest_bytes(name, sizes))
        for file in manifest.files:
            if sizes.get(file.name) != file.size:
                raise SnapshotError(
                    f"{file.name} has {sizes.get(file.name, 'no')} bytes; expected {file.size}"
                )
        return manifest

    def has_manifest(self, name: str) -> bool:
        """Tell whether a snapshot was ever finished."""
        return NAME in self.storage.sizes(name)

    def _manifest_bytes(self, name: str, sizes: Mapping[str, int]) -> bytes:
        size = sizes.get(NAME)
        if size is None:
            raise SnapshotError(
                f"it has no {NAME}: it was never finished" if sizes else "there is none"
            )
        if size > LARGEST_BYTES:
            raise SnapshotError(f"{NAME} has {size} bytes; expected at most {LARGEST_BYTES}")
        return self.storage.read(f"{name}/{NAME}", 0, size)

    def send(self, path: Path) -> int:
        """Make the remote hold a local snapshot, in place of another of its step; return the bytes that had to be sent.

        Its bytes were checked before. Raises `SnapshotError` where a file of it is missing.
        """
        manifest, sent = inspect(path), 0
        there = self.storage.sizes(path.name)
        for file in manifest.files:
            if there.get(file.name) != file.size:
                self.storage.send(path / file.name, f"{path.name}/{file.name}")
                sent += file.size
        data = manifest.to_bytes()
        if (
            NAME not in there
            or there[NAME] != len(data)
            or self._manifest_bytes(path.name, there) != data
        ):
            if NAME in there:
                self.storage.remove(f"{path.name}/{NAME}")
            self.storage.create(f"{path.name}/{NAME}", data)
            sent += len(data)
        for name in there.keys() - {NAME, *(file.name for file in manifest.files)}:
            self.storage.remove(f"{path.name}/{name}")
        return sent

    def remove(self, name: str) -> None:
        """Remove a snapshot. Its manifest goes first, so that it is never taken for whole."""
        self.storage.remove(f"{name}/{NAME}")
        self.storage.remove(name, folder=True)

    def set_aside(self, name: str, folder: str) -> None:
        """Move a snapshot to a folder beside the others."""
        for file in sorted(self.storage.sizes(name), key=lambda file: file == NAME):
            self.storage.copy(f"{name}/{file}", f"{folder}/{name}/{file}")
        self.remove(name)

    def fetch(self, name: str, directory: Path) -> Path:
        """Download a snapshot into a run's directory and return its path there, where it appears whole.

        What an earlier try brought is kept, and a whole one is not downloaded again. Workers of one
        host may all ask: one of them downloads. Raises `SnapshotError` where it is not whole there,
        or another one of its step is here, and `StorageError` where it cannot be had.
        """
        manifest = self.inspect(name)
        final, unfinished = directory / name, directory / f".{name}.fetched"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory):
                if _is_here(final, manifest):
                    return final
                self._fetch_files(name, manifest, unfinished)
                if final.exists():
                    remove(final)
                unfinished.rename(final)
                sync(directory)
        except OSError as error:
            raise StorageError(
                f"snapshot {self.url}/{name} could not be downloaded to {directory}: {error}"
            ) from error
        return final

    def _fetch_files(self, name: str, manifest: Manifest, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        for path in set(directory.iterdir()) - {directory / file.name for file in manifest.files}:
            path.unlink()  # of a snapshot that was replaced there
        for file in manifest.files:
            self._fetch_file(f"{name}/{file.name}", file, directory / file.name)
        write_whole(directory / NAME, manifest.to_bytes())
        sync(directory)

    def _fetch_file(self, path: str, file: DataFile, destination: Path) -> None:
        descriptor = os.open(destination, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            here = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, file.size)
            with ThreadPoolExecutor(_READERS if self.storage.is_concurrent else 1) as readers:
                list(
                    readers.map(
                        partial(self._fetch_segment, path, descriptor, here), file.segments()
                    )
                )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _fetch_segment(
        self, path: str, descriptor: int, here: int, segment: tuple[int, int, str]
    ) -> None:
        """Download a segment unless it is among the first `here` bytes, which an earlier try left."""
        start, stop, expected = segment
        if stop <= here and checksum(os.pread(descriptor, stop - start, start)) == expected:
            return
        data = self.storage.read(path, start, stop)
        if checksum(data) != expected:
            raise SnapshotError(
                f"{self.url}/{path} is damaged: bytes {start} to {stop} do not have their checksum in {NAME}"
            )
        while data:
            written = os.pwrite(descriptor, data, start)
            data, start = data[written:], start + written


def _is_here(path: Path, manifest: Manifest) -> bool:
    """Tell whether a whole snapshot is here. Raises `SnapshotError` where it is another one."""
    if not path.exists() or fault(path) is not None:
        return False
    if check(path).attempt != manifest.attempt:
        raise SnapshotError(
            f"{path} is another snapshot of this step; give an empty dir, or resume from that one"
        )
    return True


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one worker of this host after the other pass. Where the file system cannot, all pass, and bring the same bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
