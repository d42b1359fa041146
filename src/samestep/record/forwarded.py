"""How far a run's record was forwarded, kept in its directory: whoever forwards next goes on from there."""

from __future__ import annotations

import fcntl
import json
import threading
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final

from samestep.errors import RecordError
from samestep.record.events import FILE_NAME
from samestep.record.parts import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

FILE: Final = f"{FOLDER}/forwarded.json"
LOCK: Final = f"{FOLDER}/lock"


class Forwarded:
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
