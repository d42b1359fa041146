"""Snapshots in a remote storage, with the same files as in a run's directory.

The manifest is written last and removed first. A file is uploaded unless one with its name and size
exists: every save of every attempt has other names of data files, and an object store holds a file
either completely or not at all. The checksums in the manifest detect later damage.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from samestep.errors import SnapshotError
from samestep.host import printable
from samestep.snapshot.files import DataFile, checksum, damage, write_at
from samestep.snapshot.manifest import LARGEST_BYTES, NAME, Manifest
from samestep.snapshot.read import check, inspect, remove, sort_snapshots
from samestep.storage import (
    RETRIES,
    Retries,
    Storage,
    StorageError,
    make_folder,
    open_regular,
    read_regular,
    sync,
    write_atomically,
)

_READERS: Final = 4
_LARGEST_BYTES: Final = 2**16  # of the file below
# in a run's directory, until remote snapshots of another history are set aside
_SUPERSEDED: Final = ".superseded.json"


class RemoteDirectory:
    """The snapshots below a URL, by name. Raises `StorageError` if the storage fails."""

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        self.storage = Storage(url, retries)
        self.url = self.storage.url

    def names(self) -> list[str]:
        """Return the names of snapshots, complete or not, in the order of steps."""
        return [path.name for path in sort_snapshots(map(Path, self.storage.folders()))]

    def inspect(self, name: str) -> Manifest:
        """Return the manifest of a snapshot after checking that all files have their full size.

        Raises `SnapshotError` that names the snapshot and its fault.
        """
        sizes = self.storage.sizes(name)
        try:
            # One listing gives the sizes of all files; only the manifest is downloaded.
            manifest = Manifest.from_bytes(self._manifest_bytes(name, sizes))
            manifest.check_sizes(sizes.get)
        except StorageError:  # it says nothing about the snapshot
            raise
        except SnapshotError as error:
            raise SnapshotError(printable(f"snapshot {self.url}/{name}: {error}")) from error
        return manifest

    def has_manifest(self, name: str) -> bool:
        """Return whether a snapshot was ever committed."""
        return NAME in self.storage.sizes(name)

    def _manifest_bytes(self, name: str, sizes: Mapping[str, int]) -> bytes:
        size = sizes.get(NAME)
        if size is None:
            fault = f"it has no {NAME}: it was never committed" if sizes else "there is none"
            raise SnapshotError(fault)
        if size > LARGEST_BYTES:
            raise SnapshotError(f"{NAME} must have at most {LARGEST_BYTES} bytes, got {size}")
        return self.storage.read(f"{name}/{NAME}", 0, size)

    def send(self, path: Path) -> int:
        """Upload a local snapshot, replacing another one of its step; return the bytes sent.

        The caller has checked its bytes. Raises `SnapshotError` if one of its files is missing.
        """
        manifest, sent = inspect(path), 0
        sizes = self.storage.sizes(path.name)
        for file in manifest.files:
            # an interrupted upload continues with the missing files
            if sizes.get(file.name) != file.size:
                self.storage.send(path / file.name, f"{path.name}/{file.name}")
                sent += file.size
        data = manifest.to_bytes()
        # All data is there, so the manifest may follow. It replaces that of an earlier save of this
        # step at once: until then, that one is complete.
        if sizes.get(NAME) != len(data) or self._manifest_bytes(path.name, sizes) != data:
            put = self.storage.write if NAME in sizes else self.storage.create
            put(f"{path.name}/{NAME}", data)
            sent += len(data)
        # left by an earlier save of this step
        for name in sizes.keys() - {NAME, *(file.name for file in manifest.files)}:
            self.storage.remove(f"{path.name}/{name}")
        return sent

    def remove(self, name: str) -> None:
        """Remove a snapshot, its manifest first: an incomplete one is never taken for complete."""
        self.storage.remove(f"{name}/{NAME}")
        self.storage.remove(name, folder=True)

    def set_aside(self, name: str, folder: str) -> None:
        """Move a snapshot to a folder next to the others."""
        # the manifest last
        for file in sorted(self.storage.sizes(name), key=lambda file: file == NAME):
            self.storage.copy(f"{name}/{file}", f"{folder}/{name}/{file}")
        self.remove(name)

    def fetch(self, name: str, directory: Path) -> Path:
        """Download a snapshot into a run's directory and return its path there.

        The path appears once the snapshot is complete. Segments from an earlier try and complete
        snapshots are not downloaded again. If several workers of a host call this, one of them
        downloads. Raises `SnapshotError` if the remote snapshot is not complete, or if the
        directory has another one of its step, and `StorageError` if the download fails.
        """
        manifest = self.inspect(name)
        final, partial_path = directory / name, directory / f".{name}.fetched"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory):  # the others wait here, and then find a complete copy
                if _is_local(final, manifest):
                    return final
                # A hidden directory keeps what was downloaded if the process is killed. Its final
                # name appears only with all files in place.
                self._fetch_files(name, manifest, partial_path)
                if final.exists():
                    remove(final)
                partial_path.rename(final)
                sync(directory)
        except OSError as error:
            raise StorageError(
                f"cannot download snapshot {self.url}/{name} to {directory}: {error}"
            ) from error
        return final

    def _fetch_files(self, name: str, manifest: Manifest, directory: Path) -> None:
        make_folder(directory)
        for path in set(directory.iterdir()) - {directory / file.name for file in manifest.files}:
            path.unlink()  # from a remote snapshot that was replaced
        for file in manifest.files:
            # all data before the manifest
            self._fetch_file(f"{name}/{file.name}", file, directory / file.name)
        write_atomically(directory / NAME, manifest.to_bytes())
        sync(directory)

    def _fetch_file(self, path: str, file: DataFile, destination: Path) -> None:
        descriptor = open_regular(destination, os.O_RDWR | os.O_CREAT)
        present = os.fstat(descriptor).st_size  # bytes that an earlier try may have downloaded

        def fetch(segment: tuple[int, int, str]) -> None:
            start, stop, expected = segment
            if stop <= present and checksum(os.pread(descriptor, stop - start, start)) == expected:
                return
            data = self.storage.read(path, start, stop)
            if checksum(data) != expected:
                raise damage(f"{self.url}/{path}", start, stop)
            write_at(descriptor, data, start)

        try:
            os.ftruncate(descriptor, file.size)
            with ThreadPoolExecutor(_READERS if self.storage.is_concurrent else 1) as readers:
                list(readers.map(fetch, file.segments()))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def superseded(directory: Path, url: str) -> tuple[int, str] | None:
    """Return the step after which snapshots at a URL belong to another history, and their folder.

    None if none are left to be moved there.
    """
    with suppress(OSError, ValueError, TypeError, RecursionError):
        remote, step, folder = json.loads(read_regular(directory / _SUPERSEDED, _LARGEST_BYTES))
        return (int(step), str(folder)) if remote == url else None
    return None


def set_superseded(directory: Path, url: str, step: int, folder: str) -> None:
    """Remember this until `forget_superseded`, even if the process is killed."""
    write_atomically(directory / _SUPERSEDED, json.dumps([url, step, folder]).encode())


def forget_superseded(directory: Path) -> None:
    """Note that they were set aside."""
    (directory / _SUPERSEDED).unlink(missing_ok=True)


def _is_local(path: Path, manifest: Manifest) -> bool:
    """Return whether a complete snapshot is local. Raises `SnapshotError` if it is another one."""
    try:
        attempt = check(path).attempt
    except SnapshotError:
        return False
    if attempt != manifest.attempt:
        raise SnapshotError(
            f"{path} is another snapshot of this step; use an empty dir, or resume from that one"
        )
    return True


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Admit one worker of this host at a time, or all if the file system has no locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # released when it is closed
        yield
    finally:
        os.close(descriptor)
