"""The position of each sink in a run's record, and the thread that sends the rest."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from samestep.errors import RecordError
from samestep.masking import mask_urls
from samestep.record.events import FILE_NAME
from samestep.record.files import FOLDER
from samestep.record.source import Source
from samestep.storage import make_folder, open_regular, read_regular, write_atomically

FILE: Final = f"{FOLDER}/cursor.json"
LOCK: Final = f"{FOLDER}/lock"
FIRST_PAUSE_SECONDS: Final = 1.0  # after a failure; doubles with each further one
MAX_PAUSE_SECONDS: Final = 30.0
FINAL_TRIES: Final = 2
EXPECTED_PAUSE_SECONDS: Final = 0.05
LARGEST_BYTES: Final = 2**20  # of the cursor
LARGE_BYTES: Final = 2**20  # after a read of this size, more data is probably available
SLOW_SECONDS: Final = 10.0
logger: Final = logging.getLogger("samestep")


class Cursor:
    """Positions by sink name, saved in a small file of the run's directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._path, self._events = directory / FILE, directory / FILE_NAME
        self._lock = threading.Lock()
        self._positions: dict[str, int] = {}
        with suppress(OSError, RecursionError, ValueError):
            saved = json.loads(read_regular(self._path, LARGEST_BYTES))
            items = saved.items() if isinstance(saved, dict) else ()
            self._positions = {name: n for name, n in items if type(n) is int and n >= 0}

    def get(self, name: str) -> int | None:
        """Return the number saved under a name, or None if there is none."""
        return self._positions.get(name)

    def offset(self, name: str) -> int:
        """Return the saved offset in the events file, or 0 if that file is shorter."""
        position = self._positions.get(name, 0)
        return position if position <= self._events.stat().st_size else 0

    def save(self, name: str, value: int) -> None:
        """Save a number. If the disk is full, events are sent again after a kill."""
        with self._lock:
            if self._positions.get(name) == value:
                return
            self._positions[name] = value
            with suppress(OSError):
                write_atomically(self._path, json.dumps(self._positions).encode())


def lock(directory: Path) -> IO[bytes] | None:
    """Return a file that locks the record for one exporter until closed, or None if it is locked.

    Raises `RecordError` if the directory is not writable.
    """
    try:
        make_folder(directory / FOLDER)
        file = os.fdopen(open_regular(directory / LOCK, os.O_RDWR | os.O_CREAT), "r+b")
    except OSError as error:
        raise RecordError(
            f"{directory / LOCK} cannot be written: {error.strerror}; pass a run's directory"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # this file system has no locks
        pass
    return file


class Destination(ABC):
    """A destination of a record. Calls may raise any exception, and are then repeated.

    Attributes: `name`, as the user gave it, but without secrets; `pause_seconds`, the time between
    two calls of `send` in which more events accumulate; `dropped`, the number of events and images
    it rejected; `must_work`, whether it is an error of the run that no call has ever returned;
    `is_slow`, whether a call may take minutes, for which a run's end waits;
    `waits_until`, the time, in seconds since 1970, until which an event is expected that belongs to
    those that were sent.
    """

    pause_seconds: float
    is_slow = False
    waits_until = 0.0

    def __init__(self, name: str, directory: Path, source: Source, cursor: Cursor) -> None:
        self.name, self.dropped, self.must_work = mask_urls(name), 0, False
        self._directory, self._source, self._cursor = directory, source, cursor

    @abstractmethod
    def open(self) -> int:
        """Connect, and return the offset in the run's events from which to continue."""

    @abstractmethod
    def send(self, offset: int, lines: bytes) -> None:
        """Store complete lines, the bytes from `offset` on; return when they are safe."""

    def close(self) -> None:  # noqa: B027  not every destination has something to release
        """Release the destination; no call follows."""


class Sender:
    """Sends the events of a source to a destination, in a thread, until `finish`.

    A destination that fails is retried after a pause; one that hangs blocks only this thread.
    """

    def __init__(self, source: Source, destination: Destination) -> None:
        self._source, self._destination = source, destination
        self._offset: int | None = None
        self._error: BaseException | None = None
        self._last_response = time.monotonic()
        self._finishing = threading.Event()
        name = f"send the record to {destination.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Request that the thread exits once all present events are sent."""
        self._finishing.set()

    def wait(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds for the thread; return whether everything was sent."""
        self._thread.join(timeout)
        return not self._thread.is_alive() and self._error is None

    @property
    def has_never_worked(self) -> bool:
        """Whether every call raised, of a destination that must work."""
        return self._destination.must_work and self._error is not None

    @property
    def is_slow(self) -> bool:
        """Whether a call may take minutes, for which a run's end waits."""
        return self._destination.is_slow

    @property
    def is_open(self) -> bool:
        """Whether the destination has reported from where to continue."""
        return self._offset is not None

    def status(self, size: int) -> dict[str, Any]:
        """Return the fields of a `sink` event, given the current size of the events in bytes."""
        behind = max(0, size - (self._offset or 0))
        error = (
            None
            if self._error is None
            else mask_urls(f"{type(self._error).__name__}: {self._error}")
        )
        waited = 0.0 if self.is_slow else time.monotonic() - self._last_response
        if error is None and behind and waited > SLOW_SECONDS:
            error = f"no response for more than {SLOW_SECONDS:.0f} seconds"
        name, dropped = self._destination.name, self._destination.dropped
        return {"name": name, "behind_bytes": behind, "dropped": dropped, "error": error}

    def _run(self) -> None:
        failures, pause = 0, FIRST_PAUSE_SECONDS
        while True:
            # checked before the source is read, so that no event before `finish` is missed
            finishing = self._finishing.is_set()
            try:
                sent = self._send_next()
                expects_more = finishing and time.time() < self._destination.waits_until
                if finishing and not sent and not expects_more:
                    self._destination.close()
            except BaseException as error:  # noqa: BLE001  SystemExit would end the thread silently
                if self._error is None:
                    message = "the record cannot be sent to %s (%s); retrying"
                    text = mask_urls(f"{type(error).__name__}: {error}")
                    logger.warning(message, self._destination.name, text)
                self._error = error
                failures += 1
                if finishing and failures >= FINAL_TRIES:
                    return
                (time.sleep if finishing else self._finishing.wait)(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                continue
            failures, pause = 0, FIRST_PAUSE_SECONDS
            self._error, self._last_response = None, time.monotonic()
            if expects_more:
                time.sleep(EXPECTED_PAUSE_SECONDS)
                continue
            if finishing and not sent:
                return
            if sent < LARGE_BYTES:
                self._finishing.wait(self._destination.pause_seconds)

    def _send_next(self) -> int:
        if self._offset is None:
            self._offset = self._destination.open()
        if lines := self._source.read(self._offset):
            self._destination.send(self._offset, lines)
            self._offset += len(lines)
        return len(lines)
