"""The launcher's memory that outlives its workers: a run's progress, and slots for their state."""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Final

from samestep.host import anonymous_file, anonymous_memory

ATTEMPT: Final = "SAMESTEP_INTERNAL_ATTEMPT"  # the attempt number, from 0
LAUNCHER_STATE: Final = "SAMESTEP_INTERNAL_LAUNCHER_STATE"
SLOTS: Final = 2  # per worker: while one is being written, the other is valid
_BOARD_BYTES: Final = mmap.PAGESIZE
_STEP: Final = struct.Struct("<q")  # first on the board
_UNDER_WAY: Final = struct.Struct("<?")  # second; third is the path of the run's directory
_NO_RUN: Final = -1
_MAX_MODULES: Final = 1 << 20  # bytes of their names


@dataclass(frozen=True)
class LauncherState:
    """Anonymous files of a launcher, open in all workers that it forks.

    The kernel frees them however the processes exit. `slots[r]` hold copies of the state of the
    host's r-th worker; `slots` is empty if the system has no anonymous memory.
    """

    board: int
    modules: int
    slots: Sequence[Sequence[int]]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LauncherState | None:
        """Return the state of this process's launcher, None if it has none."""
        if LAUNCHER_STATE not in environment:
            return None
        return cls.from_files(*map(int, environment[LAUNCHER_STATE].split(",")))

    @classmethod
    def from_files(cls, board: int, modules: int, *slots: int) -> LauncherState:
        """Return the state in these files, with the slots assigned to workers."""
        starts = range(0, len(slots), SLOTS)
        return cls(board, modules, [slots[start : start + SLOTS] for start in starts])

    @property
    def environment(self) -> dict[str, str]:
        """The variable through which workers find it."""
        files = [self.board, self.modules, *chain.from_iterable(self.slots)]
        return {LAUNCHER_STATE: ",".join(map(str, files))}

    def report_start(self, directory: str, step: int) -> None:
        """Record that a run began in a directory (full path, "" for none), so it can be resumed."""
        path = os.fsencode(directory) + b"\0"
        os.pwrite(self.board, _STEP.pack(step) + _UNDER_WAY.pack(True) + path, 0)

    def report_step(self, step: int) -> None:
        """Record the number of completed steps."""
        os.pwrite(self.board, _STEP.pack(step), 0)

    @property
    def step(self) -> int | None:
        """The number of completed steps, None before the run began."""
        (step,) = _STEP.unpack(os.pread(self.board, _STEP.size, 0))
        return None if step == _NO_RUN else step

    @property
    def directory(self) -> str:
        """The run's directory, "" for none or before the run began."""
        path = os.pread(self.board, _BOARD_BYTES, _STEP.size + _UNDER_WAY.size)
        return os.fsdecode(path.partition(b"\0")[0])

    def begin_attempt(self) -> None:
        """Record that workers are being started and have not begun the run."""
        os.pwrite(self.board, _UNDER_WAY.pack(False), _STEP.size)

    @property
    def is_under_way(self) -> bool:
        """Whether the workers of the current attempt have begun the run."""
        (under_way,) = _UNDER_WAY.unpack(os.pread(self.board, _UNDER_WAY.size, _STEP.size))
        return bool(under_way)

    def report_modules(self) -> None:
        """Record this process's modules from installed packages, in import order."""
        names = [
            name
            for name, module in list(sys.modules.items())
            if "-packages" in (getattr(module, "__file__", None) or "")
        ]
        os.pwrite(self.modules, json.dumps(names).encode(), 0)

    @property
    def modules_reported(self) -> list[str] | None:
        """The modules recorded by `report_modules`, None before that."""
        try:
            names: list[str] = json.loads(os.pread(self.modules, _MAX_MODULES, 0))
        except ValueError:  # not written yet, or being written
            return None
        return names


@contextmanager
def open_launcher_state(workers: int) -> Iterator[LauncherState]:
    """Yield the state for a number of workers on this host."""
    name = "samestep-state"
    slots = [anonymous_memory(name) for _ in range(SLOTS * workers)]
    files = [anonymous_file(name), anonymous_file(name), *(f for f in slots if f is not None)]
    try:
        state = LauncherState.from_files(*files)
        os.pwrite(state.board, _STEP.pack(_NO_RUN), 0)
        state.begin_attempt()
        yield state
    finally:
        for file in files:
            os.close(file)
