"""Rules for readers of any input: a result or a documented error, soon, in little memory.

Readers also must not run code, or read files outside their folder. Only those that are meant to
write files may do so, in their folder.
"""

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

MOST_CPU_SECONDS = 20.0  # a reader takes milliseconds
MOST_SECONDS = 100.0  # for a hang that needs no CPU
MOST_BYTES = 2**28
ROOM_BYTES = 2**32
HARMLESS = {"os.listdir", "os.scandir"}
MACHINE = "/proc/sys/kernel/random/boot_id"  # tells which workers share memory
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
    """A reader took too long. Readers do not catch this error."""


class Sandbox:
    """Watch this process from now on. Python's audit hooks cannot be removed."""

    def __init__(self, folder: Path) -> None:
        """Allow reading files under `folder` only."""
        self._folder = folder
        self._acts: list[str] = []
        self._watches = False
        self._reads_elsewhere = self._writes = False
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + ROOM_BYTES, hard_limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, _raise_hang)
        sys.addaudithook(self._note)

    def violation(
        self,
        read: Callable[[], Any],
        allowed: tuple[type[Exception], ...],
        *,
        reads_elsewhere: bool = False,
        writes: bool = False,
    ) -> str | None:
        """Read an input; return the violated rule, or None."""
        self._acts, self._reads_elsewhere, self._writes = [], reads_elsewhere, writes
        before = _most_memory()
        try:
            with self._watching():
                read()
        except allowed:
            pass
        except BaseException:  # noqa: BLE001  any other error is a violation
            return traceback.format_exc(limit=-8)
        if self._acts:
            return f"it did more than reading: {', '.join(self._acts)}"
        if (grown := _most_memory() - before) > MOST_BYTES:
            return f"it took {grown // 2**20} MiB of memory"
        return None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_SECONDS)
        self._watches = True
        try:
            yield
        finally:
            self._watches = False
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            faulthandler.cancel_dump_traceback_later()

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._watches:
            return
        if event == "open":
            self._note_open(*args)
        elif event == "os.truncate" and isinstance(args[0], int):
            pass  # memory that workers share; a file must have been opened for writing
        elif self._writes and event.startswith(("os.", "shutil.")) and self._stays(args):
            pass
        elif event.startswith(FORBIDDEN) and event not in HARMLESS:
            self._acts.append(f"{event} {args!r}"[:200])

    def _note_open(self, path: Any, _mode: Any, flags: int) -> None:
        if isinstance(path, int):
            return
        name, inside = os.fsdecode(path), self._is_inside(path)
        if name == "." or (flags & os.O_NOFOLLOW and "/" not in name and name != ".."):
            inside = True  # of the folder that was opened before: no link, so it leads nowhere else
        if name == MACHINE and not flags & WRITING:
            return
        may_write = self._writes and inside
        if (flags & WRITING and not may_write) or not (inside or self._reads_elsewhere):
            self._acts.append(f"open {name!r}")

    def _stays(self, args: tuple[Any, ...]) -> bool:
        """Return whether all paths of a call are in the folder."""
        return all(
            self._is_inside(path) for path in args if isinstance(path, (str, bytes, os.PathLike))
        )

    def _is_inside(self, path: Any) -> bool:
        return self._folder in Path(os.path.realpath(os.fsdecode(path))).parents


def _raise_hang(*_: object) -> None:
    raise HangError(f"it took more than {MOST_CPU_SECONDS:g} seconds")


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
