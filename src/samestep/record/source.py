"""Where a record is read from, while it may still be written: a folder, or any URL that fsspec knows."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final, TypeAlias

from samestep.config import SINKS, is_url
from samestep.errors import RecordError
from samestep.record import files as parts
from samestep.record.events import FILE_NAME, read_events
from samestep.record.files import Below, Files, LocalFiles, join
from samestep.record.images import FOLDER as IMAGES
from samestep.storage import Retries, Storage

READ_BYTES: Final = 4 * 2**20
DEEPEST: Final = 4  # folders below a place in which runs are looked for
# whoever looks on asks again anyway, and other runs wait meanwhile
READER_RETRIES: Final = Retries(tries=2, first_seconds=0.5)
_OF_A_RUN: Final = re.compile(
    rf"{IMAGES}|{parts.FOLDER}|{'|'.join(SINKS)}|step-.*|superseded-.*|\..*"
)
_IMAGE: Final = re.compile(rf"{IMAGES}/[A-Za-z0-9_-][A-Za-z0-9_.-]*", re.ASCII)


class Source:
    """The record at a place, as far as it was written: events.jsonl, or parts of it under record/; and images/.

    Every call may raise `RecordError`, and the next one may go well again: a storage did not
    answer, a file is not there yet.
    """

    def __init__(self, location: str, files: Files) -> None:
        self.location = location
        self._files = files
        self._size = 0
        self._parts: list[parts.Part] = []

    def version(self) -> object:
        """Return something that differs from what it was before when there may be more to read."""
        if self._parts:  # one request for each look is enough at a storage
            self._parts = self._list_parts()
        if not self._parts:
            top = self._files.sizes("")
            self._size = top.get(FILE_NAME, 0)
            self._parts = [] if FILE_NAME in top else self._list_parts()
        return self._size, tuple(self._parts)

    def _list_parts(self) -> list[parts.Part]:
        return parts.parts_of(self._files.sizes(parts.FOLDER))

    def read(self, offset: int) -> bytes:
        """Return the next whole lines from byte `offset` of the events, some MB at most; nothing where there are no more yet.

        Raises `RecordError` where the record is shorter than `offset`: another one took its place,
        to be read from its start.
        """
        with suppress(RecordError):  # small parts are replaced by larger ones while a run goes on
            if lines := self._read_known(offset):
                return lines
        self.version()
        lines = self._read_known(offset)
        if not lines and offset > max(self._size, parts.reach(self._parts)):
            raise RecordError(
                f"the record at {self.location} has no byte {offset}: another one took its place; read it from its start"
            )
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

        Raises `RecordError` where there is none, or where a path, which anybody may have written,
        is not that of an image of this run.
        """
        if not _IMAGE.fullmatch(path):
            raise RecordError(
                f"an image at {path!r} was asked for; expected one in {IMAGES}/ of {self.location}"
            )
        size = self._files.size(path)
        if size is None:
            raise RecordError(f"there is no image at {path!r} of {self.location}")
        pieces = range(0, size, READ_BYTES)
        return size, (
            self._files.read(path, start, min(start + READ_BYTES, size)) for start in pieces
        )

    def read_image(self, path: str) -> bytes:
        """Return all of an image, as `open_image` does its pieces."""
        return b"".join(self.open_image(path)[1])


class RunLocation:
    """A folder or URL with runs at or below it. All are read over the same connections: a client of S3 takes 18 MB."""

    def __init__(self, location: str | Path) -> None:
        """Raise `ConfigError` for a URL that cannot be used."""
        self._location = str(location)
        self._is_far = is_url(self._location)
        self._files: Files = (
            Storage(self._location, READER_RETRIES) if self._is_far else LocalFiles(Path(location))
        )
        if isinstance(self._files, Storage):
            self._files.open()
        self._known: list[str] = []

    def find(self) -> list[str]:
        """Return where there are runs, in order: "." for the place itself, and else relative to it, as in "a/b".

        Runs of a URL that were found before are there as long as their folders are, and not looked
        into: every look is a request.
        """
        found = sorted(self._runs("", DEEPEST))
        self._known = found if self._is_far else []
        return found

    def _runs(self, folder: str, levels: int) -> Iterator[str]:
        folders, names = self._files.names(folder)
        run = folder or "."
        if FILE_NAME in names or (
            parts.FOLDER in folders and (run in self._known or self._has_parts(folder))
        ):
            yield run
        if not levels:
            return
        for path in [join(folder, name) for name in folders if not _OF_A_RUN.fullmatch(name)]:
            if path in self._known:
                yield from (known for known in self._known if f"{known}/".startswith(f"{path}/"))
            else:
                yield from self._runs(path, levels - 1)

    def _has_parts(self, folder: str) -> bool:
        return bool(parts.parts_of(self._files.sizes(join(folder, parts.FOLDER))))

    def source(self, run: str) -> Source:
        """Return what reads the record of a run, by where it is relative to the place; it may come later."""
        if run == ".":
            return Source(self._location, self._files)
        return Source(f"{self._location.rstrip('/')}/{run}", Below(self._files, run))


def open_source(location: str | Path) -> Source:
    """Return what reads the record at a folder or URL, which may come later. Raises `ConfigError` for a URL that cannot be used."""
    return RunLocation(location).source(".")


def find_runs(location: str | Path) -> list[str]:
    """Return where runs are at or below a folder or URL, as `Place.find` does."""
    return RunLocation(location).find()


Place: TypeAlias = tuple[float, bool]

STARTS: Final = ("started", "resumed")
OF_A_STEP: Final = ("scalars", "timing", "image")


def read_history(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in order, without those that a later start has replaced.

    A start that resumes from a step replaces the scalars, timing and images of later steps, because
    these steps run again; a start from the beginning replaces all of them. Values that were logged
    between two steps (`between`) at exactly the step of the resume stay. Events about attempts
    (`started`, `snapshot`, `failed`, ...) always stay. The file is read twice, and no events are
    held in memory.

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
    # the number of its event, and the last place whose events stand
    starts: list[tuple[int, Place]] = []
    count = 0
    for count, event in enumerate(read_events(path), start=1):
        if event.get("event") in STARTS:
            starts.append((count, last_standing(event)))
    # Of each start and all after it together; the first comes last, to be taken off when it was
    # passed.
    limits = list(
        accumulate(reversed(starts), lambda later, start: (start[0], min(start[1], later[1])))
    )
    # what was added since belongs to the next reading
    for number, event in enumerate(islice(read_events(path), count), start=1):
        while limits and limits[-1][0] <= number:
            limits.pop()
        if not limits or event.get("event") not in OF_A_STEP or place_of(event) <= limits[-1][1]:
            yield event


def place_of(event: dict[str, Any]) -> Place:
    """Return where in a run an event stands: after so many steps, and whether within the next."""
    return _step(event), not event.get("between")


def last_standing(start: dict[str, Any]) -> Place:
    """Return the last place whose events a start lets stand."""
    return (_step(start) if start["event"] == "resumed" else -math.inf), False


def _step(event: dict[str, Any]) -> float:
    """Return an event's step; of one that tells none, which no run writes, a step before all others."""
    step = event.get("step")
    return step if isinstance(step, (int, float)) else -math.inf
