"""What happens in a worker that was forked here, from its first moment to its last."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from samestep.launch.report import Failure, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from samestep.launch.signals import StopSignals

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


@dataclass(frozen=True)
class Job:
    """What all workers of a launch do, and what they share with their launcher."""

    body: Callable[[], Any]
    environment: Mapping[str, str]
    threads: int
    reports: Sequence[Report]
    signals: StopSignals
    launcher_pid: int

    def work(self) -> NoReturn:
        """Be a worker: run the body, leave its result or failure to the launcher, and end."""
        # What the launcher would do at its exit, and what it has not collected yet, is the launcher's: its objects may have threads,
        # and an end of theirs that waited for threads would wait for ever here, where there are none of them.
        atexit._clear()  # noqa: SLF001
        gc.freeze()
        gc.enable()
        try:
            code = self._run(rank=int(os.environ["RANK"]))
        finally:
            atexit._run_exitfuncs()  # noqa: SLF001  forked processes run none by themselves
        # Elastic takes SystemExit(0) for a return and would then wait for others; without a code it is let through.
        raise SystemExit(code or None)

    def _settle(self) -> None:
        """Become a process of its own: its own threads, session, environment and signals."""
        torch.set_num_threads(self.threads)  # first: inherited pools of threads have no threads after a fork
        _end_with(self.launcher_pid)
        os.setsid()  # Ctrl-C reaches the launcher alone, which passes it on once; and one kill reaches all that a worker started
        os.environ.update(self.environment)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        self.signals.as_usual()

    def _run(self, rank: int) -> int:
        report = self.reports[rank]
        try:
            self._settle()
            result = self.body()
            if rank == 0:
                report.leave_result(result)
        except BaseException as error:  # noqa: BLE001  whatever ends a worker is told
            if isinstance(error, SystemExit) and not error.code:
                return 0
            report.leave_failure(Failure.of_error(error))
            return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        return 0


def _end_with(launcher_pid: int) -> None:
    """Die at once when the launcher is gone; a worker that went on would meet the next attempt's workers in its files."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os.kill(os.getpid(), signal.SIGKILL)
