"""Events as lines of JSON in a file that is only ever appended to."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from samestep.errors import RecordError

FILE_NAME: Final = "events.jsonl"
_FREE_SPACE: Final = (
    "Free some space there and start again: the run resumes from its newest snapshot"
)
_ADVICE: Final = {errno.ENOSPC: f". {_FREE_SPACE}", errno.EDQUOT: f". {_FREE_SPACE}"}
# struct flock of fcntl(2): type, whence, start, length, process id
_LOCK: Final = struct.Struct("@hhqqi4x")
NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
NON_FINITE_OR_ESCAPED: Final = re.compile(r"\\*(nan|-?inf)")
# most lines have none, and then nothing is to be decoded
NON_FINITE_OR_ESCAPED_IN_JSON: Final = re.compile(rb'(?:nan|inf)"')


class EventFile:
    """Appends events to a file, from any thread; an event is one line of JSON.

    JSON has no NaN and no infinities: they are written as "nan", "inf" and "-inf". A text that
    reads like one of these gets a backslash in front, which `read_events` takes off again.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` to append. Raises `RecordError` where that is not possible."""
        self._path = path
        self._appending = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            size = os.fstat(self._descriptor).st_size
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError as error:
            raise RecordError(
                f"no record can be kept in {path}: {error.strerror}; choose a directory that can be written"
            ) from error

    def claim(self) -> None:
        """Be the one process of this machine that runs with this file, until it is closed. Raises `RecordError` where another one is.

        A lock that a process of another machine holds counts for nothing: with that machine gone,
        it may stay for long.
        """
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or this file system has no locks
            if holder := _holder(self._descriptor):
                raise RecordError(
                    f"another run, process {holder}, writes to {self._path}; expected a directory for each run: "
                    "give another one, or wait until that run has ended"
                ) from None

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one event with one call of the system, so that a crash can tear the last line only.

        Raises `RecordError` when a value is not JSON, the disk is full, or the file was removed.
        """
        line = f"{_to_json(event)}\n".encode()
        with self._appending:
            self._check_place()
            self._write(line)

    def _write(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise RecordError(
                f"{self._path} cannot be written: {error.strerror}{_ADVICE.get(error.errno or 0, '')}"
            ) from error
        self._torn = written < len(line)
        if self._torn:
            raise RecordError(
                f"{self._path} took {written} of {len(line)} bytes of an event; is the disk full? {_FREE_SPACE}"
            )

    def _check_place(self) -> None:
        """Raise `RecordError` unless the file is still where it was: a file that was removed would take all that is written."""
        try:
            there = os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except OSError:
            there = False
        if not there:
            raise RecordError(
                f"{self._path} was removed or moved while the run wrote to it; expected the run's directory to stay in place: start again "
                "where its snapshots are, or anew where there are none"
            )

    def close(self) -> None:
        """Close the file; nothing can be appended after."""
        os.close(self._descriptor)


def _holder(file: int) -> int:
    """Return the process that has locked an open file, 0 where none that can be seen from here has."""
    try:
        kind, *_, process = _LOCK.unpack(
            fcntl.fcntl(file, fcntl.F_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        )
    except OSError:
        return 0
    return 0 if kind == fcntl.F_UNLCK else max(0, process)


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in the order in which they were recorded, without torn lines.

    Args:
        path: Directory of the run, or its events file.

    Raises:
        RecordError: There is no record at `path`.

    Example:
        >>> with ss.init(lanes=2, dir="runs/one") as run:
        ...     run.log(accuracy=0.9)
        >>> [event["event"] for event in read_events("runs/one")]
        ['started', 'scalars', 'finished']
    """
    file = Path(path)
    if file.is_dir():
        file /= FILE_NAME
    try:
        lines = file.open("rb")
    except OSError as error:
        raise RecordError(
            f"no record can be read at {file}: {error.strerror}; give a run's directory or its {FILE_NAME}"
        ) from error
    with lines:
        yield from parse_events(lines)


def parse_events(lines: bytes | Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events of a record's bytes, or of its lines, in order. What is no event is passed over, such as a torn line."""
    for line in lines.split(b"\n") if isinstance(lines, bytes) else lines:
        try:
            event = json.loads(line)
            if NON_FINITE_OR_ESCAPED_IN_JSON.search(line):
                event = _decoded(event)
        except (RecursionError, ValueError):  # torn by a crash, or still being written
            continue
        if isinstance(event, dict):
            yield event


def _to_json(event: Mapping[str, Any]) -> str:
    try:
        return json.dumps(_encoded(event), allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"an event cannot be written: {error}; give numbers, texts, lists and mappings of them"
        ) from error


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, str) and NON_FINITE_OR_ESCAPED.fullmatch(value):
        return "\\" + value
    if isinstance(value, Mapping):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, str) and NON_FINITE_OR_ESCAPED.fullmatch(value):
        return NON_FINITE[value] if value in NON_FINITE else value[1:]
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value
