"""Read a record, from a folder or any fsspec URL, while it may still be written."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from posixpath import join
from typing import Any, Final, TypeAlias

from samestep.config import SINKS, is_url
from samestep.errors import RecordError
from samestep.masking import mask_urls
from samestep.record.events import FILE_NAME, LONGEST_LINE, long_line, read_events
from samestep.record.files import (
    FOLDER,
    LOGS,
    EventChunk,
    LocalFiles,
    Notes,
    chunk_at,
    covered_end,
    find_chunks,
)
from samestep.record.images import FOLDER as IMAGES
from samestep.storage import Retries, Storage

Files: TypeAlias = LocalFiles | Storage
READ_BYTES: Final = 4 * 2**20
LARGEST_IMAGE: Final = 2**28  # bytes; sinks hold one in memory
MAX_FOLDERS: Final = 20_000  # searched for runs
MAX_DEPTH: Final = 4  # maximum folder depth searched for runs
# readers repeat their requests anyway, and a longer wait would delay other runs
READER_RETRIES: Final = Retries(tries=2, first_seconds=0.5)
_FOLDERS_OF_A_RUN: Final = re.compile(
    rf"{IMAGES}|{FOLDER}|{'|'.join(SINKS)}|step-.*|superseded-.*|\..*"
)
_LOG: Final = re.compile(r"worker-(0|[1-9]\d{0,6})\.log", re.ASCII)
_IMAGE: Final = re.compile(rf"{IMAGES}/[A-Za-z0-9_-][A-Za-z0-9_.-]*", re.ASCII)


class Source:
    """The record of one run: events.jsonl, or chunks of it in record/; and images/.

    Every call may raise `RecordError` if the storage does not respond or a file does not exist yet,
    and may succeed later.
    """

    def __init__(self, location: str, files: Files, folder: str = "") -> None:
        """Read from `folder` of `files`; `location` names the run in messages."""
        self.location = mask_urls(location)
        self._files, self._folder = files, folder
        self._size = 0
        self._chunks: list[EventChunk] = []

    @cached_property
    def notes(self) -> Notes | None:
        """The tags and the note of the run, None if it is not in a local folder."""
        if isinstance(self._files, LocalFiles):
            return Notes(self._files.folder / self._folder)
        return None

    def version(self) -> object:
        """Return a value that changes when there may be more to read."""
        if self._chunks:  # a storage then needs only one request
            self._chunks = self._list_chunks()
        if not self._chunks:
            sizes = self._files.sizes(self._folder)
            self._size = sizes.get(FILE_NAME, 0)
            self._chunks = [] if FILE_NAME in sizes else self._list_chunks()
            if not self._chunks and FILE_NAME not in sizes and isinstance(self._files, LocalFiles):
                self._files.size(join(self._folder, FILE_NAME))  # raises for a link or a pipe
        return self._size, tuple(self._chunks)

    @property
    def size(self) -> int:
        """The bytes of the events, when `version` was last called."""
        return max(self._size, covered_end(self._chunks))

    def _list_chunks(self) -> list[EventChunk]:
        return find_chunks(self._files.sizes(join(self._folder, FOLDER)))

    def read(self, offset: int) -> bytes:
        """Return the next complete lines from byte `offset` of the events, a few MB at most.

        Returns nothing if there are no more yet. Raises `RecordError` if the record is shorter
        than `offset`: another one replaced it, and must be read from its start.
        """
        with suppress(RecordError):  # small chunks are replaced by larger ones during a run
            if lines := self._read_known(offset):
                return lines
        self.version()
        lines = self._read_known(offset)
        if not lines and offset > self.size:
            raise RecordError(
                f"the record at {self.location} has no byte {offset}: another record replaced it; "
                "read it from the start"
            )
        return lines

    def _read_known(self, offset: int) -> bytes:
        if self._size > offset:
            return self._read_lines(FILE_NAME, offset, self._size)
        if chunk := chunk_at(offset, self._chunks):
            return self._read_lines(chunk.path, offset - chunk.start, chunk.end - chunk.start)
        return b""

    def _read_lines(self, path: str, start: int, end: int) -> bytes:
        data, stop = b"", start
        while stop < end:
            begin, stop = stop, min(stop + READ_BYTES, end)
            data += self._files.read(join(self._folder, path), begin, stop)
            if complete := data.rfind(b"\n") + 1:
                return data[:complete]
            if len(data) > LONGEST_LINE:
                raise long_line(f"{self.location}/{path}")
        return b""

    def log_sizes(self) -> dict[int, int]:
        """Return the bytes of each worker's log by rank, none if no launcher writes logs here."""
        sizes = self._files.sizes(join(self._folder, LOGS))
        return {int(log[1]): size for name, size in sizes.items() if (log := _LOG.fullmatch(name))}

    def read_log(self, rank: int, start: int, end: int) -> bytes:
        """Return bytes [start, end) of the log of a worker."""
        return self._files.read(join(self._folder, LOGS, f"worker-{rank}.log"), start, end)

    def open_image(self, path: str) -> tuple[int, Iterator[bytes]]:
        """Return the size of an image in bytes, and its content in pieces.

        `path` is from an image event, and is not trusted: raises `RecordError` if it is not the
        path of an image of this run.
        """
        if not _IMAGE.fullmatch(path):
            raise RecordError(f"expected an image in {IMAGES}/ of {self.location}, got {path!r}")
        file = join(self._folder, path)
        size = self._files.size(file)
        if size is None:
            raise RecordError(f"there is no image at {path!r} of {self.location}")
        if size > LARGEST_IMAGE:
            raise RecordError(f"{path} must have at most {LARGEST_IMAGE} bytes, got {size}")
        starts = range(0, size, READ_BYTES)
        return size, (self._files.read(file, at, min(at + READ_BYTES, size)) for at in starts)

    def read_image(self, path: str) -> bytes:
        """Return the content of an image; see `open_image`."""
        return b"".join(self.open_image(path)[1])


