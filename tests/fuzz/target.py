"""What a reader is, as fuzzing sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Target:
    """Something that reads: `make` makes what it is given, files if need be, and `read` reads that."""

    name: str
    make: Callable[[Random], Any]
    read: Callable[[Any], object]
    allowed: tuple[type[Exception], ...]
    reads_elsewhere: bool = False  # where the user's own file may name any other
