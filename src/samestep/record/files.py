"""Where a record's files lie: a local folder, read in the way a `Storage` is."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from samestep.errors import RecordError


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


FOLDER: Final = "record"
_NAME: Final = re.compile(r"(\d{20})-(\d{20})\.jsonl", re.ASCII)


@dataclass(frozen=True, order=True)
class Part:
    """The bytes [first, end) of a run's events: whole lines."""

    first: int
    end: int

    @property
    def path(self) -> str:
        """Where it lies, relative to the run's place."""
        return f"{FOLDER}/{self.first:020d}-{self.end:020d}.jsonl"


def parts_of(sizes: dict[str, int]) -> list[Part]:
    """Return the whole parts among files, given their sizes by name, in order; anything else in their folder counts for nothing."""
    parts = (
        Part(int(match[1]), int(match[2])) for name in sizes if (match := _NAME.fullmatch(name))
    )
    return sorted(
        part for part in parts if part.end - part.first == sizes[part.path.rpartition("/")[2]] > 0
    )


def part_with(offset: int, parts: Iterable[Part]) -> Part | None:
    """Return the part that holds the byte at `offset` and reaches farthest, None where there is none."""
    return max(
        (part for part in parts if part.first <= offset < part.end),
        key=lambda part: part.end,
        default=None,
    )


def reach(parts: Iterable[Part]) -> int:
    """Return up to which byte parts hold all from the first on."""
    end = 0
    for part in sorted(parts):
        if part.first > end:
            break
        end = max(end, part.end)
    return end


def superfluous(parts: Iterable[Part]) -> list[Part]:
    """Return the parts whose bytes another one holds, too."""
    left, end = [], 0
    for part in sorted(set(parts), key=lambda part: (part.first, -part.end)):
        if part.end <= end:
            left.append(part)
        end = max(end, part.end)
    return left
