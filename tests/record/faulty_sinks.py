"""Sinks that hang, fail or stop. No torch: the exporter imports this module."""

from __future__ import annotations

import os
import signal
import threading
import time
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
        """Stop."""
        os.kill(os.getpid(), signal.SIGSTOP)


class Killed(Hanging):
    """A sink that kills its process, whose child keeps the pipes open until it is released."""

    def take(self, event: Any) -> None:
        """Do so in the first call."""
        if not (self._directory / "hanging").exists():
            (self._directory / "hanging").touch()
            if os.fork() > 0:
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(0)
            while not (self._directory / "released").exists():
                time.sleep(0.01)
            os._exit(0)
