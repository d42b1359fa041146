"""How fast the disk of a run's directory is, written to as snapshots are."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.snapshot.files import write_durably

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE_BYTES: Final = 16 << 20
SMALL_BYTES: Final = 4096
SEGMENT_BYTES: Final = 1 << 20
SPARED_BYTES: Final = 1 << 30  # left alone of what is free
LARGE_TIMES, QUICK_LARGE_TIMES = 10, 3
SMALL_TIMES, QUICK_SMALL_TIMES = 50, 10
# for each of the three, so that a slow disk takes no longer
MOST_SECONDS, QUICK_MOST_SECONDS = 2.0, 0.4

Timed = tuple[str, list[float], int]


def measure(directory: Path, *, quick: bool) -> list[Timed]:
    """Return seconds by what was done, and of how many bytes; nothing where the directory takes no files."""
    with suppress(OSError):
        if shutil.disk_usage(directory).free > SPARED_BYTES:
            with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=directory) as folder:
                return _measure(Path(folder), quick=quick)
    return []


def _measure(folder: Path, *, quick: bool) -> list[Timed]:
    buffer = mmap.mmap(-1, LARGE_BYTES)  # it starts at a page, as what snapshots are written from
    buffer.write(os.urandom(LARGE_BYTES))  # which no file system compresses
    large, small = folder / "large", folder / "small"
    times, few, seconds = (
        (QUICK_LARGE_TIMES, QUICK_SMALL_TIMES, QUICK_MOST_SECONDS)
        if quick
        else (LARGE_TIMES, SMALL_TIMES, MOST_SECONDS)
    )
    return [
        (
            "file written and synced",
            _timed(
                lambda: write_durably(large, memoryview(buffer), SEGMENT_BYTES, lambda: None),
                times,
                seconds,
            ),
            LARGE_BYTES,
        ),
        ("file read, not cached", _timed(lambda: _read(large), times, seconds), LARGE_BYTES),
        (
            "small file written and synced",
            _timed(lambda: _write_small(small), few, seconds),
            SMALL_BYTES,
        ),
    ]


def _timed(action: Callable[[], object], times: int, most_seconds: float) -> list[float]:
    """Return the seconds of each time, at least one and no more than fit."""
    begun = time.perf_counter()
    found: list[float] = []
    while len(found) < times and (not found or time.perf_counter() - begun < most_seconds):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return found


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(SEGMENT_BYTES):
            pass


def _write_small(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(bytes(SMALL_BYTES))
        os.fsync(file.fileno())
