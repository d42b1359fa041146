"""Supervision of this host's workers, attempt by attempt, on one host and on several."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from samestep.errors import LaunchError, SamestepError, WorkerError
from samestep.launch.coordinator_client import CoordinatorClient
from samestep.launch.exit_report import Failure
from samestep.launch.fork_server import ForkServer
from samestep.launch.local_coordinator import LocalCoordinator
from samestep.launch.output import Outputs
from samestep.launch.worker import Attempt, Job
from samestep.launch.worker_group import WorkerGroup
from samestep.record import open_record

POLL_SECONDS: Final = 0.1
TERMINATE_SECONDS: Final = 2.0  # between SIGTERM and SIGKILL
MAX_TRACEBACK: Final = 50_000  # characters sent to the coordinator; the ends matter most


class Supervisor:
    """Starts, watches and stops the workers of one host.

    It reports failures and exits to the run's coordinator and carries out its orders. The
    coordinator alone decides about restarts; on one host it runs in this process.
    """

    def __init__(self, job: Job, coordinator: CoordinatorClient | LocalCoordinator) -> None:
        self._job, self._coordinator = job, coordinator
        self._outputs = Outputs(hurried=lambda: bool(job.signals.received))
        self._fork_server = ForkServer(job)
        self._group: WorkerGroup | None = None
        self._attempt = -1
        self._reported: set[int] = set()  # ranks whose failure the coordinator knows
        self._signals_reported = 0
        self._due: list[tuple[float, signal.Signals]] = []
        self._result: Any = None

    def run(self) -> Any:
        """Return rank 0's result, None on other hosts.

        Raises `WorkerError` for the first worker of the run that failed, with its traceback on the
        first host; `LaunchError` if workers cannot be started, too few hosts joined, or the first
        host is lost.
        """
        with self._outputs, self._fork_server:
            try:
                self._coordinator.report("ready")
                while (end := self._turn()) is None:
                    pass
            finally:
                self._close_group()
        if "error" in end:
            raise LaunchError(end["error"])
        if "signal" in end and not self._job.signals.received:
            self._job.signals.received.append(signal.Signals(end["signal"]))
        elif "failure" in end:
            rank, failure = _read(end["failure"])
            traceback = failure.traceback if self._coordinator.leads else ""
            raise WorkerError(rank, str(failure), traceback, failure.status)
        return self._result

    def _turn(self) -> Mapping[str, Any] | None:
        """Wait for an event and handle it. Return the order that ends the run, once there is one."""
        group_files = self._group.files if self._group else ()
        files = [*self._coordinator.files, *group_files, *self._outputs.files()]
        ready = wait(files, POLL_SECONDS)
        self._outputs.pass_on(ready, self._job.kept.directory)
        if self._group:
            self._fork_server.prepare()
            self._report(self._group)
        received = self._job.signals.received
        if len(received) > self._signals_reported:
            again = self._signals_reported > 0
            self._coordinator.report("signalled", signal=received[0], again=again)
            self._signals_reported = len(received)
        for order in self._coordinator.orders(self._job.kept.step):
            if order["order"] == "end":
                return order
            self._obey(order)
        self._send_due_signals()
        return None

    def _obey(self, order: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if order["order"] == "start":
            self._start(order)
        elif order["order"] == "restarting":
            if self._coordinator.leads:
                self._report_restart(*_read(order["failure"]))
        elif self._group and order["attempt"] == self._attempt:
            if order["order"] == "signal":
                self._due = [(now, signal.Signals(order["signal"]))]
            elif order["kill"]:
                if order.get("overdue") and self._coordinator.leads:
                    limit = f"grace_period={self._job.config.grace_period:g} s"
                    self._outputs.tell(
                        f"samestep: workers did not exit within {limit}; killing them"
                    )
                self._group.kill()
            else:
                self._due = [(now, signal.SIGTERM), (now + TERMINATE_SECONDS, signal.SIGKILL)]

    def _start(self, order: Mapping[str, Any]) -> None:
        self._attempt = order["attempt"]
        self._reported, self._due = set(), []
        if self._attempt > 0:
            self._job.kept.begin_attempt()
        attempt = Attempt(
            self._attempt,
            order["first_rank"],
            order["local_workers"],
            order["workers"],
            self._coordinator.environment(self._attempt),
        )
        self._group = WorkerGroup(self._job, attempt, self._outputs, self._fork_server)

    def _report(self, group: WorkerGroup) -> None:
        """Report workers that failed, and the end of the attempt on this host."""
        group.look()
        for rank, failure in group.failures.items():
            if rank not in self._reported:
                self._reported.add(rank)
                fields = {**asdict(failure), "traceback": _shortened(failure.traceback)}
                self._coordinator.report(
                    "failed",
                    attempt=self._attempt,
                    age=time.monotonic() - failure.at,
                    failure={"rank": rank, **fields},
                )
        if not group.running:
            self._result = None if group.failures else group.result()
            self._close_group()
            self._coordinator.report("ended", attempt=self._attempt, step=self._job.kept.step)

    def _send_due_signals(self) -> None:
        """Send what is due, but not before replaced workers have resumed the run: then they can snapshot."""
        kept = self._job.kept
        if self._group and (kept.step is None or kept.is_under_way or self._group.failures):
            while self._due and self._due[0][0] <= time.monotonic():
                self._group.send(self._due.pop(0)[1])

    def _report_restart(self, rank: int, failure: Failure) -> None:
        """Print and record which failure restarts all workers."""
        kept = self._job.kept
        self._outputs.tell(f"samestep: worker {rank}: {failure}; restarting all workers")
        if kept.directory:
            with suppress(SamestepError):  # the directory may be gone: its workers will say so
                record = open_record(Path(kept.directory), writes=True)
                record.event(
                    "restarting",
                    rank=rank,
                    host=failure.host,
                    step=kept.step or 0,
                    reason=failure.summary,
                )
                record.close()

    def _close_group(self) -> None:
        if self._group:
            self._group.close()
            self._group = None
        self._outputs.drain()


def _read(fields: Mapping[str, Any]) -> tuple[int, Failure]:
    return fields["rank"], Failure(**{name: fields[name] for name in fields if name != "rank"})


def _shortened(traceback: str) -> str:
    if len(traceback) <= MAX_TRACEBACK:
        return traceback
    return f"{traceback[: MAX_TRACEBACK // 2]}\n[…]\n{traceback[-MAX_TRACEBACK // 2 :]}"
