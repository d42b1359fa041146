"""Memory of the launcher's that outlives its workers: how far their run is, and room for copies of its state."""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from samestep.host import unnamed_file, unnamed_memory

ATTEMPT: Final = "SAMESTEP_INTERNAL_ATTEMPT"  # the attempt number, from 0
VARIABLE: Final = "SAMESTEP_INTERNAL_KEPT"
SLOTS: Final = 2  # a worker: while one is being written, the other is whole
_BOARD_BYTES: Final = mmap.PAGESIZE
_STEP: Final = struct.Struct("<q")  # first on the board
_UNDER_WAY: Final = struct.Struct("<?")  # then; and the path of the run's directory
_NO_RUN: Final = -1
_MOST_MODULES: Final = 1 << 20  # bytes of their names


@dataclass(frozen=True)
class LauncherState:
    """Anonymous files of a launcher, open in all workers that it forks: the kernel frees them however all of them end.

    `slots[r]` are those of the host's r-th worker for copies of its state; there are none where the
    system has no memory without a name.
    """

    board: int
    modules: int
    slots: Sequence[Sequence[int]]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LauncherState | None:
        """Return what the launcher of this process keeps; None where it keeps nothing, or another started this process."""
        if VARIABLE not in environment:
            return None
        return cls.of(*map(int, environment[VARIABLE].split(",")))

    @classmethod
    def of(cls, board: int, modules: int, *slots: int) -> LauncherState:
        """Return it with the slots dealt out to workers."""
        return cls(
            board, modules, [slots[start : start + SLOTS] for start in range(0, len(slots), SLOTS)]
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which workers find it."""
        return {
            VARIABLE: ",".join(
                map(
                    str, [self.board, self.modules, *(file for pair in self.slots for file in pair)]
                )
            )
        }

    def report_start(self, directory: str, step: int) -> None:
        """Say that a run began, in a directory (its whole path, "" for none): from now on it can be taken up again."""
        # a field
        os.pwrite(
            self.board, _STEP.pack(step) + _UNDER_WAY.pack(True) + os.fsencode(directory) + b"\0", 0
        )

    def report_step(self, step: int) -> None:
        """Say how many steps are done."""
        os.pwrite(self.board, _STEP.pack(step), 0)

    @property
    def step(self) -> int | None:
        """How many steps are done, None before the run began."""
        (step,) = _STEP.unpack(os.pread(self.board, _STEP.size, 0))
        return None if step == _NO_RUN else step

    @property
    def directory(self) -> str:
        """The run's directory, "" for none or before the run began."""
        return os.fsdecode(
            os.pread(self.board, _BOARD_BYTES, _STEP.size + _UNDER_WAY.size).partition(b"\0")[0]
        )

    def begin_attempt(self) -> None:
        """Say that workers are started, who have not come to the run yet."""
        os.pwrite(self.board, _UNDER_WAY.pack(False), _STEP.size)

    @property
    def is_under_way(self) -> bool:
        """Whether the workers that were started last have come to the run."""
        (under_way,) = _UNDER_WAY.unpack(os.pread(self.board, _UNDER_WAY.size, _STEP.size))
        return bool(under_way)

    def report_modules(self) -> None:
        """Say which modules from installed packages this process has, in the order in which their imports began."""
        names = [
            name
            for name, module in list(sys.modules.items())
            if "-packages" in (getattr(module, "__file__", None) or "")
        ]
        os.pwrite(self.modules, json.dumps(names).encode(), 0)

    @property
    def modules_reported(self) -> list[str] | None:
        """What `report_modules` said, None before that."""
        try:
            names: list[str] = json.loads(os.pread(self.modules, _MOST_MODULES, 0))
        except ValueError:  # not yet, or being said
            return None
        return names


@contextmanager
def open_launcher_state(workers: int) -> Iterator[LauncherState]:
    """Yield what outlives so many workers of this host."""
    files = [unnamed_file("samestep-kept") for _ in range(2)]
    files += [
        file
        for _ in range(SLOTS * workers)
        if (file := unnamed_memory("samestep-kept")) is not None
    ]
    try:
        kept = LauncherState.of(*files)
        # a field
        os.pwrite(kept.board, _STEP.pack(_NO_RUN) + _UNDER_WAY.pack(False), 0)
        yield kept
    finally:
        for file in files:
            os.close(file)