class RunLocation:
    """A folder or URL that is a run or contains runs.

    All runs are read over the same connections, because an S3 client takes 18 MB.
    """

    def __init__(self, location: str | Path) -> None:
        """Raise `ConfigError` for an unusable URL."""
        self._location = str(location)
        self._is_remote = is_url(self._location)
        self._files: Files = LocalFiles(Path(location))
        if self._is_remote:
            self._files = Storage(self._location, READER_RETRIES)
            self._files.open()
        self._known_runs: list[str] = []
        self.is_cut = False  # too many folders to search all

    def find(self) -> list[str]:
        """Return the runs, sorted: "." for the location itself, or a relative path such as "a/b".

        At a URL, known runs are not searched again while their folders exist, because every
        listing is a request.
        """
        runs = sorted(self._find_runs())
        self._known_runs = runs if self._is_remote else []
        return runs

    def _find_runs(self) -> Iterator[str]:
        """Yield the runs, the deepest last, so that what is in one run's folder hides no others."""
        queue, searched = deque([("", 0)]), 0
        while queue and searched < MAX_FOLDERS:
            (folder, depth), searched = queue.popleft(), searched + 1
            folders, names = self._files.names(folder)
            run = folder or "."
            if FILE_NAME in names or (
                FOLDER in folders
                and (
                    run in self._known_runs or find_chunks(self._files.sizes(join(folder, FOLDER)))
                )
            ):
                yield run
            for name in folders if depth < MAX_DEPTH else ():
                path = join(folder, name)
                if _FOLDERS_OF_A_RUN.fullmatch(name):
                    continue
                if path in self._known_runs:
                    yield from (
                        known_run
                        for known_run in self._known_runs
                        if f"{known_run}/".startswith(f"{path}/")
                    )
                else:
                    queue.append((path, depth + 1))
        self.is_cut = bool(queue)

    def source(self, run: str) -> Source:
        """Return the source of a run, given its relative path; the run need not exist yet."""
        if run == ".":
            return Source(self._location, self._files)
        return Source(f"{self._location.rstrip('/')}/{run}", self._files, run)


def open_source(location: str | Path) -> Source:
    """Return the source of the record at a folder or URL, which need not exist yet.

    Raises `ConfigError` for an unusable URL.
    """
    return RunLocation(location).source(".")


# a number of steps, and whether the position is within the step that follows them
StepPosition: TypeAlias = tuple[float, bool]

STARTS: Final = ("started", "resumed")
STEP_EVENTS: Final = ("scalars", "timing", "image", "histogram")


def read_history(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in order, without those that a later start has replaced.

    A start that resumes from a step replaces the scalars, timing, images and histograms of later
    steps, because these steps run again; a start from the beginning replaces all of them. Values
    that were logged between two steps (`between`) at exactly the step of the resume stay. Events
    about attempts (`started`, `snapshot`, `failed`, ...) always stay. The file is read twice, and
    no events are held in memory.

    Args:
        path: Directory of the run, or its events file.

    Raises:
        RecordError: There is no record at `path`.

    Example:
        >>> with ss.init(lanes=2, dir="runs/one") as run:
        ...     run.log(accuracy=0.9)
        >>> [event["values"] for event in read_history("runs/one") if event["event"] == "scalars"]
        [{'accuracy': 0.9}]
    """
    # the last position that each start keeps
    starts: list[StepPosition] = []
    count = 0
    for count, event in enumerate(read_events(path), start=1):  # noqa: B007  used below
        if event.get("event") in STARTS:
            starts.append(valid_until(event))
    # The last position that each start and all later ones keep; `pop` removes the earliest start.
    limits = list(accumulate(reversed(starts), min))
    # events appended since the first pass are left for the next call
    for event in islice(read_events(path), count):
        kind = event.get("event")
        if limits and kind in STARTS:
            limits.pop()
        if not limits or kind not in STEP_EVENTS or step_position(event) <= limits[-1]:
            yield event


def step_position(event: dict[str, Any]) -> StepPosition:
    """Return the position of a step event in its run."""
    return _step(event), not event.get("between")


def valid_until(start: dict[str, Any]) -> StepPosition:
    """Return the last position whose events stay valid after a start."""
    return (-math.inf if begins_anew(start) else _step(start)), False


def begins_anew(start: Mapping[str, Any]) -> bool:
    """Return whether a start is that of another history than what the record has before it."""
    # a snapshot from elsewhere continues another record
    return start["event"] == "started" or not start.get("continues", True)


def _step(event: dict[str, Any]) -> float:
    step = event.get("step")
    return step if isinstance(step, (int, float)) else -math.inf
