"""The interface of a fuzzed reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Target:
    """A reader: `make` makes an input, including its files, and `read` reads it."""

    name: str
    make: Callable[[Random], Any]
    read: Callable[[Any], object]
    allowed: tuple[type[Exception], ...]
    reads_elsewhere: bool = False  # if its input may name any other file
    is_slow: bool = False  # more than 5 ms per input
    writes: bool = False  # if it writes files, in its folder only
