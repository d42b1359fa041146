"""The highest memory of workers, as the kernel counts it while they run."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.errors import RecordError
from samestep.record import read_events

if TYPE_CHECKING:
    import subprocess

PAUSE_SECONDS: Final = 0.02
# of resident memory, since the process was forked
_HIGHEST: Final = re.compile(r"^VmHWM:\s*(\d+) kB", re.MULTILINE)


def watch(process: subprocess.Popen[bytes], directory: Path) -> int:
    """Wait for the end of a run in `directory`; return the highest memory of any of its workers, in bytes.

    The kernel keeps the highest itself: all that may be missed is what a worker takes in its last
    moments.
    """
    workers: list[int] = []
    highest = 0
    while process.poll() is None:
        workers = workers or _workers(directory)
        highest = max([highest, *map(_peak, workers)])
        time.sleep(PAUSE_SECONDS)
    return highest


def _workers(directory: Path) -> list[int]:
    try:
        starts = [
            event["workers"] for event in read_events(directory) if event["event"] == "started"
        ]
    except RecordError:  # it has not begun
        return []
    return [worker["pid"] for workers in starts for worker in workers]


def _peak(pid: int) -> int:
    try:
        match = _HIGHEST.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:  # it has ended
        return 0
    return 1024 * int(match[1]) if match else 0
