"""Sinks that misbehave, for the process that forwards a record: without torch, since that process has none."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def name_of(kind: type) -> str:
    """Return how the option `sinks` names a class."""
    return f"{kind.__module__}:{kind.__name__}"


class Hanging:
    """Takes nothing and never answers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take(self, event: Any) -> None:
        """Say that it was called, and hang."""
        (self._directory / "hanging").touch()
        threading.Event().wait()

    def image(self, event: Any, data: bytes) -> None:
        """Hang."""
        self.take(event)

    def flush(self) -> None:
        """Have nothing to do."""

    def close(self) -> None:
        """Have nothing to do."""


class Refusing(Hanging):
    """Takes nothing, and says so."""

    def take(self, event: Any) -> None:
        """Refuse."""
        raise ConnectionError("no route")
