"""The workers of one host in one attempt: forked from this process, watched, and ended."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from samestep.errors import LaunchError
from samestep.host import no_garbage_collection
from samestep.launch.exit_report import Failure, Report
from samestep.launch.fork_server import ForkedWorker, ForkServer
from samestep.launch.output import Outputs, Pipes
from samestep.launch.worker import FORK, Attempt, Job


class WorkerGroup:
    """Workers by rank: those in `running`, and in `failures` how others failed; whoever is in neither has ended well."""

    def __init__(self, job: Job, attempt: Attempt, outputs: Outputs, nursery: ForkServer) -> None:
        """Fork the workers, here or in the nursery. Raises `LaunchError` if that fails, when none is left."""
        self.failures: dict[int, Failure] = {}
        self.running: dict[int, ForkProcess | ForkedWorker] = {}
        self.reports: dict[int, Report] = {}
        self._kept, self._timeout = job.kept, job.config.timeout
        self._stopped_since: dict[int, float] = {}
        self._files: dict[int, int] = {}  # what tells of a worker's end
        self._groups: list[int] = []
        self._looked_at = time.monotonic()
        self._killed_for_memory = _killed_for_memory()
        try:
            with (
                no_garbage_collection()
            ):  # each worker freezes what it inherits before it collects again
                for local_rank in range(attempt.local_workers):
                    self._start(job, attempt, local_rank, outputs, nursery)
        except OSError as error:
            self.close()
            raise LaunchError(f"workers could not be started: {error}") from error

    def _start(
        self, job: Job, attempt: Attempt, local_rank: int, outputs: Outputs, nursery: ForkServer
    ) -> None:
        rank = attempt.first_rank + local_rank
        report = self.reports[rank] = Report()
        with outputs.pipes_of(rank) as pipes:
            process = nursery.start(attempt, local_rank, report, pipes) or _forked(
                job, attempt, local_rank, report, pipes
            )
        assert process.pid is not None  # noqa: S101  it has been started
        self.running[rank] = process
        self._groups.append(process.pid)
        if hasattr(os, "pidfd_open"):  # older kernels lack it: then `look` finds out
            with suppress(OSError):
                self._files[rank] = os.pidfd_open(process.pid)

    @property
    def files(self) -> list[int]:
        """Open files that become readable when a worker ends."""
        return list(self._files.values())

    def look(self) -> None:
        """Note who ended. Without last words a worker counts from when it was last seen alive: its end came before all it caused."""
        now = time.monotonic()
        for rank, process in list(self.running.items()):
            if process.exitcode is not None:
                self._note_end(rank, process.exitcode)
        self._end_stopped(now)
        self._looked_at = now

    def _note_end(self, rank: int, code: int) -> None:
        self.running.pop(rank).close()
        if (file := self._files.pop(rank, None)) is not None:
            os.close(file)
        if code != 0:
            out_of_memory = _killed_for_memory() > self._killed_for_memory
            failure = self.reports[rank].failure() or Failure.of_exit(
                code, at=self._looked_at, out_of_memory=out_of_memory
            )
            self.failures[rank] = failure.at_step(self._kept.step)

    def _end_stopped(self, now: float) -> None:
        """Take workers that a signal has stopped for killed, when others have waited for them in vain, or would have by now."""
        in_vain = bool(self.failures) and all(
            failure.is_secondary for failure in self.failures.values()
        )
        for rank, process in list(self.running.items()):
            if not _is_stopped(process.pid):
                self._stopped_since.pop(rank, None)
            elif in_vain or now - self._stopped_since.setdefault(rank, now) > self._timeout:
                process.kill()
                process.join()
                self._note_end(rank, -signal.SIGSTOP)

    def first_failure(self) -> tuple[int, Failure] | None:
        """Return rank and failure of the worker that failed first, and not because of others, as far as is known by now."""
        return min(
            self.failures.items(),
            key=lambda item: (item[1].is_secondary, item[1].at),
            default=None,
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all that run."""
        for process in self.running.values():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """End all workers, and whatever they started, at once."""
        self.send(signal.SIGKILL)
        for process in self.running.values():
            process.join()
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def close(self) -> None:
        """Leave nothing: no worker and no file."""
        if self.running or self.failures:
            self.kill()
        for process in self.running.values():
            process.close()
        for file in self._files.values():
            os.close(file)
        for report in self.reports.values():
            report.close()
        self.running, self._files, self.reports = {}, {}, {}

    def result(self) -> Any:
        """Return rank 0's result, None where it is on another host."""
        return self.reports[0].result() if 0 in self.reports else None


def _forked(
    job: Job, attempt: Attempt, local_rank: int, report: Report, pipes: Pipes
) -> ForkProcess:
    process = FORK.Process(target=job.work, args=(attempt, local_rank, report, pipes.take_over))
    process.start()
    return process


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(
            ")"
        )[2].split()[0] in {"T", "t"}
    except OSError:
        return False


def _killed_for_memory() -> int:
    """Return how many processes of this host the kernel has ended so far because memory ran out; newer kernels count them."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
