"""Data sets in shards: files of many samples each, perhaps in a remote storage."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from torch.utils.data import Dataset

from samestep.data.batch import PackedList
from samestep.data.orders import ShardOrder
from samestep.data.plan import check_positive
from samestep.errors import ConfigError, DataError
from samestep.storage import Storage, StorageError, sync

DOWNLOADS: Final = 8  # at a time, for one lane batch
CHUNK_BYTES: Final = 16 * 2**20  # of a download; in memory
ROOM_SECONDS: Final = 0.01  # between attempts to make room while others lock the copies
_NOTE: Final = re.compile(rb"(\d+) ([0-9a-f]{16})")


class ShardedDataset(Dataset[Any]):
    """A map-style data set in shards, which are copied into a local cache when they are needed.

    All workers and loader processes of a host share the cache: a shard is downloaded once, and the
    least recently used ones are removed. Use it with `order=ShardOrder(dataset.sizes)`, since an
    order over all samples would need every shard in every step.

    Args:
        shards: Number of samples of each shard, by its URL for fsspec or its local path. Local
            paths are read where they are.
        read: Opens a local file and returns its samples as a sequence, which may read them when
            they are used. It gets a `pathlib.Path` that ends with the shard's name. The file may be
            removed once it has returned, so it must open or load it. If the sequence has `close`,
            that is called when it is no longer used.
        cache_dir: A folder on a disk of this host; needed for URLs.
        max_bytes: Largest size of the cache, which may exceed it by one shard.
        max_open: Number of sequences that each process keeps.

    Raises:
        ConfigError: An argument is unusable, or fsspec or a package for a URL is missing.
        DataError: `shards` is not a mapping to numbers of samples; on access, a shard cannot be
            fetched or read, has another number of samples, or has changed since it was first
            fetched into this cache.

    Example:
        >>> lines = lambda path: path.read_text().splitlines()
        >>> dataset = ss.ShardedDataset({"a.txt": 3, "b.txt": 2}, lines)
        >>> len(dataset), dataset.sizes.tolist()
        (5, [3, 2])
    """

    def __init__(
        self,
        shards: Mapping[str, int] | Mapping[Path, int],
        read: Callable[[Path], Sequence[Any]],
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        max_bytes: int = 10 * 2**30,
        max_open: int = 64,
    ) -> None:
        if not isinstance(shards, Mapping):
            raise DataError(
                "shards must be a dict of the number of samples by URL or path, got"
                f" {type(shards).__name__}"
            )
        check_positive("max_bytes", max_bytes)
        check_positive("max_open", max_open)
        self._names = PackedList(os.fspath(name) for name in shards)
        if cache_dir is None and (url := next(filter(_is_url, self._names), None)):
            raise ConfigError(f"{url} needs cache_dir, a local folder for copies of shards")
        self.sizes = ShardOrder(list(shards.values())).sizes
        self._ends = np.cumsum(self.sizes)
        self._read, self._max_open = read, max_open
        self._cache = None if cache_dir is None else ShardCache(Path(cache_dir), max_bytes)
        self._opened: OrderedDict[int, Sequence[Any]] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]
        shard = int(np.searchsorted(self._ends, index, side="right"))
        samples, number = self._samples(shard), index - int(self._ends[shard] - self.sizes[shard])
        try:
            return samples[number]
        except Exception as error:
            raise DataError(
                f"cannot read sample {number} of shard {self._names[shard]}:"
                f" {type(error).__name__}: {error}"
            ) from error

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices`, after fetching their shards at the same time."""
        shards = np.unique(np.searchsorted(self._ends, indices, side="right")).tolist()
        opened = self._opened_here()
        names = [self._names[shard] for shard in shards if shard not in opened]
        missing = [name for name in names if _is_url(name)]
        if self._cache and len(missing) > 1:
            with ThreadPoolExecutor(DOWNLOADS) as pool:
                list(pool.map(self._cache.fetch, missing))
        return [self[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": OrderedDict()}

    def _samples(self, shard: int) -> Sequence[Any]:
        opened = self._opened_here()
        if shard in opened:
            opened.move_to_end(shard)
            return opened[shard]
        name = self._names[shard]
        if self._cache and _is_url(name):
            with self._cache.file(name) as path:
                samples = self._checked(shard, path)
        else:
            samples = self._checked(shard, Path(name))
        opened[shard] = samples
        if len(opened) > self._max_open:
            _close(opened.popitem(last=False)[1])
        return samples

    def _opened_here(self) -> OrderedDict[int, Sequence[Any]]:
        if self._process != os.getpid():  # a forked process shares the positions in open files
            opened, self._opened, self._process = self._opened, OrderedDict(), os.getpid()
            for samples in opened.values():
                _close(samples)
        return self._opened

    def _checked(self, shard: int, path: Path) -> Sequence[Any]:
        name, size = self._names[shard], int(self.sizes[shard])
        try:
            samples = self._read(path)
            sample_count = len(samples)
        except Exception as error:
            raise DataError(
                f"cannot read shard {name}: {type(error).__name__}: {error}; check that it is"
                " complete and in the format that read expects"
            ) from error
        if sample_count != size:
            _close(samples)
            raise DataError(
                f"shard {name} has {sample_count} samples, expected {size}; it is truncated or was"
                " replaced: write it again, or pass its new number of samples"
            )
        return samples


class ShardCache:
    """Copies of files in a storage, in a folder that the processes of a host share.

    `locks/NAME` is locked by who downloads (exclusively) or opens (shared) the copy NAME. It also
    holds the size and checksum of the first download, so that later ones can be compared. The lock
    `room` is held while copies are removed and the space for NAME.tmp is reserved.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._storages: dict[tuple[int, str], Storage] = {}

    def fetch(self, url: str) -> None:
        """Download a shard unless the cache has it."""
        with self.file(url):
            pass

    @contextmanager
    def file(self, url: str) -> Iterator[Path]:
        """Yield the path of a shard's copy, which is not removed within the block."""
        name = f"{xxhash.xxh3_64_hexdigest(url.encode())}-{url.rpartition('/')[2]}"
        path = self._directory / name
        with self._lock(f"locks/{name}", fcntl.LOCK_SH) as lock:
            while not _is_complete(path, lock):
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_complete(path, lock):
                    self._download(url, path, lock)
                fcntl.flock(lock, fcntl.LOCK_SH)  # others may remove it before this returns
            os.utime(path, ns=(time.time_ns(),) * 2)  # the kernel's own time is coarse
            yield path

    def _download(self, url: str, path: Path, lock: int) -> None:
        folder, _, name = url.rpartition("/")
        # connections do not survive a fork
        storage = self._storages.setdefault((os.getpid(), folder), Storage(folder))
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            size = storage.size(name)
            if size is None:
                raise DataError(f"shard {url} is missing; check its URL")
            for leftover in (temporary, path):
                leftover.unlink(missing_ok=True)
            with self._room(size, temporary):
                checksum = xxhash.xxh3_64()
                with temporary.open("r+b") as file:
                    for start in range(0, size, CHUNK_BYTES):
                        data = storage.read(name, start, min(start + CHUNK_BYTES, size))
                        checksum.update(data)
                        file.write(data)
                size_and_checksum = f"{size} {checksum.hexdigest()}".encode()
                noted = _noted(lock)
                if noted not in {None, size_and_checksum}:
                    raise DataError(
                        f"shard {url} has changed since it was first fetched; restore it, or use"
                        f" another cache_dir than {self._directory} for the new data"
                    )
                os.pwrite(lock, size_and_checksum, 0)
                sync(temporary)
                temporary.replace(path)
        except (StorageError, OSError) as error:
            raise DataError(f"cannot fetch shard {url} into the cache: {error}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _room(self, size: int, temporary: Path) -> Iterator[None]:
        """Make room for a file and reserve it; without enough, admit one download at a time."""
        while True:
            with self._lock("locks/room", fcntl.LOCK_EX) as lock:
                left = self._remove(self._max_bytes - size)
                if left <= self._max_bytes:
                    with temporary.open("xb") as file:
                        file.truncate(size)
                    if left <= self._max_bytes - size:
                        fcntl.flock(lock, fcntl.LOCK_UN)
                    yield
                    return
            time.sleep(ROOM_SECONDS)  # who locks the copies may wait for `room`

    def _remove(self, limit: int) -> int:
        """Remove the least recently used copies until `limit` bytes are left; return what is left.

        Copies that others have locked stay.
        """
        # A list of a folder may lack a file that is renamed meanwhile: NAME.tmp to NAME.
        listed = {path.name for _ in range(2) for path in self._directory.iterdir()}
        copies = []
        for name in {name.removesuffix(".tmp") for name in listed}:
            for path in (self._directory / f"{name}.tmp", self._directory / name):
                if path.is_file():
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        copies.append((status.st_mtime_ns, status.st_size, name))
                        break
        total = sum(size for _, size, _ in copies)
        for _, size, name in sorted(copies):
            if total <= limit:
                break
            with (
                suppress(BlockingIOError),
                self._lock(f"locks/{name}", fcntl.LOCK_EX | fcntl.LOCK_NB),
            ):
                for path in (self._directory / name, self._directory / f"{name}.tmp"):
                    path.unlink(missing_ok=True)
                total -= size
        return total

    @contextmanager
    def _lock(self, name: str, how: int) -> Iterator[int]:
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, how)
            yield descriptor
        finally:
            os.close(descriptor)


def _is_complete(path: Path, lock: int) -> bool:
    noted = _noted(lock)
    try:
        return noted is not None and path.stat().st_size == int(noted.split()[0])
    except FileNotFoundError:
        return False


def _noted(lock: int) -> bytes | None:
    """Return the size and checksum in a lock file, None if there are none."""
    content = os.pread(lock, 100, 0)
    return content if _NOTE.fullmatch(content) else None


def _is_url(name: str) -> bool:
    return "://" in name


def _close(samples: Any) -> None:
    if hasattr(samples, "close"):
        samples.close()
