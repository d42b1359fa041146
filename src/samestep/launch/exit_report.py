"""How a worker failed, as its launcher and the coordinator of several hosts tell it; needs no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Final

from samestep.errors import SamestepError
from samestep.host import anonymous_file

LEADING_MODULES: Final = {"samestep.launch.worker", "samestep.launch.local", "runpy"}


# What a program brings upon itself. Any other signal came from outside: a person, a scheduler, a
# kernel that is out of memory.
CRASHES: Final = {
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
}
OUT_OF_MEMORY: Final = "the kernel ran out of memory and ended a process of this host meanwhile: start fewer workers here, or a new run with more lanes"


@dataclass(frozen=True)
class Failure:
    """How a worker failed, with the exit `status` that tells of it.

    `at` is in seconds of the monotonic clock, which all processes of a host share. One
    `is_retryable` says nothing against going on.
    """

    at: float
    summary: str
    traceback: str = ""
    status: int = 1
    is_secondary: bool = False
    is_retryable: bool = False
    step: int | None = None
    host: str = ""

    @classmethod
    def of_error(cls, error: BaseException) -> Failure:
        """Tell an exception that just reached the end of a worker, from the first line of the user's own code on."""
        at = time.monotonic()
        if isinstance(error, SystemExit):
            if isinstance(error.code, int):
                return cls(at, f"exited with status {error.code}", status=error.code)
            return cls(at, str(error.code))
        lines = traceback.format_exception(type(error), error, _users_part(error.__traceback__))
        # the traceback ends with all of it
        summary = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        failure = cls(at, summary, "".join(lines))
        if not isinstance(error, SamestepError) or error.is_secondary:
            return replace(failure, is_secondary=isinstance(error, SamestepError))
        return replace(failure, is_retryable=error.is_retryable)

    @classmethod
    def of_exit(cls, code: int, at: float, *, out_of_memory: bool = False) -> Failure:
        """Tell an end without last words; a negative `code` is the number of the signal that ended the worker, or stopped it.

        `out_of_memory` says that the kernel ended processes for that meanwhile, of which this may
        be one.
        """
        if code >= 0:
            return cls(at, f"exited with status {code}", status=code)
        try:
            number = signal.Signals(-code)
        except ValueError:  # a real-time signal
            return cls(at, f"killed by signal {-code}", status=128 - code, is_retryable=True)
        summary = f"{'stopped' if number == signal.SIGSTOP else 'killed'} by {number.name}"
        if out_of_memory and number == signal.SIGKILL:
            summary += f" ({OUT_OF_MEMORY})"
        return cls(at, summary, status=128 - code, is_retryable=number not in CRASHES)

    def at_step(self, step: int | None) -> Failure:
        """Return the failure with where the run stood on this host; None before it began."""
        return replace(self, step=step, host="" if step is None else socket.gethostname())

    def __str__(self) -> str:
        return (
            self.summary
            if self.step is None
            else f"{self.summary} [step {self.step}, host {self.host}]"
        )


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    while trace and trace.tb_next and trace.tb_frame.f_globals.get("__name__") in LEADING_MODULES:
        trace = trace.tb_next
    return trace


class Report:
    """Memory that a worker shares with its launcher: it has no name, so nothing is left of it however both end."""

    def __init__(self, file: int | None = None) -> None:
        """Open memory of its own, or that of another process's report, by its file."""
        self._memory = os.fdopen(anonymous_file("samestep-report") if file is None else file, "w+b")

    @property
    def file(self) -> int:
        """The open file, for another process."""
        return self._memory.fileno()

    def leave_result(self, result: Any) -> None:
        """Leave a worker's result: anything that can be pickled."""
        import torch

        torch.save(result, self._memory)
        self._memory.flush()

    def leave_failure(self, failure: Failure) -> None:
        """Leave a worker's failure, in place of a result that could not be left whole."""
        self._memory.seek(0)
        self._memory.truncate()
        self._memory.write(json.dumps(asdict(failure)).encode())
        self._memory.flush()

    def result(self) -> Any:
        """Return what the worker left with its tensors on the CPU, since a launcher must not use CUDA; None when nothing was left."""
        if self._memory.seek(0, os.SEEK_END) == 0:
            return None
        import torch

        self._memory.seek(0)
        # What is unpickled comes from a fork of this process, through memory that no other has.
        return torch.load(self._memory, map_location="cpu", weights_only=False)

    def failure(self) -> Failure | None:
        """Return the failure that the worker left, None when it was killed before or while it wrote."""
        self._memory.seek(0)
        try:
            return Failure(**json.loads(self._memory.read()))
        except ValueError:
            return None

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
