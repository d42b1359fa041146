"""The record in a remote storage, beside a run's snapshots: parts of its events under record/, and images/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from samestep.errors import RecordError
from samestep.record.cursor import Cursor
from samestep.record.events import FILE_NAME
from samestep.record.files import FOLDER, Part, parts_of, reach, superfluous
from samestep.record.images import paths_in
from samestep.record.source import Source
from samestep.storage import Retries, Storage

PAUSE_SECONDS: Final = 3.0
FULL_BYTES: Final = 2 * 2**20
MOST_SMALL_PARTS: Final = 100
SAMPLE_BYTES: Final = 4096
ONE_TRY: Final = Retries(tries=1)  # a sender tries again, and tells of it meanwhile


class StorageDestination:
    """Parts of a run's events, named by where they are in all that a URL holds, and images, each before the part that names it.

    A URL may hold the record of a run that goes on here in a new directory, on another machine:
    then these bytes follow after those. A long run leaves no million of small parts: each hundred
    is replaced by one that holds them all.
    """

    def __init__(self, url: str, directory: Path, source: Source, forwarded: Cursor) -> None:
        self.name, self.pause_seconds, self.dropped = url, PAUSE_SECONDS, 0
        self._storage = Storage(url, ONE_TRY)
        self._file, self._source, self._forwarded = directory / FILE_NAME, source, forwarded
        self._base = 0  # where this directory's first byte is in all that the URL holds
        self._small: list[Part] = []  # the newest ones
        self._images: set[str] = set()  # that were sent, of a part that was not

    def begin(self) -> int:
        """Find out how much the storage has."""
        parts = parts_of(self._storage.sizes(FOLDER))
        # a kill came between their successor and their end
        for part in (double := superfluous(parts)):
            self._storage.remove(part.path)
        end, base = reach(parts), self._forwarded.get(self.name)
        if base is None or not base <= end <= base + self._file.stat().st_size:
            base = 0 if self._is_of_this_directory(parts, end) else end
        self._base = base
        self._forwarded.keep(self.name, base)
        self._small = []
        for part in parts:
            if part not in double and base <= part.first and part.end <= end:
                self._add(part)
        return end - base

    def _is_of_this_directory(self, parts: Sequence[Part], end: int) -> bool:
        with self._file.open("rb") as file:
            sample = file.read(SAMPLE_BYTES)
            size = file.seek(0, 2)
        known = min(len(sample), parts[0].end) if end else 0
        return (
            end <= size and self._storage.read(parts[0].path, 0, known) == sample[:known]
            if known
            else not end
        )

    def send(self, offset: int, lines: bytes) -> None:
        """Write the images and the part."""
        if len(self._small) >= MOST_SMALL_PARTS:
            self._merge()
        for path in paths_in(lines):
            self._send_image(path)
        part = Part(self._base + offset, self._base + offset + len(lines))
        self._storage.write(part.path, lines)
        self._add(part)
        self._images.clear()

    def _send_image(self, path: str) -> None:
        if path in self._images:
            return
        try:
            data = self._source.read_image(path)
        except RecordError:  # somebody removed it
            self.dropped += 1
        else:
            self._storage.write(path, data)
        self._images.add(path)

    def _add(self, part: Part) -> None:
        self._small = [*self._small, part] if part.end - part.first < FULL_BYTES else []

    def _merge(self) -> None:
        """Replace the small parts by as few as hold the same bytes."""
        before, self._small = self._small, []
        position, end = before[0].first, before[-1].end
        try:
            while position < end:
                lines = self._source.read(position - self._base)[: end - position]
                part = Part(position, position + len(lines))
                self._storage.write(part.path, lines)
                self._add(part)
                position = part.end
        except BaseException:
            self._small = before
            raise
        for part in before:
            if part not in self._small:
                self._storage.remove(part.path)

    def close(self) -> None:
        """Every part was safe when it was sent."""
