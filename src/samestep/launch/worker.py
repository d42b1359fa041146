"""A worker's entry point, its stop signals, and its report to the launcher."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, NoReturn

from samestep.config import Config
from samestep.handoff import ATTEMPT, LauncherState
from samestep.host import anonymous_file, end_with_parent
from samestep.launch.attempt import WorkerFailure

FORK: Final = multiprocessing.get_context("fork")
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ECHO_SECONDS: Final = 1.0


class StopSignals:
    """The signals that asked this process to stop, in order, in `received`.

    A signal within a second of another does not count: timeout(1) and others send one to a process
    and then to its group.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._received_at = 0.0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record signals instead of acting on them; restore the previous handlers at the end.

        Ignored signals stay ignored (nohup). Off the main thread, where Python allows no handlers,
        nothing is recorded.
        """
        handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if (handler := signal.getsignal(number)) not in {signal.SIG_IGN, None}:
                    handlers[number] = handler
                    signal.signal(number, self._record)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _record(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if not self.received or now - self._received_at > ECHO_SECONDS:
            self.received.append(signal.Signals(number))
            self._received_at = now

    def reset(self) -> None:
        """Restore the default handlers in a worker, and raise the signals that it missed."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                interrupts = number is signal.SIGINT
                handler = signal.default_int_handler if interrupts else signal.SIG_DFL
                signal.signal(number, handler)
        for number in self.received:
            signal.raise_signal(number)


class Report:
    """A `file` in memory that passes a worker's result or failure to its launcher."""

    def __init__(self, file: int | None = None) -> None:
        """Open new memory, or a file that another process has opened."""
        self.file = anonymous_file("samestep-report") if file is None else file
        self._memory = os.fdopen(self.file, "w+b")

    def write_result(self, result: Any) -> None:
        """Write a worker's result, which must be picklable."""
        import torch

        torch.save(result, self._memory)
        self._memory.flush()

    def write_failure(self, failure: WorkerFailure) -> None:
        """Write a worker's failure, replacing an incomplete result."""
        self._memory.seek(0)
        self._memory.truncate()
        self._memory.write(json.dumps(asdict(failure)).encode())
        self._memory.flush()

    def result(self) -> Any:
        """Return the result, None if there is none.

        Its tensors are on the CPU: a launcher must not use CUDA.
        """
        if self._memory.seek(0, os.SEEK_END) == 0:
            return None
        import torch

        self._memory.seek(0)
        # safe: only forks of this process can write to this memory
        return torch.load(self._memory, map_location="cpu", weights_only=False)

    def failure(self) -> WorkerFailure | None:
        """Return the failure; None if the worker was killed before it was written completely."""
        self._memory.seek(0)
        try:
            return WorkerFailure(**json.loads(self._memory.read()))
        except ValueError:
            return None

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()


@dataclass(frozen=True)
class LocalAttempt:
    """An attempt on this host: ranks `first_rank` to `first_rank + local_workers - 1` of `workers`.

    `environment` has the variables with the address of the attempt's store, such as MASTER_ADDR.
    """

    number: int
    first_rank: int
    local_workers: int
    workers: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """The function that this host's workers run, and what they share with their launcher."""

    body: Callable[[], Any]
    config: Config
    environment: Mapping[str, str]
    launcher_state: LauncherState
    signals: StopSignals
    launcher_pid: int

    def run(
        self, attempt: LocalAttempt, local_rank: int, report: Report, take_over: Callable[[], None]
    ) -> NoReturn:
        """Run the body in a forked worker, report its result or failure, and exit."""
        # Exit functions and uncollected garbage belong to the launcher. Finalizers that wait for
        # its threads would wait forever here, because a fork does not have these threads.
        atexit._clear()  # noqa: SLF001
        gc.freeze()
        gc.enable()
        try:
            take_over()
            code = self._run(attempt, local_rank, report)
        finally:
            atexit._run_exitfuncs()  # noqa: SLF001  a forked process does not run them
        raise SystemExit(code)

    def _run(self, attempt: LocalAttempt, local_rank: int, report: Report) -> int:
        rank = attempt.first_rank + local_rank
        try:
            self._set_up(attempt, local_rank)
            result = self.body()
            if rank == 0:
                report.write_result(result)
        except BaseException as error:  # noqa: BLE001  the launcher reports every kind
            if not isinstance(error, SystemExit) or error.code:
                failure = WorkerFailure.of_error(rank, error)
                report.write_failure(failure)
                return failure.status
        return 0

    def _set_up(self, attempt: LocalAttempt, local_rank: int) -> None:
        """Give the worker its own threads, session, environment and signal handlers."""
        import torch

        # first: inherited thread pools have no threads after a fork
        torch.set_num_threads(self.config.threads)
        # an orphan would write to the same files as the next attempt's workers
        end_with_parent(self.launcher_pid)
        # Ctrl-C reaches only the launcher, which forwards it once; killing this session's group
        # also kills everything that the worker started
        os.setsid()
        os.environ.update({**self.environment, **attempt.environment, ATTEMPT: str(attempt.number)})
        os.environ.update(
            RANK=str(attempt.first_rank + local_rank),
            WORLD_SIZE=str(attempt.workers),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(attempt.local_workers),
        )
        self.signals.reset()
