"""What happens in a worker that was forked here, from its first moment to its last."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from samestep.config import Config
from samestep.handoff import ATTEMPT, LauncherState
from samestep.host import end_with_parent
from samestep.launch.exit_report import Failure, Report
from samestep.launch.signals import StopSignals

FORK: Final = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Attempt:
    """One start of all `workers` of a run, as one host sees it: its own `local_workers` have ranks from `first_rank` on.

    `environment` says where their store listens, as MASTER_ADDR and so on.
    """

    number: int
    first_rank: int
    local_workers: int
    workers: int
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """What the workers of this host do, at most `workers` at a time, and what they share with their launcher."""

    body: Callable[[], Any]
    workers: int
    config: Config
    environment: Mapping[str, str]
    kept: LauncherState
    signals: StopSignals
    launcher_pid: int

    def work(
        self, attempt: Attempt, local_rank: int, report: Report, take_over: Callable[[], None]
    ) -> NoReturn:
        """Be a worker: run the body, leave its result or failure to the launcher, and end."""
        # What the launcher would do at its exit, and what it has not collected yet, is the
        # launcher's: its objects may have threads, and an end of theirs that waited for threads
        # would wait for ever here, where there are none of them.
        atexit._clear()  # noqa: SLF001
        gc.freeze()
        gc.enable()
        try:
            take_over()
            code = self._run(attempt, local_rank, report)
        finally:
            atexit._run_exitfuncs()  # noqa: SLF001  forked processes run none by themselves
        raise SystemExit(code)

    def _settle(self, attempt: Attempt, local_rank: int) -> None:
        """Become a process of its own: its own threads, session, environment and signals."""
        # first: inherited pools of threads have no threads after a fork
        torch.set_num_threads(self.config.threads)
        # one that went on would meet the next attempt's workers in its files
        end_with_parent(self.launcher_pid)
        # Ctrl-C reaches the launcher alone, which passes it on once; and one kill reaches all that
        # a worker started
        os.setsid()
        os.environ.update(self.environment)
        os.environ.update(attempt.environment)
        os.environ.update(
            RANK=str(attempt.first_rank + local_rank),
            WORLD_SIZE=str(attempt.workers),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(attempt.local_workers),
        )
        os.environ[ATTEMPT] = str(attempt.number)
        self.signals.as_usual()

    def _run(self, attempt: Attempt, local_rank: int, report: Report) -> int:
        try:
            self._settle(attempt, local_rank)
            result = self.body()
            if attempt.first_rank + local_rank == 0:
                report.leave_result(result)
        except BaseException as error:  # noqa: BLE001  whatever ends a worker is told
            if isinstance(error, SystemExit) and not error.code:
                return 0
            failure = Failure.of_error(error)
            report.leave_failure(failure)
            return failure.status
        return 0
