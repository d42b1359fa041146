"""What a worker leaves to its launcher: rank 0's result, or how it failed."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from samestep.errors import WorldError

if TYPE_CHECKING:
    from types import TracebackType

LEADING_MODULES: Final = {"samestep.launch.worker", "samestep.launch.script", "runpy"}


@dataclass(frozen=True)
class Failure:
    """How a worker failed. `at` is in seconds of the monotonic clock, which all processes of a host share."""

    at: float
    because_of_others: bool
    summary: str
    traceback: str

    @classmethod
    def of_error(cls, error: BaseException) -> Failure:
        """Tell an exception that just reached the end of a worker, from the first line of the user's own code on."""
        at = time.monotonic()
        if isinstance(error, SystemExit):
            summary = error.code if isinstance(error.code, str) else f"exited with status {error.code}"
            return cls(at, because_of_others=False, summary=summary, traceback="")
        lines = traceback.format_exception(type(error), error, _users_part(error.__traceback__))
        summary = f"{type(error).__name__}: {error}".removesuffix(": ")
        return cls(at, because_of_others=isinstance(error, WorldError), summary=summary, traceback="".join(lines))

    @classmethod
    def of_exit(cls, code: int, at: float) -> Failure:
        """Tell an end without last words; a negative `code` is the number of the signal that killed the worker."""
        if code >= 0:
            summary = f"exited with status {code}"
        else:
            names = {number.value: number.name for number in signal.Signals}
            summary = f"killed by {names.get(-code, f'signal {-code}')}"
        return cls(at, because_of_others=False, summary=summary, traceback="")


class Report:
    """Memory that a worker shares with its launcher: it has no name, so nothing is left of it however both end."""

    def __init__(self) -> None:
        self._memory = os.fdopen(os.memfd_create("samestep-report"), "w+b")

    def leave_result(self, result: Any) -> None:
        """Leave a worker's result: anything that can be pickled."""
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


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    while trace and trace.tb_next and trace.tb_frame.f_globals.get("__name__") in LEADING_MODULES:
        trace = trace.tb_next
    return trace
