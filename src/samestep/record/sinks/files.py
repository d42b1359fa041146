"""The record as files: at a URL, or passed to a user's function, with those of snapshots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from samestep.errors import RecordError
from samestep.record.cursor import Cursor, Destination
from samestep.record.events import FILE_NAME, parse_events
from samestep.record.files import FOLDER, EventChunk, covered_end, find_chunks, redundant_chunks
from samestep.record.images import image_paths
from samestep.record.sinks import find_function
from samestep.record.source import Source
from samestep.storage import Retries, Storage

URL_PAUSE_SECONDS: Final = 3.0
FUNCTION_PAUSE_SECONDS: Final = 10.0
FULL_BYTES: Final = 2 * 2**20
MAX_SMALL_CHUNKS: Final = 100
SAMPLE_BYTES: Final = 4096
MANIFEST: Final = "manifest.json"  # of a snapshot
ONE_TRY: Final = Retries(tries=1)  # the sender retries, and reports failures meanwhile


class _FileDestination(Destination):
    """A destination of chunks and images. Each image is sent before the chunk that names it."""

    _sent: frozenset[str] = frozenset()  # paths that lines name which are not sent yet

    def _send_images(self, lines: bytes) -> None:
        for path in image_paths(lines):
            if path not in self._sent:
                self._send_image(path)
                self._sent |= {path}

    @abstractmethod
    def _send_image(self, path: str) -> None: ...


class StorageDestination(_FileDestination):
    """Chunks of a run's events at a URL, named by their byte offsets there, and images.

    If the URL has the record of a run that resumes here in a new directory, this directory's
    events follow the ones there. Every hundred small chunks are replaced by a larger one.
    """

    pause_seconds = URL_PAUSE_SECONDS

    def __init__(self, name: str, directory: Path, source: Source, cursor: Cursor) -> None:
        super().__init__(name, directory, source, cursor)
        self._storage = Storage(name, ONE_TRY)
        self._file = directory / FILE_NAME
        self._base = 0  # the offset at the URL of this directory's first byte
        self._small: list[EventChunk] = []  # the newest chunks

    def open(self) -> int:
        """List the chunks at the URL, and return the offset after them."""
        chunks = find_chunks(self._storage.sizes(FOLDER))
        # left by a process that was killed after it wrote their replacement
        for chunk in (redundant := redundant_chunks(chunks)):
            self._storage.remove(chunk.path)
        end, base = covered_end(chunks), self._cursor.get(self.name)
        if base is None or not base <= end <= base + self._file.stat().st_size:
            base = 0 if self._has_same_start(chunks, end) else end
        self._base = base
        self._cursor.save(self.name, base)
        self._small = []
        for chunk in chunks:
            if chunk not in redundant and base <= chunk.start and chunk.end <= end:
                self._add(chunk)
        return end - base

    def _has_same_start(self, chunks: Sequence[EventChunk], end: int) -> bool:
        """Return whether the URL's events, up to `end`, are the start of this directory's."""
        with self._file.open("rb") as file:
            sample = file.read(SAMPLE_BYTES)
            size = file.seek(0, 2)
        compared = min(len(sample), chunks[0].end) if end else 0
        if not compared:
            return not end
        return end <= size and self._storage.read(chunks[0].path, 0, compared) == sample[:compared]

    def send(self, offset: int, lines: bytes) -> None:
        """Write the images, and then the lines as a chunk."""
        if len(self._small) >= MAX_SMALL_CHUNKS:
            self._merge()
        self._send_images(lines)
        self._write(self._base + offset, lines)
        self._sent = frozenset()

    def _send_image(self, path: str) -> None:
        try:
            data = self._source.read_image(path)
        except RecordError:  # the file was removed
            self.dropped += 1
        else:
            self._storage.write(path, data)

    def _write(self, position: int, lines: bytes) -> None:
        chunk = EventChunk(position, position + len(lines))
        self._storage.write(chunk.path, lines)
        self._add(chunk)

    def _add(self, chunk: EventChunk) -> None:
        self._small = [*self._small, chunk] if chunk.end - chunk.start < FULL_BYTES else []

    def _merge(self) -> None:
        """Replace the small chunks by as few as possible."""
        before, self._small = self._small, []
        position, end = before[0].start, before[-1].end
        try:
            while position < end:
                lines = self._source.read(position - self._base)[: end - position]
                self._write(position, lines)
                position += len(lines)
        except BaseException:
            self._small = before
            raise
        for chunk in before:
            if chunk not in self._small:
                self._storage.remove(chunk.path)


class FunctionDestination(_FileDestination):
    """Calls a function with the path of every image, chunk of events, and file of a snapshot.

    Paths are texts. A snapshot's manifest comes last: a copy without it is none. A chunk of the
    events is a file only during the call.
    """

    pause_seconds = FUNCTION_PAUSE_SECONDS
    is_slow = True

    def __init__(self, name: str, directory: Path, source: Source, cursor: Cursor) -> None:
        super().__init__(name, directory, source, cursor)
        self.must_work = cursor.get(name) is None  # an earlier start has saved where it was

    def open(self) -> int:
        """Import the function, and remove chunks that a killed process left."""
        self._function = find_function(self.name)
        folder = self._directory / FOLDER
        for chunk in find_chunks({path.name: path.stat().st_size for path in folder.iterdir()}):
            (self._directory / chunk.path).unlink()
        return self._cursor.offset(self.name)

    def send(self, offset: int, lines: bytes) -> None:
        """Pass the images and snapshots, and then the lines as a chunk."""
        self._send_images(lines)
        for event in parse_events(line for line in lines.split(b"\n") if b'"snapshot"' in line):
            if event.get("event") == "snapshot":
                self._send_snapshot(self._directory / Path(str(event.get("path"))).name)
        end = offset + len(lines)
        path = EventChunk(offset, end).path
        file = self._directory / path
        try:
            file.write_bytes(lines)
            self._call(file)
        finally:
            with suppress(FileNotFoundError):  # the function may move it
                file.unlink()
        self._sent = frozenset()
        self._cursor.save(self.name, end)

    def _send_snapshot(self, folder: Path) -> None:
        """Pass the files of a snapshot, unless it was removed because newer ones exist."""
        files = sorted(folder.glob("*")) if (folder / MANIFEST).is_file() else []
        for file in sorted(files, key=lambda file: file.name == MANIFEST):
            if str(file) not in self._sent:
                self._call(file)
                self._sent |= {str(file)}

    def _send_image(self, path: str) -> None:
        try:
            self._source.open_image(path)
        except RecordError:  # the file was removed
            self.dropped += 1
        else:
            self._call(self._directory / path)

    def _call(self, file: Path) -> None:
        self._function(str(file))
        self.must_work = False
