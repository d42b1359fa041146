"""Where a record's files lie: a local folder, read in the way a `Storage` is."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Protocol

from samestep.errors import RecordError

if TYPE_CHECKING:
    from pathlib import Path


class Files(Protocol):
    """Files by their paths below a place; what is missing is no error when it is listed. `Storage` is one."""

    def names(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders in a folder, and of its files."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by name."""

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, None where there is none."""

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file. Raises `RecordError`."""


class Below:
    """The files in a folder of others, reached as those are: over the same connections."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._folder = files, folder

    def names(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders in a folder, and of its files."""
        return self._files.names(join(self._folder, folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by name."""
        return self._files.sizes(join(self._folder, folder))

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, None where there is none."""
        return self._files.size(join(self._folder, path))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file. Raises `RecordError`."""
        return self._files.read(join(self._folder, path), start, stop)


class LocalFiles:
    """Files of a local folder, which may come later. Links below it are not followed: they may lead out of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders in a folder, and of its files."""
        entries = self._entries(folder)
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return folders, [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, by name."""
        return {
            entry.name: entry.stat().st_size
            for entry in self._entries(folder)
            if entry.is_file(follow_symlinks=False)
        }

    def size(self, path: str) -> int | None:
        """Return the bytes of a regular file, None where there is none."""
        try:
            found = self._inside(path).stat()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _unreadable(self._folder / path, error) from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file. Raises `RecordError`."""
        try:
            with self._inside(path).open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
        except OSError as error:
            raise _unreadable(self._folder / path, error) from error
        if len(data) != stop - start:
            raise RecordError(
                f"{self._folder / path} has no bytes {start} to {stop}: it was replaced by a shorter one meanwhile"
            )
        return data

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._inside(folder)) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self._folder / folder, error) from error

    def _inside(self, path: str) -> Path:
        """Return where a path below the folder leads. Raises `FileNotFoundError` where that is another place."""
        place = self._folder.resolve() / path
        if place.resolve() != place:
            raise FileNotFoundError(errno.ENOENT, "a link is not followed")
        return place


def join(folder: str, path: str) -> str:
    """Return where a path of a folder is; both may be empty."""
    return f"{folder}/{path}".strip("/")


def _unreadable(path: Path, error: OSError | ValueError) -> RecordError:
    return RecordError(f"{path} cannot be read: {getattr(error, 'strerror', error)}")
