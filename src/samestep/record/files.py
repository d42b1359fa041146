"""Access to a record's files in a folder, and the chunks that hold its events at a URL."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.errors import RecordError


class LocalFiles:
    """Files of a local folder, which need not exist yet, with the methods of `Storage`.

    Links below the folder are not followed, because they may lead out of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: str = "") -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the files in a folder; none if it is missing."""
        entries = self._entries(folder)
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return folders, [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file in a folder, by name; none if it is missing."""
        entries = self._entries(folder)
        files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        return {entry.name: entry.stat().st_size for entry in files}

    def size(self, path: str) -> int | None:
        """Return the size of a regular file in bytes, or None if there is no such file."""
        try:
            found = self._resolve(path).stat()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._read_error(path, error) from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file. Raises `RecordError`."""
        try:
            with self._resolve(path).open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
        except OSError as error:
            raise self._read_error(path, error) from error
        if len(data) != stop - start:
            raise RecordError(
                f"expected {stop - start} bytes at {start} of {self._folder / path}, got "
                f"{len(data)}: a shorter file replaced it"
            )
        return data

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._resolve(folder)) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._read_error(folder, error) from error

    def _resolve(self, path: str) -> Path:
        full = self._folder.resolve() / path
        if full.resolve() != full:
            raise FileNotFoundError(errno.ENOENT, "links are not followed")
        return full

    def _read_error(self, path: str, error: OSError | ValueError) -> RecordError:
        reason = getattr(error, "strerror", error)
        return RecordError(f"{self._folder / path} cannot be read: {reason}")


FOLDER: Final = "record"
LOGS: Final = "logs"  # the folder of what workers print, which the launcher writes
_NAME: Final = re.compile(r"(\d{20})-(\d{20})\.jsonl", re.ASCII)


@dataclass(frozen=True, order=True)
class EventChunk:
    """Bytes [start, end) of a run's events: complete lines in a file."""

    start: int
    end: int

    @property
    def path(self) -> str:
        """The path of the file, relative to the run's folder or URL."""
        return f"{FOLDER}/{self.start:020d}-{self.end:020d}.jsonl"


def find_chunks(sizes: dict[str, int]) -> list[EventChunk]:
    """Return the complete chunks among files, given their sizes by name, sorted."""
    matches = [(match, size) for name, size in sizes.items() if (match := _NAME.fullmatch(name))]
    chunks = [(EventChunk(int(match[1]), int(match[2])), size) for match, size in matches]
    return sorted(chunk for chunk, size in chunks if chunk.end - chunk.start == size > 0)


def chunk_at(offset: int, chunks: Iterable[EventChunk]) -> EventChunk | None:
    """Return the chunk with the byte at `offset` that ends last, or None if there is none."""
    found = (chunk for chunk in chunks if chunk.start <= offset < chunk.end)
    return max(found, key=lambda chunk: chunk.end, default=None)


def covered_end(chunks: Iterable[EventChunk]) -> int:
    """Return the offset up to which the chunks contain every byte from the first on."""
    end = 0
    for chunk in sorted(chunks):
        if chunk.start > end:
            break
        end = max(end, chunk.end)
    return end


def redundant_chunks(chunks: Iterable[EventChunk]) -> list[EventChunk]:
    """Return the chunks that lie within another one."""
    found, end = [], 0
    for chunk in sorted(set(chunks), key=lambda chunk: (chunk.start, -chunk.end)):
        if chunk.end <= end:
            found.append(chunk)
        end = max(end, chunk.end)
    return found
