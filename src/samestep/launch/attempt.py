"""Attempts of a run: the hosts that take part, how their workers failed, and the restart policy."""

from __future__ import annotations

import math
import os
import runpy
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from samestep.errors import (
    ConfigError,
    DivergenceError,
    RecordError,
    SamestepError,
    SnapshotError,
)
from samestep.host import SIGNALED

Message = Mapping[str, Any]

# Signals that a program causes itself. Any other signal was sent by a person, a scheduler, or a
# kernel that ran out of memory.
CRASHES: Final = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"}
OUT_OF_MEMORY: Final = (
    "the kernel ran out of memory and killed a process on this host: "
    "start fewer workers here, or start a new run with more lanes"
)
OWN: Final = f"{Path(__file__).parents[1]}{os.sep}"  # files of samestep
NCCL_ABORT: Final = (
    "perhaps by NCCL, which ends a process whose network or peers fail: see its last output"
)
LAUNCHER_MODULES: Final = (str(__package__), runpy.__name__)


class UsageExit(SystemExit):
    """The exit of a script that refuses its arguments: a status, and advice about them."""

    def __init__(self, status: int, advice: str) -> None:
        super().__init__(status)
        self.advice = advice


@dataclass(frozen=True)
class WorkerFailure:
    """Why worker `rank` failed, with its exit `status`.

    `at` is in seconds of the monotonic clock, which all processes of a host share; in the
    coordinator it is on the coordinator's clock. Workers are restarted only after failures that are
    `is_retryable`. A failure that `is_secondary` was caused by the failure of another worker. After
    one that `is_faulty`, the worker's host must not be used again.
    """

    rank: int
    at: float
    summary: str
    traceback: str = ""
    status: int = 1
    is_secondary: bool = False
    is_retryable: bool = False
    step: int | None = None  # None before the run began
    host: str = ""
    is_faulty: bool = False

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> WorkerFailure:
        """Describe an exception that ended a worker.

        The traceback starts in the user's code, and ends there for errors of samestep. There is
        none for an invalid option, or if files of the run cannot be written or read.
        """
        at = time.monotonic()
        if isinstance(error, SystemExit):
            if isinstance(error.code, int):
                advice = error.advice if isinstance(error, UsageExit) else ""
                return cls(rank, at, f"exited with status {error.code}", advice, error.code)
            return cls(rank, at, str(error.code))
        trace = error.__traceback__
        while trace and trace.tb_next:
            if not str(trace.tb_frame.f_globals.get("__name__")).startswith(LAUNCHER_MODULES):
                break
            trace = trace.tb_next
        # one line; the traceback ends with the complete message
        complete = f"{type(error).__name__}: {error}".removesuffix(": ")
        summary, _, more = complete.partition("\n")
        of_files = isinstance(error, (RecordError, SnapshotError))
        of_system = of_files and isinstance(error.__cause__, OSError)
        is_clear = isinstance(error, ConfigError) or of_system
        text = more if is_clear else _formatted(error, trace)
        status = error.status if isinstance(error, SamestepError) else 1
        if isinstance(error, KeyboardInterrupt):
            status = SIGNALED + signal.SIGINT
        secondary = isinstance(error, SamestepError) and error.is_secondary
        retryable = isinstance(error, SamestepError) and error.is_retryable and not secondary
        failure = cls(rank, at, summary, text, status, secondary, retryable)
        is_faulty = isinstance(error, DivergenceError) and retryable
        return replace(failure, is_faulty=is_faulty)

    @classmethod
    def of_exit(
        cls,
        rank: int,
        code: int,
        at: float,
        *,
        out_of_memory: bool = False,
        uses_nccl: bool = False,
    ) -> WorkerFailure:
        """Describe an exit without a report; a negative `code` is minus the signal's number.

        `out_of_memory`: the kernel killed processes to free memory since the worker started, and
        this worker may be one of them. `uses_nccl`: NCCL's watchdog aborts a process whose network
        or peers fail, so an abort may not be the program's own.
        """
        if code == 0:
            return cls(rank, at, "exited before its function returned, perhaps by os._exit(0)")
        if code > 0:
            return cls(rank, at, f"exited with status {code}", status=code)
        try:
            number = signal.Signals(-code)
        except ValueError:  # a real-time signal
            return cls(
                rank, at, f"killed by signal {-code}", status=SIGNALED - code, is_retryable=True
            )
        summary = f"{'stopped' if number == signal.SIGSTOP else 'killed'} by {number.name}"
        if out_of_memory and number == signal.SIGKILL:
            summary += f" ({OUT_OF_MEMORY})"
        aborted = uses_nccl and number == signal.SIGABRT
        if aborted:
            summary += f" ({NCCL_ABORT})"
        retryable = aborted or number.name not in CRASHES
        return cls(rank, at, summary, status=SIGNALED - code, is_retryable=retryable)

    @classmethod
    def of_message(cls, fields: Message, at: float) -> WorkerFailure:
        """Read a failure that a host reported. Raises `KeyError`, `TypeError` or `ValueError`."""
        return cls(
            rank=int(fields["rank"]),
            at=at,
            summary=str(fields["summary"]),
            traceback=str(fields["traceback"]),
            status=int(fields["status"]),
            is_secondary=bool(fields["is_secondary"]),
            is_retryable=bool(fields["is_retryable"]),
            step=None if fields["step"] is None else int(fields["step"]),
            host=str(fields["host"]),
            is_faulty=bool(fields.get("is_faulty")),
        )

    def __str__(self) -> str:
        where = "" if self.step is None else f" [step {self.step}, host {self.host}]"
        return f"{self.summary}{where}"


