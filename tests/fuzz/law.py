"""What must hold whatever is read: the documented error or a result, soon, in little memory, and no code is run."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 20.0  # of a busy machine; a reader takes milliseconds
MOST_BYTES = 2**28
ROOM_BYTES = 2**32
HARMLESS = {"os.listdir", "os.scandir"}
FORBIDDEN = (
    "compile",
    "ctypes.",
    "exec",
    "import",
    "os.",
    "pickle.",
    "shutil.",
    "socket.",
    "subprocess.",
    "urllib.",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class HangError(BaseException):
    """A reader took too long; no reader catches it."""


class Law:
    """Watches this process, from now on and for ever: Python's audit hooks cannot be removed. So it is one of its own."""

    def __init__(self, folder: Path) -> None:
        """Only files under `folder` may be read."""
        self._folder = folder
        self._acts: list[str] = []
        self._watches = False
        self._reads_elsewhere = False
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + ROOM_BYTES, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, _raise_hang)
        sys.addaudithook(self._note)

    def breach(
        self,
        read: Callable[[], Any],
        allowed: tuple[type[Exception], ...],
        *,
        reads_elsewhere: bool = False,
    ) -> str | None:
        """Read, and tell how the law was broken; None if it was not."""
        self._acts, self._reads_elsewhere = [], reads_elsewhere
        before = _most_memory()
        try:
            with self._watching():
                read()
        except allowed:
            pass
        except BaseException:  # noqa: BLE001  anything else breaks the law
            return traceback.format_exc(limit=-8)
        if self._acts:
            return f"it did what reading needs not: {', '.join(self._acts)}"
        if (grown := _most_memory() - before) > MOST_BYTES:
            return f"it took {grown // 2**20} MiB of memory"
        return None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        # for what no signal interrupts
        faulthandler.dump_traceback_later(3 * LONGEST_SECONDS, exit=True)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
        self._watches = True
        try:
            yield
        finally:
            self._watches = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.cancel_dump_traceback_later()

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._watches:
            return
        if event == "open":
            self._note_open(*args)
        elif event.startswith(FORBIDDEN) and event not in HARMLESS:
            self._acts.append(f"{event} {args!r}"[:200])

    def _note_open(self, path: Any, _mode: Any, flags: int) -> None:
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        inside = self._folder in Path(os.path.realpath(name)).parents
        if flags & WRITING or not (inside or self._reads_elsewhere):
            self._acts.append(f"open {name!r}")


def _raise_hang(*_: object) -> None:
    raise HangError(f"it took more than {LONGEST_SECONDS:g} seconds")


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
