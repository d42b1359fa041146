"""A folder of a remote storage, reached through fsspec. What fails is tried again where that may help."""

from __future__ import annotations

import inspect
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeVar

from samestep.errors import ConfigError, RecordError, SamestepError, SnapshotError

T = TypeVar("T")

# What another try would not change: something is not there, not allowed, or not possible.
_FINAL: Final = (
    FileExistsError,
    FileNotFoundError,
    ImportError,
    IsADirectoryError,
    LookupError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    TypeError,
    ValueError,
)
_UPLOADS: Final = 4  # parts of a file that s3fs holds in memory at a time, of 50 MB each
_PASSWORD: Final = re.compile(r"://[^/@:]*:[^/]*@")
_S3: Final = {"s3", "s3a"}
_generator: Final = random.Random()  # the global one belongs to training


class StorageError(SnapshotError, RecordError):
    """What the storage holds is not known, or cannot be had: it did not answer or refused, or there is no room for it."""


@dataclass(frozen=True)
class Retries:
    """How often something is tried, and how long is waited before each further try.

    Each pause is twice the one before, up to `longest_seconds`; a random part of up to half of it
    is left out, so that many who failed together do not come back together.
    """

    tries: int = 6
    first_seconds: float = 1.0
    longest_seconds: float = 30.0

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait after each failure but the last."""
        for number in range(self.tries - 1):
            yield min(self.first_seconds * 2**number, self.longest_seconds) * _generator.uniform(
                0.5, 1.0
            )


RETRIES: Final = Retries()


class Storage:
    """Files below a URL. Raises `StorageError` when a call fails and trying again, by `retries`, did not help or `given_up` is set.

    Raises `ConfigError` where fsspec does not know the URL or lacks a package for it. Credentials
    are found as fsspec and the storage's own library find them: in their files and variables.
    """

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        if (shown := _PASSWORD.sub("://***@", url)) != url:
            raise ConfigError(
                f"a URL with a password in it was given, which records and messages would show: {shown}; expected one without: "
                "the storage's library finds credentials in its own files and variables, or in fsspec's configuration"
            )
        self.url = url.rstrip("/")
        self.given_up = threading.Event()
        self._retries = retries

    def open(self) -> None:
        """Find a wrong URL or a missing package now. Raises `ConfigError`; a storage that does not answer is met later."""
        try:
            self._place  # noqa: B018  opened and kept
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001  libraries have errors of their own
            return

    @property
    def is_concurrent(self) -> bool:
        """Whether calls from several threads make it faster."""
        return bool(self._place[0].async_impl)

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in a folder, or at the top."""
        return self.names(folder)[0]

    def names(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders in a folder, and of its files."""
        entries = self._entries(folder)
        folders = [name for name, entry in entries.items() if entry["type"] == "directory"]
        return folders, [name for name, entry in entries.items() if entry["type"] == "file"]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by name; nothing where there is no such folder."""
        found = {
            name: entry["size"]
            for name, entry in self._entries(folder).items()
            if entry["type"] == "file"
        }
        # by web servers
        asked = {
            name: self.size(f"{folder}/{name}".lstrip("/"))
            for name, size in found.items()
            if size is None
        }
        return {name: int(size) for name, size in {**found, **asked}.items() if size is not None}

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, None where there is none."""

        def size() -> int | None:
            files, root = self._place
            with suppress(FileNotFoundError):
                entry = files.info(f"{root}/{path}")
                return int(entry["size"]) if entry["type"] == "file" else None
            return None

        return self._try("look for", path, size)

    def _entries(self, folder: str) -> dict[str, dict[str, Any]]:
        def entries() -> list[dict[str, Any]]:
            files, root = self._place
            with suppress(FileNotFoundError):
                return list(files.ls(f"{root}/{folder}".rstrip("/"), detail=True))
            return []

        found = self._try("list", folder, entries)
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in found}

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file."""

        def data() -> bytes:
            files, root = self._place
            content = bytes(files.cat_file(f"{root}/{path}", start=start, end=stop))
            if len(content) != stop - start:
                raise OSError(f"{len(content)} bytes came of {stop - start}")
            return content

        return self._try("read", path, data)

    def send(self, source: Path, path: str) -> None:
        """Copy a local file; one that is there is replaced."""
        self._try(
            "take", path, lambda: self._place[0].put_file(str(source), f"{self._place[1]}/{path}")
        )

    def write(self, path: str, data: bytes) -> None:
        """Write a file; one that is there is replaced."""
        self._try("take", path, lambda: self._place[0].pipe_file(f"{self._place[1]}/{path}", data))

    def create(self, path: str, data: bytes) -> None:
        """Write a small file that is not there yet: where the storage can, it refuses if somebody else wrote one meanwhile."""
        self._try("take", path, partial(self._create, path, data))

    def _create(self, path: str, data: bytes) -> None:
        files, root = self._place
        mode = (
            {"mode": "create"}
            if "mode" in inspect.signature(getattr(files, "_pipe_file", files.pipe_file)).parameters
            else {}
        )
        try:
            files.pipe_file(f"{root}/{path}", data, **mode)
        except Exception as error:
            there = None
            with suppress(Exception):
                there = bytes(files.cat_file(f"{root}/{path}"))
            if there is None:
                raise
            if there != data:  # equal where an earlier try arrived and its answer did not
                raise FileExistsError(
                    "somebody else wrote it meanwhile; give every run a URL of its own"
                ) from error

    def copy(self, path: str, to: str) -> None:
        """Copy a file within the storage."""
        self._try(
            "copy",
            path,
            lambda: self._place[0].cp_file(f"{self._place[1]}/{path}", f"{self._place[1]}/{to}"),
        )

    def remove(self, path: str, *, folder: bool = False) -> None:
        """Remove a file, or a folder with all that it holds; it may be gone."""

        def remove() -> None:
            files, root = self._place
            with suppress(FileNotFoundError):
                files.rm(f"{root}/{path}", recursive=folder)

        self._try("remove", path, remove)

    def _try(self, what: str, path: str, action: Callable[[], T]) -> T:
        pauses = self._retries.pauses()
        while True:
            try:
                return action()
            except SamestepError:
                raise
            except Exception as error:
                pause = next(pauses, None)
                if pause is None or _is_final(error) or self.given_up.wait(pause):
                    place = f"{self.url}/{path}".rstrip("/")
                    raise StorageError(
                        f"the storage did not {what} {place}: {type(error).__name__}: {error}"
                    ) from error

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system, and the path of the folder in it."""
        try:
            # only who has a remote needs it
            import fsspec  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(
                f'{self.url} was given; expected fsspec to be there: pip install "samestep[remote]"'
            ) from error
        protocol, _ = fsspec.core.split_protocol(self.url)
        try:
            options = _options(protocol, fsspec.config.conf.get(protocol, {}))
            files, path = fsspec.core.url_to_fs(
                self.url, skip_instance_cache=True, use_listings_cache=False, **options
            )
        except ImportError as error:
            package = (
                'pip install "samestep[s3]"' if protocol in _S3 else "pip install what it names"
            )
            raise ConfigError(
                f"{self.url} was given; expected what reaches {protocol} to be installed: {package} ({error})"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{self.url} was given; expected a URL that fsspec knows, such as s3://bucket/runs/one: {error}"
            ) from error
        return files, path.rstrip("/")


def _options(protocol: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a file system is opened, where what the user's fsspec configuration has `told` of it says nothing else."""
    if protocol in {"file", "local"}:
        return {"auto_mkdir": True}
    if protocol in _S3:
        # botocore waits between tries of its own by Python's global generator, which belongs to
        # training.
        config = {"retries": {"max_attempts": 0}, **told.get("config_kwargs", {})}
        return {"config_kwargs": config, "max_concurrency": told.get("max_concurrency", _UPLOADS)}
    return {}


def _is_final(error: Exception) -> bool:
    # For credentials that are not there libraries share no class, only the word.
    return isinstance(error, _FINAL) or "Credential" in type(error).__name__
