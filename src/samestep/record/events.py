"""Events as lines of JSON in an append-only file."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

from samestep.errors import RecordError
from samestep.host import printable
from samestep.storage import open_regular, sync

FILE_NAME: Final = "events.jsonl"
LONGEST_LINE: Final = 2**24  # bytes; readers hold a line in memory
FORMAT: Final = 1  # of a record; it grows when older versions of samestep can no longer read it
NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT}
_FREE_SPACE: Final = "Free some space and restart: the run resumes from its newest snapshot"
NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
NON_FINITE_OR_ESCAPED: Final = re.compile(r"\\*(nan|-?inf)")
# values, not names of fields; most lines do not match, and then need no decoding
NON_FINITE_OR_ESCAPED_IN_JSON: Final = re.compile(rb'(?:nan|inf)"(?!\s*:)')


@cache
def samestep_version() -> str:
    """Return the installed version of samestep."""
    # this import takes as long as all others of this module
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("samestep")
    except PackageNotFoundError:
        return "(not installed)"


def cannot_begin(path: Path, error: OSError) -> RecordError:
    """Return the error of a record at `path` that cannot be begun."""
    advice = "free some space there" if error.errno in NO_SPACE else "choose a writable directory"
    return RecordError(f"cannot write a record to {path}: {error.strerror}; {advice}")


class EventFile:
    """Appends events to a file, from any thread; an event is one line of JSON.

    JSON has no NaN and no infinities: they are written as "nan", "inf" and "-inf". A string equal
    to one of these gets a leading backslash, which `read_events` removes.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` for appending. Raises `RecordError` if that is not possible."""
        self._path = path
        self._append_lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            sync(path.parent)  # before a snapshot is committed, which continues this record
            size = os.fstat(self._descriptor).st_size
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError as error:
            raise cannot_begin(path, error) from error

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one event with a single system call, so that a crash can tear only the last line.

        Raises `RecordError` if a value is not JSON, the event is longer than readers accept, the
        disk is full, or the file was removed.
        """
        line = f"{to_json(event)}\n".encode()
        if len(line) > LONGEST_LINE:
            raise RecordError(
                f"an event must have at most {LONGEST_LINE} bytes, got {len(line)} of a "
                f"{event.get('event')!r}; write large data to files of your own"
            )
        with self._append_lock:
            self._check_not_moved()
            if self._torn:
                line = b"\n" + line
            try:
                written = os.write(self._descriptor, line)
            except OSError as error:
                advice = f". {_FREE_SPACE}" if error.errno in NO_SPACE else ""
                raise RecordError(
                    f"{self._path} cannot be written: {error.strerror}{advice}"
                ) from error
            self._torn = written < len(line)
            if self._torn:
                raise RecordError(
                    f"short write to {self._path}: wrote {written} of {len(line)} bytes; is the "
                    f"disk full? {_FREE_SPACE}"
                )

    def _check_not_moved(self) -> None:
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._descriptor)):
                return
        except OSError:
            pass
        raise RecordError(
            f"{self._path} was removed or moved during the run. Restart in the directory that "
            "contains the run's snapshots, or in a new one if there are none"
        )

    def sync(self) -> None:
        """Wait until all appended events would survive a power loss. Raises `OSError`."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file; no call follows."""
        os.close(self._descriptor)


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
    try:  # the caller may name a link, but a run's directory must not have one
        lines = os.fdopen(open_regular(file, follows_links=file == Path(path)), "rb")
    except OSError as error:
        raise RecordError(
            f"cannot read a record at {file}: {error.strerror}; pass a run's directory or its "
            f"{FILE_NAME}"
        ) from error
    with lines:
        yield from parse_events(read_lines(lines))


def read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file. Raises `RecordError` for a line that no run writes."""
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise long_line(FILE_NAME)
        yield line


def long_line(name: object) -> RecordError:
    """Return the error for a record with a line that is too long to be an event."""
    return RecordError(f"{name} has a line of more than {LONGEST_LINE} bytes: no run writes that")


def parse_events(lines: bytes | Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events in bytes or lines, in order, skipping lines that are torn or not events.

    Raises `RecordError` for a record of a newer format.
    """
    for line in lines.split(b"\n") if isinstance(lines, bytes) else lines:
        try:
            event = json.loads(line)
            if (b'nan"' in line or b'inf"' in line) and NON_FINITE_OR_ESCAPED_IN_JSON.search(line):
                event = _decode(event)
        except (RecursionError, ValueError):  # torn by a crash, or still being written
            continue
        if isinstance(event, dict):
            _check_format(event)
            yield event


def _check_format(event: dict[str, Any]) -> None:
    is_start = event.get("event") in ("started", "resumed")
    record_format = event.get("format") if is_start else None
    if isinstance(record_format, int) and record_format > FORMAT:
        raise RecordError(
            f"the record must have format {FORMAT} or less, got {record_format}; install samestep "
            f"{printable(str(event.get('samestep', '')))[:20]} or newer to read it"
        )


def to_json(event: Mapping[str, Any]) -> str:
    """Return an event as JSON on one line. Raises `RecordError` for a value that is not JSON."""
    try:
        return json.dumps(_encode(event), allow_nan=False, separators=(",", ":"))
    except (RecursionError, TypeError, ValueError) as error:
        raise RecordError(
            f"expected an event of numbers, strings, lists and mappings: {error}"
        ) from error


def _encode(value: Any) -> Any:
    if type(value) is int:  # most values of histograms
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, str) and NON_FINITE_OR_ESCAPED.fullmatch(value):
        return "\\" + value
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str) and NON_FINITE_OR_ESCAPED.fullmatch(value):
        return NON_FINITE[value] if value in NON_FINITE else value[1:]
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
