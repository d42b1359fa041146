"""How far a run's record was forwarded, kept in its directory: whoever forwards next goes on from there."""

from __future__ import annotations

import fcntl
import json
import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Protocol

from samestep.errors import RecordError
from samestep.record.events import FILE_NAME
from samestep.record.files import FOLDER
from samestep.record.source import Source

FILE: Final = f"{FOLDER}/forwarded.json"
LOCK: Final = f"{FOLDER}/lock"


class Cursor:
    """Whole numbers by name, in a small file that is replaced at every change; for several threads of one process."""

    def __init__(self, directory: Path) -> None:
        self._path, self._events = directory / FILE, directory / FILE_NAME
        self._lock = threading.Lock()
        try:
            kept = json.loads(self._path.read_bytes())
        except (OSError, RecursionError, ValueError):
            kept = {}
        self._kept = (
            {name: value for name, value in kept.items() if type(value) is int and value >= 0}
            if isinstance(kept, dict)
            else {}
        )

    def get(self, name: str) -> int | None:
        """Return what was kept last under a name."""
        return self._kept.get(name)

    def offset(self, name: str) -> int:
        """Return up to which byte of the run's events it was forwarded under a name; 0 where these are not the events of then."""
        kept = self._kept.get(name, 0)
        return kept if kept <= self._events.stat().st_size else 0

    def keep(self, name: str, value: int) -> None:
        """Keep a number. Where the disk has no room for it, what comes after a kill is sent again."""
        with self._lock:
            if self._kept.get(name) == value:
                return
            self._kept[name] = value
            unfinished = self._path.with_suffix(".unfinished")
            with suppress(OSError):
                unfinished.write_text(json.dumps(self._kept))
                unfinished.replace(self._path)


def lock(directory: Path) -> IO[bytes] | None:
    """Return a file that keeps others from forwarding this record until it is closed; None where somebody has it.

    Raises `RecordError` where the directory cannot be written.
    """
    try:
        (directory / FOLDER).mkdir(exist_ok=True)
        file = (directory / LOCK).open("ab")
    except OSError as error:
        raise RecordError(
            f"{directory / LOCK} cannot be written: {error.strerror}; expected the directory of a run"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            file.close()
            return None  # and anything else says that this file system has no locks
    return file


FIRST_PAUSE_SECONDS: Final = 1.0  # after a failure; each further one is twice as long
LONGEST_PAUSE_SECONDS: Final = 30.0
TRIES_AT_THE_END: Final = 2
MOST_FAILURES: Final = 10  # that make a difference
MUCH_BYTES: Final = 2**20  # of which there is more to come, most likely
LATE_SECONDS: Final = 10.0


class Destination(Protocol):
    """Where a record goes. Calls may raise anything, and are made again then.

    Attributes: `name`, as the user gave it; `pause_seconds`, how long more is gathered after each
    piece; `dropped`, how many events and images it could not take.
    """

    name: str
    pause_seconds: float
    dropped: int

    def begin(self) -> int:
        """Return from which byte of the run's events it goes on."""

    def send(self, offset: int, lines: bytes) -> None:
        """Take whole lines, the bytes from `offset` on; they are safe there when it returns."""

    def close(self) -> None:
        """End; no call follows."""


class Sender:
    """Brings what a source has to a destination, in a thread, until it is told that no more will come.

    A destination that fails is tried again after a pause; one that hangs keeps this thread alone.
    """

    def __init__(self, source: Source, destination: Destination) -> None:
        self._source, self._destination = source, destination
        self._offset: int | None = None
        self._error: Exception | None = None
        self._failures = 0
        self._answered = time.monotonic()
        self._ending = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"send the record to {destination.name}", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Send what is there now, and then no more."""
        self._ending.set()

    def join(self, seconds: float | None) -> bool:
        """Wait until it has ended; return whether everything arrived."""
        self._thread.join(seconds)
        return not self._thread.is_alive() and self._error is None

    @property
    def has_answered(self) -> bool:
        """Whether the destination has said from where it goes on."""
        return self._offset is not None

    def state(self, size: int) -> dict[str, Any]:
        """Return how it stands where the events have `size` bytes, as an event `sink` tells it."""
        behind = max(0, size - (self._offset or 0))
        error = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        if error is None and behind and time.monotonic() - self._answered > LATE_SECONDS:
            error = f"no answer for more than {LATE_SECONDS:.0f} seconds"
        return {
            "name": self._destination.name,
            "behind_bytes": behind,
            "dropped": self._destination.dropped,
            "error": error,
        }

    def _run(self) -> None:
        while True:
            ending = self._ending.is_set()  # before it is looked at what there is
            try:
                sent = self._send_next()
                if ending and not sent:
                    self._destination.close()
            except Exception as error:  # noqa: BLE001  libraries and users have errors of their own
                self._note(error)
                if ending and self._failures >= TRIES_AT_THE_END:
                    return
                pause = min(FIRST_PAUSE_SECONDS * 2 ** (self._failures - 1), LONGEST_PAUSE_SECONDS)
                (time.sleep if ending else self._ending.wait)(pause)
                continue
            self._error, self._failures, self._answered = None, 0, time.monotonic()
            if ending and not sent:
                return
            if sent < MUCH_BYTES:
                self._ending.wait(self._destination.pause_seconds)

    def _send_next(self) -> int:
        """Send what comes next, and return how many bytes that was."""
        if self._offset is None:
            self._offset = self._destination.begin()
        lines = self._source.read(self._offset)
        if lines:
            self._destination.send(self._offset, lines)
            self._offset += len(lines)
        return len(lines)

    def _note(self, error: Exception) -> None:
        if self._error is None:
            text = "the record does not reach %s: %s: %s; it is tried again"
            logging.getLogger("samestep").warning(
                text, self._destination.name, type(error).__name__, error
            )
        self._error = error
        self._failures = min(self._failures + 1, MOST_FAILURES)
