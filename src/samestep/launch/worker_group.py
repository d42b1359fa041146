"""The workers of one host in one attempt: start, poll, signal and kill them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import process as processes
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

from samestep.errors import LaunchError
from samestep.host import SIGNALED, RunningClock, no_garbage_collection
from samestep.launch.attempt import WorkerFailure
from samestep.launch.fork_server import ForkedWorker, ForkServer
from samestep.launch.output import Outputs
from samestep.launch.worker import FORK, ExitReport, Job, LocalAttempt

# A process's flag in the kernel from the beginning of its exit, before its connections close: it
# may stay a while, in which other workers notice and fail.
PF_EXITING: Final = 0x4
STARTED: Final = 19  # index in `_stat` of the time at which a process started
KILL_SECONDS: Final = 30.0  # from SIGKILL to the end of a process, longer if it waits for a disk
PAUSE_SECONDS: Final = 0.01  # between checks of processes without pidfds


class WorkerGroup:
    """Workers of one attempt: `running` and `failures`, by rank. All other ranks succeeded."""

    def __init__(
        self, job: Job, attempt: LocalAttempt, outputs: Outputs, fork_server: ForkServer
    ) -> None:
        """Fork the workers. Raises `LaunchError`, without leaving workers behind, if that fails."""
        self.failures: dict[int, WorkerFailure] = {}
        self.running: dict[int, ForkProcess | ForkedWorker] = {}
        self._job = job
        self._reports: dict[int, ExitReport] = {}
        self._clock = RunningClock()
        self._stopped_since: dict[int, float] = {}  # by that clock
        self._sent: set[int] = set()  # signals that this launcher sent
        self._files: dict[int, int] = {}  # pidfds by rank
        self._outputs = outputs
        self._groups: dict[int, str] = {}  # when their leaders started
        self._alive_at: dict[int, float] = {}  # when ranks were last seen running
        self._oom_kills = _oom_kills()
        try:
            # each worker freezes inherited objects before it collects garbage again
            with no_garbage_collection():
                for local_rank in range(attempt.local_workers):
                    self._start(attempt, local_rank, outputs, fork_server)
        except OSError as error:
            self.close()
            raise LaunchError(f"workers could not be started: {error}") from error

    def _start(
        self, attempt: LocalAttempt, local_rank: int, outputs: Outputs, fork_server: ForkServer
    ) -> None:
        rank = attempt.first_rank + local_rank
        report = self._reports[rank] = ExitReport()
        process: ForkProcess | ForkedWorker | None
        with outputs.pipes_of(rank) as pipes:
            process = fork_server.start(attempt, local_rank, report, pipes)
            if process is None:
                arguments = (attempt, local_rank, report, pipes.take_over)
                process = FORK.Process(target=self._job.run, args=arguments)
                process.start()
        assert process.pid is not None  # noqa: S101  it has been started
        self.running[rank] = process
        self._alive_at[rank] = time.monotonic()
        self._groups[process.pid] = _started(process.pid)
        if hasattr(os, "pidfd_open"):  # on older kernels `poll` notices the exit
            with suppress(OSError):
                self._files[rank] = os.pidfd_open(process.pid)

    @property
    def files(self) -> list[int]:
        """Open files that become readable when a worker exits."""
        return list(self._files.values())

    def poll(self) -> None:
        """Update `running` and `failures`.

        A worker that exited without a report gets the time at which it was last seen running, so
        that its failure precedes all failures that it caused.
        """
        for rank, process in list(self.running.items()):
            if process.exitcode is not None:
                self._handle_exit(rank, process.exitcode)
        self._note_alive()
        self._kill_stopped()

    def _note_alive(self) -> None:
        now = time.monotonic()
        for rank, process in self.running.items():
            if not int(_stat(process.pid)[6]) & PF_EXITING:
                self._alive_at[rank] = now

    def _handle_exit(self, rank: int, code: int) -> None:
        with suppress(ValueError):  # it has not exited
            self.running.pop(rank).close()
        if (file := self._files.pop(rank, None)) is not None:
            os.close(file)
        report = self._reports[rank]
        if code != 0 or report.is_empty:
            oom = _oom_kills() > self._oom_kills
            failure = report.failure() or WorkerFailure.of_exit(
                rank,
                code,
                self._alive_at[rank],
                out_of_memory=oom,
                uses_nccl=self._job.launcher_state.uses_nccl,
            )
            if failure.status - SIGNALED in self._sent:  # stopped, for instance after others failed
                failure = replace(failure, is_secondary=True, is_retryable=False)
            step = self._job.launcher_state.step
            host = "" if step is None else socket.gethostname()
            self.failures[rank] = replace(failure, step=step, host=host)

    def _kill_stopped(self) -> None:
        """Kill SIGSTOPped workers once other workers time out waiting for them, or would have."""
        failures = self.failures.values()
        now = self._clock.now()
        timed_out = bool(failures) and all(failure.is_secondary for failure in failures)
        for rank, process in list(self.running.items()):
            if _stat(process.pid)[0] not in {"T", "t"}:
                self._stopped_since.pop(rank, None)
                continue
            seconds = now - self._stopped_since.setdefault(rank, now)
            if timed_out or seconds > self._job.config.timeout:
                process.kill()
                self._wait_for_exit([rank])
                if rank in self.running:
                    self._handle_exit(rank, -signal.SIGSTOP)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all running workers."""
        self._sent.add(number)
        for process in self.running.values():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """Kill all workers immediately, and everything that they started."""
        self._note_alive()  # these deaths must not precede the failures that caused them
        self.send(signal.SIGKILL)
        self._wait_for_exit(list(self.running))
        for leader, started in self._groups.items():
            kill_group(leader, started)

    def _wait_for_exit(self, ranks: Sequence[int]) -> None:
        """Wait until killed workers have exited; give up on those that the kernel does not end.

        These run no more code, but hold their memory until the kernel returns from what they wait
        for.
        """
        deadline, seen = time.monotonic() + KILL_SECONDS, set[int]()
        while left := [rank for rank in ranks if self.running[rank].exitcode is None]:
            if time.monotonic() > deadline:
                break
            files = {self._files[rank] for rank in left if rank in self._files}
            seen.update(wait(files - seen, PAUSE_SECONDS))  # type: ignore[arg-type]  # file numbers
        for rank in left:
            process = self.running[rank]
            self._outputs.print(
                f"worker {rank} (process {process.pid}) did not exit within {KILL_SECONDS:g} s of "
                "SIGKILL: it waits in the kernel, as for a disk, a network file system or a device "
                "that does not respond. The launcher gives up on it; check that hardware"
            )
            processes._children.discard(process)  # type: ignore[attr-defined]  # noqa: SLF001  joined at exit
            self._handle_exit(rank, -signal.SIGKILL)

    def error(self, rank: int) -> Exception | None:
        """Return the error of a worker that failed, None if it cannot be rebuilt here."""
        return self._reports[rank].error()

    def close(self) -> None:
        """Kill running workers and close all files."""
        if self.running or self.failures:
            self.kill()
        for process in self.running.values():
            process.close()
        for file in self._files.values():
            os.close(file)
        for report in self._reports.values():
            report.close()
        self.running, self._files, self._reports = {}, {}, {}

    def result(self) -> Any:
        """Return rank 0's result, None if rank 0 is on another host."""
        return self._reports[0].result() if 0 in self._reports else None


def kill_group(leader: int, started: str) -> None:
    """Kill a group of processes, whose `leader` started at a time that `_started` returned.

    A process id is not given to another process while its group exists. So if another process has
    the leader's id, nothing of the group is left, and the other process's group is not killed.
    """
    if _started(leader) in {started, ""}:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def _started(pid: int) -> str:
    """Return when a process started, in ticks since the boot, empty if there is no process."""
    fields = _stat(pid)
    return fields[STARTED] if len(fields) > STARTED else ""


def _stat(pid: int | None) -> list[str]:
    """Return a process's state and what follows it in proc(5); flags are at index 6."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ["X", *5 * ["0"], str(PF_EXITING)]
    return text.rpartition(")")[2].split()


def _oom_kills() -> int:
    """Return how many processes this host's kernel has killed to free memory, 0 if unknown."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
