"""Sinks that hang, fail or stop. No torch: the exporter imports this module."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def name_of(kind: type) -> str:
    """Return the name of a class for the option `sinks`."""
    return f"{kind.__module__}:{kind.__name__}"


class Hanging:
    """A sink that blocks forever."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take(self, event: Any) -> None:
        """Note the call in a file, and hang."""
        (self._directory / "hanging").touch()
        threading.Event().wait()

    def image(self, event: Any, data: bytes) -> None:
        """Hang."""
        self.take(event)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Refusing(Hanging):
    """A sink that rejects every event."""

    def take(self, event: Any) -> None:
        """Fail."""
        raise ConnectionError("no route")


class Stopping(Hanging):
    """A sink that stops its process."""

    def take(self, event: Any) -> None:
        """Stop. The signal may reach another thread first, and this one goes on meanwhile."""
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()


class Forking(Hanging):
    """A sink that works, and leaves a process behind until that is released."""

    def take(self, event: Any) -> None:
        """Fork in the first call."""
        if (self._directory / "forked").exists():
            return
        if os.fork() == 0:
            while not (self._directory / "released").exists():
                time.sleep(0.01)
            os._exit(0)
        (self._directory / "forked").touch()


class Killed(Hanging):
    """A sink that kills its process, and leaves a program with its pipes until that is released."""

    def take(self, event: Any) -> None:
        """Do so in the first call."""
        if (self._directory / "hanging").exists():
            return
        files = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        pipes = [file for file in files if file > 2 and _is_pipe(file)]
        program = f"until [ -e '{self._directory}/released' ]; do sleep 0.01; done"
        subprocess.Popen(["sh", "-c", program], stdin=subprocess.DEVNULL, pass_fds=pipes)
        (self._directory / "hanging").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _is_pipe(file: int) -> bool:
    with suppress(OSError):  # closed, such as that of the folder
        return stat.S_ISFIFO(os.fstat(file).st_mode)
    return False