def _formatted(error: BaseException, trace: TracebackType | None) -> str:
    """Return a traceback, which ends at the user's line if samestep raised the error."""
    captured = traceback.TracebackException(type(error), error, trace)
    if isinstance(error, SamestepError):
        users = [
            n for n, frame in enumerate(captured.stack, 1) if not frame.filename.startswith(OWN)
        ]
        captured.stack = traceback.StackSummary.from_list(
            captured.stack[: users[-1] if users else None]
        )
    return "".join(captured.format())


@dataclass(frozen=True)
class ElasticPolicy:
    """Limits of a run: `min_nodes` to `max_nodes` hosts, with at most one worker per lane.

    The run fails after `max_restarts` consecutive restarts without a new step. Workers have
    `grace_period` seconds to snapshot when they are asked to stop.
    """

    min_nodes: int
    max_nodes: int
    lanes: int | None
    max_restarts: int
    grace_period: float


class RestartBudget:
    """Counts consecutive restarts without a new step, and the steps that hosts report."""

    def __init__(self, max_restarts: int) -> None:
        self.step: int | None = None  # the highest so far, None before the run began
        self._max_restarts = max_restarts
        self._used = 0
        self._used_at_step = -1

    def report_step(self, step: int) -> None:
        """Record a number of completed steps."""
        self.step = max(self.step or 0, step)

    def allows(self, failure: WorkerFailure) -> bool:
        """Return whether workers may be restarted after a failure."""
        if not failure.is_retryable or self.step is None:
            return False
        return (0 if self.step > self._used_at_step else self._used) < self._max_restarts

    def use(self) -> None:
        step = self.step or 0
        self._used = 1 if step > self._used_at_step else self._used + 1
        self._used_at_step = max(self._used_at_step, step)


@dataclass(eq=False)
class Node:
    """A host that joined the run, with room for `max_workers` workers."""

    name: str
    max_workers: int
    send: Callable[[Message], None]
    joined_at: float
    disconnect: Callable[[], None] = lambda: None
    leads: bool = False  # the run's first host, which runs the coordinator
    host: str = ""  # its name without a number
    trusted_at: float = 0.0  # when a run may stop to continue with this host
    last_seen: float = 0.0
    ready: bool = False
    leaving: bool = False
    failure: WorkerFailure | None = None  # of its hardware, for which it leaves
    first_rank: int = 0
    busy: bool = False  # has workers in the current attempt


class Phase(Enum):
    """The state of a run: waiting for hosts, running, stopping an attempt, or finished."""

    JOINING = auto()
    RUNNING = auto()
    STOPPING = auto()
    FINISHED = auto()


class StopReason(Enum):
    """The reason for stopping an attempt.

    RESTART: a failure after which the run continues. FAILURE: a failure that ends it. RESIZE: hosts
    join or leave. SIGNAL: a signal ends the run.
    """

    RESTART = auto()
    FAILURE = auto()
    RESIZE = auto()
    SIGNAL = auto()


@dataclass
class Attempt:
    """One start of all workers, on `nodes` in the order of their ranks. Times are in seconds."""

    number: int
    nodes: list[Node] = field(default_factory=list)
    failures: list[WorkerFailure] = field(default_factory=list)
    decide_at: float = math.inf
    stop_reason: StopReason | None = None
    signal: int = 0
    exited_on_request: bool = False  # workers took a snapshot and exited, to be resized
    kill_at: float = math.inf
    overdue: bool = False  # `kill_at` is the end of the grace period
    give_up_at: float = math.inf

    @property
    def first_failure(self) -> WorkerFailure | None:
        """The earliest failure that is known, primary failures first."""
        return min(
            self.failures, key=lambda failure: (failure.is_secondary, failure.at), default=None
        )

    def failure_besides(self, number: int) -> WorkerFailure | None:
        """Return the earliest failure that neither a signal nor another failure has caused."""
        others = (
            failure
            for failure in self.failures
            if not failure.is_secondary and failure.status != SIGNALED + number
        )
        return min(others, key=lambda failure: failure.at, default=None)

    @property
    def busy_nodes(self) -> list[Node]:
        """Hosts that still have workers."""
        return [node for node in self.nodes if node.busy]
