"""Where a record is read from, while it may still be written: a folder, or any URL that fsspec knows."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.config import SINKS, is_url
from samestep.errors import RecordError
from samestep.record import parts
from samestep.record.events import FILE_NAME
from samestep.record.files import Files, LocalFiles
from samestep.record.images import FOLDER as IMAGES
from samestep.storage import Retries, Storage

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_BYTES: Final = 4 * 2**20
DEEPEST: Final = 4  # folders below a place in which runs are looked for
READER_RETRIES: Final = Retries(tries=3, first_seconds=0.5)  # whoever looks on asks again anyway
_OF_A_RUN: Final = re.compile(rf"{IMAGES}|{parts.FOLDER}|{'|'.join(SINKS)}|step-.*|superseded-.*|\..*")
_IMAGE: Final = re.compile(rf"{IMAGES}/[A-Za-z0-9_-][A-Za-z0-9_.-]*", re.ASCII)


class Source:
    """The record at a place, as far as it was written: events.jsonl, or parts of it under record/; and images/.

    Every call may raise `RecordError`, and the next one may go well again: a storage did not answer, a file is not there yet.
    """

    def __init__(self, location: str, files: Files) -> None:
        self.location = location
        self._files = files
        self._size = 0
        self._parts: list[parts.Part] = []

    def version(self) -> object:
        """Return something that differs from what it was before when there may be more to read."""
        top = self._files.sizes("")
        self._size = top.get(FILE_NAME, 0)
        self._parts = [] if FILE_NAME in top else parts.parts_of(self._files.sizes(parts.FOLDER))
        return self._size, tuple(self._parts)

    def read(self, offset: int) -> bytes:
        """Return the next whole lines from byte `offset` of the events, some MB at most; nothing where there are no more yet.

        Raises `RecordError` where the record is shorter than `offset`: another one took its place, to be read from its start.
        """
        with suppress(RecordError):  # small parts are replaced by larger ones while a run goes on
            if lines := self._read_known(offset):
                return lines
        self.version()
        lines = self._read_known(offset)
        if not lines and offset > max(self._size, parts.reach(self._parts)):
            raise RecordError(f"the record at {self.location} has no byte {offset}: another one took its place; read it from its start")
        return lines

    def _read_known(self, offset: int) -> bytes:
        """Read of the files as they were when they were listed last."""
        found = self._find(offset)
        return b"" if found is None else self._lines(*found)

    def _find(self, offset: int) -> tuple[str, int, int] | None:
        """Return the file that holds the byte at `offset` of the events, and which of its bytes are those from there on."""
        if self._size > offset:
            return FILE_NAME, offset, self._size
        part = parts.part_with(offset, self._parts)
        return None if part is None else (part.path, offset - part.first, part.end - part.first)

    def _lines(self, path: str, start: int, end: int) -> bytes:
        """Return whole lines of a file, at least one where there is one."""
        data, stop = b"", start
        while stop < end:
            begin, stop = stop, min(stop + READ_BYTES, end)
            data += self._files.read(path, begin, stop)
            if whole := data.rfind(b"\n") + 1:
                return data[:whole]
        return b""

    def open_image(self, path: str) -> tuple[int, Iterator[bytes]]:
        """Return the bytes of an image and its content in pieces. `path` is that of an image event.

        Raises `RecordError` where there is none, or where a path, which anybody may have written, is not that of an image of this run.
        """
        if not _IMAGE.fullmatch(path):
            raise RecordError(f"an image at {path!r} was asked for; expected one in {IMAGES}/ of {self.location}")
        size = self._files.size(path)
        if size is None:
            raise RecordError(f"there is no image at {path!r} of {self.location}")
        pieces = range(0, size, READ_BYTES)
        return size, (self._files.read(path, start, min(start + READ_BYTES, size)) for start in pieces)


def open_source(location: str | Path) -> Source:
    """Return what reads the record at a folder or URL, which may come later. Raises `ConfigError` for a URL that cannot be used."""
    return Source(str(location), _files(str(location)))


def find_runs(location: str | Path) -> list[str]:
    """Return where runs are at or below a folder or URL, in order: "." for the place itself, and else relative to it, as in "a/b"."""
    return sorted(_runs(_files(str(location)), "", DEEPEST))


def _runs(files: Files, folder: str, levels: int) -> Iterator[str]:
    names = files.folders(folder)
    if FILE_NAME in files.sizes(folder) or (parts.FOLDER in names and parts.parts_of(files.sizes(_join(folder, parts.FOLDER)))):
        yield folder or "."
    if levels:
        for name in names:
            if not _OF_A_RUN.fullmatch(name):
                yield from _runs(files, _join(folder, name), levels - 1)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _files(location: str) -> Files:
    if not is_url(location):
        return LocalFiles(Path(location))
    storage = Storage(location, READER_RETRIES)
    storage.open()
    return storage
