"""Durable local files, and folders of a remote storage that are accessed through fsspec."""

from __future__ import annotations

import errno
import inspect
import logging
import math
import os
import random
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

from samestep.errors import ConfigError, RecordError, SamestepError, SnapshotError
from samestep.masking import mask_urls

T = TypeVar("T")

LEASE_SECONDS: Final = 2.0  # for an NFS server to take back a file that a client has to itself
# neither waits for the other end of a pipe, nor takes a terminal
_CAREFUL: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# errors that a retry would not change
_FINAL: Final = (
    FileExistsError, FileNotFoundError, ImportError, IsADirectoryError, LookupError,
    NotADirectoryError, NotImplementedError, PermissionError, TypeError, ValueError,
)  # fmt: skip
# of file systems without hard links
_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}
_UPLOADS: Final = 4  # parts of a file (50 MB each) that s3fs holds in memory at a time
_PASSWORD: Final = re.compile(r"://[^/@:]*:[^/]*@")
_S3: Final = {"s3", "s3a"}
_generator: Final = random.Random()  # the global one belongs to training


class StorageError(SnapshotError, RecordError):
    """The storage did not respond, refused a request, or is full, so its content is unknown."""


def open_regular(
    path: str | Path,
    flags: int = os.O_RDONLY,
    *,
    folder: int | None = None,
    follows_links: bool = False,
) -> int:
    """Open a file that somebody else may have made, and return its descriptor.

    `folder` is the descriptor of the directory that `path` is relative to. Raises `OSError`,
    without waiting, for anything but a regular file: for a pipe or a device, and for a link unless
    `follows_links`.
    """
    flags |= _CAREFUL if follows_links else _CAREFUL | os.O_NOFOLLOW
    deadline = time.monotonic() + LEASE_SECONDS
    try:
        while True:
            try:
                descriptor = os.open(path, flags, 0o644, dir_fd=folder)
                break
            except BlockingIOError:  # another process has a lease, and was asked to end it
                if time.monotonic() > deadline:
                    raise
                time.sleep(LEASE_SECONDS / 100)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EISDIR}:
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def _not_regular(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, limit: int, *, follows_links: bool = False) -> bytes:
    """Return the content of a file of at most `limit` bytes; see `open_regular`.

    Raises `OSError` for a larger one, and for one that is not regular.
    """
    with os.fdopen(open_regular(path, follows_links=follows_links), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) <= limit:
            data = file.read(size + 1)  # reading `limit` would allocate as much
            if len(data) > size:  # it grows
                data += file.read(limit + 1 - len(data))
            if len(data) <= limit:
                return data
    raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a directory unless it exists. Raises `OSError` for a link to one.

    What is written or removed there must not be elsewhere.
    """
    path.mkdir(parents=parents, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.EINVAL, "a link, which is not followed", str(path))


@contextmanager
def atomic_path(path: Path, *, is_new: bool = False) -> Iterator[Path]:
    """Yield a path where nothing is yet; on success, it durably replaces `path` in one step.

    A directory replaces only an empty one, and the caller, who fills it, syncs its files. A
    file that `is_new` replaces nothing: raises `FileExistsError` instead.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(temporary)  # left by a killed process with the same ID, or a link to another file
    try:
        yield temporary
        sync(temporary)
        if is_new:
            _give_new_name(temporary, path)
        else:
            temporary.replace(path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            _remove(temporary)
        raise


def _give_new_name(temporary: Path, path: Path) -> None:
    """Rename a file. Raises `FileExistsError`, also if `path` appears at the same instant."""
    try:
        os.link(temporary, path)  # exclusive, unlike a rename
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        temporary.replace(path)
    else:
        temporary.unlink()


def _remove(path: Path) -> None:
    """Remove a file, link or directory if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a durable file that readers see either complete or not at all."""
    with atomic_path(path) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_regular(temporary, flags), "wb") as file:
            file.write(data)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, if they are missing, with durable names.

    That of an existing directory is synced as well: its maker may have been killed before.
    """
    folders = [path, *(parent for parent in path.parents if not parent.exists())]
    path.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        with suppress(PermissionError):  # of a parent that cannot be read
            sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file or directory would survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems cannot sync directories
        if not (path.is_dir() and error.errno == errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Retries:
    """The number of tries of a request and the delays between them.

    Each delay is twice the one before, up to `longest_seconds`, and is reduced by a random factor
    of up to one half, so that clients that failed together do not retry together.
    """

    tries: int = 6
    first_seconds: float = 1.0
    longest_seconds: float = 30.0

    def delays(self) -> Iterator[float]:
        """Yield the seconds to wait after each failed try except the last."""
        for number in range(self.tries - 1):
            delay = min(self.first_seconds * 2**number, self.longest_seconds)
            yield delay * _generator.uniform(0.5, 1.0)


RETRIES: Final = Retries()


class Storage:
    """The files below a URL.

    A method raises `StorageError` if its request still fails after all `retries`, or once
    `given_up` is set or the time of `retry_for` has passed, and `ConfigError` if fsspec does not
    know the URL or lacks a package for it.
    fsspec and the storage's own library find credentials in their files and variables.
    """

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        if _PASSWORD.search(url):
            raise ConfigError(
                "expected a URL without a password, since records and messages show the URL, "
                f"got {mask_urls(url)}; put credentials into the files or variables of the "
                "storage's library, or into fsspec's configuration"
            )
        self._address = url.rstrip("/")
        self.url = mask_urls(self._address)  # for messages and the record
        self.given_up = threading.Event()
        self._deadline = math.inf  # monotonic, for further tries
        self._says_wait = True  # once, if there is a deadline
        self._retries = retries

    def open(self) -> None:
        """Raise `ConfigError` for a wrong URL or a missing package; other errors occur later."""
        try:
            self._root  # noqa: B018  a cached property
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001  libraries have their own errors
            return

    def retry_for(self, seconds: float) -> None:
        """Repeat requests only within the next `seconds`, and say what is waited for."""
        self._deadline = time.monotonic() + seconds

    @property
    def is_concurrent(self) -> bool:
        """Whether calls from several threads are faster."""
        return bool(self._root[0].async_impl)

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in a folder, or at the top."""
        return self.names(folder)[0]

    def names(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders in a folder, and of its files."""
        entries = self._entries(folder)
        folders = [name for name, entry in entries.items() if entry["type"] == "directory"]
        return folders, [name for name, entry in entries.items() if entry["type"] == "file"]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by name; empty if the folder is missing."""
        sizes = {}
        for name, entry in self._entries(folder).items():
            if entry["type"] == "file":
                size = entry["size"]
                if size is None:  # a web server lists no sizes
                    size = self.size(f"{folder}/{name}".lstrip("/"))
                if size is not None:
                    sizes[name] = int(size)
        return sizes

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, None if it is missing."""

        def size(files: Any, target: str) -> int | None:
            with suppress(FileNotFoundError):
                entry = files.info(target)
                return int(entry["size"]) if entry["type"] == "file" else None
            return None

        return self._try("find", path, size)

    def _entries(self, folder: str) -> dict[str, dict[str, Any]]:
        def entries(files: Any, target: str) -> list[dict[str, Any]]:
            with suppress(FileNotFoundError):
                return list(files.ls(target.rstrip("/"), detail=True))
            return []

        listing = self._try("list", folder, entries)
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in listing}

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file."""

        def read(files: Any, target: str) -> bytes:
            content = bytes(files.cat_file(target, start=start, end=stop))
            if len(content) != stop - start:
                raise OSError(f"short read: got {len(content)} of {stop - start} bytes")
            return content

        return self._try("read", path, read)

    def send(self, source: Path, path: str) -> None:
        """Upload a local file, replacing an existing one."""
        self._store(path, lambda files, to: files.put_file(str(source), to))

    def write(self, path: str, data: bytes) -> None:
        """Write a file, replacing an existing one."""
        self._store(path, lambda files, to: files.pipe_file(to, data))

    def create(self, path: str, data: bytes) -> None:
        """Write a small file that does not exist yet.

        If the storage supports it, the call fails if another client wrote the file in the meantime.
        """
        self._try("write", path, lambda files, target: _create(files, target, data))

    def copy(self, path: str, to: str) -> None:
        """Copy a file within the storage."""
        self._store(to, lambda files, target: files.cp_file(f"{self._root[1]}/{path}", target))

    def remove(self, path: str, *, folder: bool = False) -> None:
        """Remove a file, or a folder with all its content; it may be missing."""

        def remove(files: Any, target: str) -> None:
            with suppress(FileNotFoundError):
                files.rm(target, recursive=folder)

        self._try("remove", path, remove)

    def _store(self, path: str, put: Callable[[Any, str], object]) -> None:
        def store(files: Any, target: str) -> None:
            with _durable(files, target) as destination:
                put(files, destination)

        self._try("write", path, store)

    def _try(self, verb: str, path: str, request: Callable[[Any, str], T]) -> T:
        delays = self._retries.delays()
        while True:
            try:
                files, root = self._root
                return request(files, f"{root}/{path}")
            except SamestepError:
                raise
            except Exception as error:
                delay = next(delays, None)
                reason = mask_urls(f"{type(error).__name__}: {error}")
                if (
                    delay is None
                    or _is_final(error)
                    or time.monotonic() + delay > self._deadline
                    or self._waits(delay, reason)
                ):
                    target = f"{self.url}/{path}".rstrip("/")
                    raise StorageError(f"cannot {verb} {target}: {reason}") from error

    def _waits(self, delay: float, reason: str) -> bool:
        """Wait before the next try, and say so if somebody waits; return whether to give up."""
        seconds = self._deadline - time.monotonic()
        if self._says_wait and seconds < math.inf:
            self._says_wait = False
            logging.getLogger("samestep").warning(
                "waiting up to %.0f s for %s, which does not respond: %s",
                *(seconds, self.url, reason),
            )
        return self.given_up.wait(delay)

    @cached_property
    def _root(self) -> tuple[Any, str]:
        """The file system, and the folder's path in it."""
        try:
            # an optional package
            import fsspec  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(f'{self.url} needs fsspec: pip install "samestep[remote]"') from error
        protocol, _ = fsspec.core.split_protocol(self._address)
        try:
            options = _options(protocol, fsspec.config.conf.get(protocol, {}))
            files, path = fsspec.core.url_to_fs(
                self._address, skip_instance_cache=True, use_listings_cache=False, **options
            )
        except ImportError as error:
            how = 'pip install "samestep[s3]"' if protocol in _S3 else "install it"
            raise ConfigError(
                f"{self.url} needs a package for {protocol}: {how} ({error})"
            ) from error
        except ValueError as error:
            raise ConfigError(
                "expected a URL that fsspec knows, such as s3://bucket/runs/one, "
                f"got {self.url}: {error}"
            ) from error
        return files, path.rstrip("/")


@contextmanager
def _durable(files: Any, target: str, *, is_new: bool = False) -> Iterator[str]:
    """Yield the path to write a file to. On this host, it then appears complete and durable.

    Object stores do that by themselves.
    """
    if files.protocol != ("file", "local"):
        yield target
        return
    make_directory(Path(target).parent)
    with atomic_path(Path(target), is_new=is_new) as temporary:
        yield str(temporary)


def _create(files: Any, target: str, data: bytes) -> None:
    parameters = inspect.signature(getattr(files, "_pipe_file", files.pipe_file)).parameters
    try:
        with _durable(files, target, is_new=True) as path:
            files.pipe_file(path, data, **({"mode": "create"} if "mode" in parameters else {}))
    except Exception as error:
        existing = None
        with suppress(Exception):
            existing = bytes(files.cat_file(target))
        if existing is None:
            raise
        if existing != data:  # equal if an earlier try succeeded and its response was lost
            raise FileExistsError(
                "another run wrote this file in the meantime; give every run its own URL"
            ) from error


def _options(protocol: str, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options of a file system; those that the user configured in fsspec win."""
    if protocol in {"file", "local"}:
        return {"auto_mkdir": True}
    if protocol in _S3:
        # botocore's own retries draw delays from Python's global generator, which belongs to
        # training.
        config = {"retries": {"max_attempts": 0}, **configured.get("config_kwargs", {})}
        uploads = configured.get("max_concurrency", _UPLOADS)
        return {"config_kwargs": config, "max_concurrency": uploads}
    return {}


def _is_final(error: Exception) -> bool:
    # Libraries share no class for missing credentials, only the word.
    return isinstance(error, _FINAL) or "Credential" in type(error).__name__
