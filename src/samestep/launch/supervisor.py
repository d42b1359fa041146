"""Sees the workers of this host through a run, attempt after attempt: those that were killed are replaced, and a failure ends all."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

from samestep.cluster.launchers import LOOPBACK
from samestep.comm.token_store import store_variables
from samestep.errors import LaunchError, SamestepError, WorkerError
from samestep.handoff import LauncherState
from samestep.host import interface_towards
from samestep.launch.coordinator_client import CoordinatorClient
from samestep.launch.exit_report import Failure
from samestep.launch.fork_server import ForkServer
from samestep.launch.output import Outputs
from samestep.launch.worker import Attempt, Job
from samestep.launch.worker_group import WorkerGroup
from samestep.record import open_record

LOOPBACK_ONLY: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
LOOK_SECONDS: Final = 0.1
# after a failure, for others to fail by themselves, and again after SIGTERM
FAREWELL_SECONDS: Final = 2.0


class Supervisor:
    """Starts the workers of a job and sees them to their end.

    What befell a worker from outside (kill -9, a stop, the kernel without memory) ends the attempt
    and not the run: all are forked again from this process, which has torch, and go on from the
    state that is kept. What a program did itself ends the run: the first failure is told, and the
    others get `FAREWELL_SECONDS` to fail by themselves and as long to act on SIGTERM.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._outputs = Outputs(hurried=lambda: bool(job.signals.received))
        self._nursery = ForkServer(job)
        self._in_vain = 0  # attempts in a row that made no new step
        self._furthest = -1

    def run(self) -> Any:
        """Return rank 0's result. Raises `WorkerError` for the first worker that failed, `LaunchError` where none could be started."""
        with self._outputs, self._nursery:
            for number in count():
                with (
                    Store() as store,
                    closing(
                        WorkerGroup(
                            self._job, self._attempt(number, store), self._outputs, self._nursery
                        )
                    ) as crew,
                ):
                    self._see_to_end(crew)
                    first = crew.first_failure()
                    if self._job.signals.received or first is None:
                        return crew.result() if first is None else None
                self._outputs.drain()
                self._replace(*first)
                self._job.kept.begin_attempt()
        raise AssertionError  # attempts are counted without end

    def _attempt(self, number: int, store: Store) -> Attempt:
        return Attempt(number, 0, self._job.workers, self._job.workers, store.environment)

    def _see_to_end(self, crew: WorkerGroup) -> None:
        """Return when all workers have ended, or when those that are left can be replaced with the others at once."""
        due: list[tuple[float, signal.Signals]] = []
        answered = 0
        while crew.running:
            ready = wait([*crew.files, *self._outputs.files()], LOOK_SECONDS)
            self._outputs.pass_on(ready, self._job.kept.directory)
            crew.look()
            self._nursery.prepare()
            first, received = crew.first_failure(), self._job.signals.received
            if first is not None and not received and self._may_go_on(first[1]):
                return
            if len(received) > answered and (len(received) > 1 or self._can_snapshot(crew)):
                due = self._ends_after_signal(received[0], at_once=bool(answered or crew.failures))
                answered = len(received)
            elif crew.failures and not due:
                now = time.monotonic()
                due = [
                    (now + FAREWELL_SECONDS, signal.SIGTERM),
                    (now + 2 * FAREWELL_SECONDS, signal.SIGKILL),
                ]
            while due and due[0][0] <= time.monotonic():
                number = due.pop(0)[1]
                if number == signal.SIGKILL and received and len(received) == 1:
                    self._outputs.tell(
                        f"samestep: workers did not end within grace_period={self._job.config.grace_period:g} s, and are killed"
                    )
                crew.send(number)

    def _can_snapshot(self, crew: WorkerGroup) -> bool:
        """Tell whether a signal may be passed on: workers that take up a run have first to come to what is kept of it."""
        return self._job.kept.step is None or self._job.kept.is_under_way or bool(crew.failures)

    def _ends_after_signal(
        self, number: signal.Signals, *, at_once: bool
    ) -> list[tuple[float, signal.Signals]]:
        now = time.monotonic()
        return (
            [(now, signal.SIGKILL)]
            if at_once
            else [(now, number), (now + self._job.config.grace_period, signal.SIGKILL)]
        )

    def _may_go_on(self, failure: Failure) -> bool:
        """Tell whether workers may take up the run again: it had begun, and did not end so again and again without a new step."""
        step = self._job.kept.step
        in_vain = 0 if step is not None and step > self._furthest else self._in_vain
        return failure.is_retryable and step is not None and in_vain < self._job.config.max_restarts

    def _replace(self, rank: int, failure: Failure) -> None:
        """Let a failed worker be replaced, and say so. Raises `WorkerError` where the run ends instead."""
        if not self._may_go_on(failure):
            raise WorkerError(rank, str(failure), failure.traceback, failure.status)
        kept = self._job.kept
        step = kept.step or 0
        self._in_vain = 1 if step > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, step)
        report_restart(self._outputs, kept, rank, failure)


def report_restart(outputs: Outputs, kept: LauncherState, rank: int, failure: Failure) -> None:
    """Say on the screen and in the run's record which worker's end makes all start again."""
    outputs.tell(f"samestep: worker {rank}: {failure}; all workers start again")
    if kept.directory:
        with suppress(SamestepError):  # the run's directory may be gone: its workers will say so
            record = open_record(Path(kept.directory), writes=True)
            record.event(
                "restarting",
                rank=rank,
                host=failure.host,
                step=kept.step or 0,
                reason=failure.summary,
            )
            record.close()


class Store:
    """Where the workers of one attempt on this host find each other; a context manager.

    A TCPStore that opens its own socket listens on all addresses, whatever host name it is given;
    so it gets one that is open.
    """

    def __init__(self) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        # The variables of torchrun, which torch.distributed reads as well: all workers are clients
        # of a store that is there already.
        self.environment: Mapping[str, str] = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **LOOPBACK_ONLY,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store = None  # torch closes it with the last reference


MOST_TOLD = 50_000  # characters of a traceback; the first and last tell most


class HostSupervisor:
    """Starts, watches and ends the workers of one host of several. What is to be done about a failure, the coordinator decides."""

    def __init__(self, job: Job, member: CoordinatorClient) -> None:
        self._job, self._member = job, member
        self._outputs = Outputs(hurried=lambda: bool(job.signals.received))
        self._nursery = ForkServer(job)
        self._crew: WorkerGroup | None = None
        self._attempt = -1
        self._told: set[int] = set()  # whose failures the coordinator knows
        self._signals_told = 0
        self._due: list[tuple[float, signal.Signals]] = []
        self._result: Any = None

    def run(self) -> Any:
        """Return rank 0's result, None on other hosts.

        Raises `WorkerError` for the first worker of the run that failed, with its traceback on the
        first host; `LaunchError` when too few hosts came, or the first one is gone.
        """
        with self._outputs, self._nursery:
            try:
                self._member.tell("ready")
                while (end := self._turn()) is None:
                    pass
            finally:
                self._close_crew()
        if "error" in end:
            raise LaunchError(end["error"])
        if "signal" in end and not self._job.signals.received:
            self._job.signals.received.append(signal.Signals(end["signal"]))
        elif "failure" in end:
            rank, failure = _read(end["failure"])
            raise WorkerError(
                rank, str(failure), failure.traceback if self._member.leads else "", failure.status
            )
        return self._result

    def _turn(self) -> Mapping[str, Any] | None:
        """Wait for news and see to it. Return the order that ends the run, when it comes."""
        ready = wait(
            [
                self._member.fileno(),
                *(self._crew.files if self._crew else ()),
                *self._outputs.files(),
            ],
            LOOK_SECONDS,
        )
        self._outputs.pass_on(ready, self._job.kept.directory)
        if self._crew:
            self._nursery.prepare()
            self._report(self._crew)
        received = self._job.signals.received
        if len(received) > self._signals_told:
            self._member.tell("signalled", signal=received[0], again=self._signals_told > 0)
            self._signals_told = len(received)
        for order in self._member.orders(self._job.kept.step):
            if order["order"] == "end":
                return order
            self._obey(order)
        while self._crew and self._due and self._due[0][0] <= time.monotonic():
            self._crew.send(self._due.pop(0)[1])
        return None

    def _obey(self, order: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if order["order"] == "start":
            self._start(order)
        elif order["order"] == "restarting":
            rank, failure = _read(order["failure"])
            if self._member.leads:
                report_restart(self._outputs, self._job.kept, rank, failure)
        elif self._crew and order["attempt"] == self._attempt:
            if order["order"] == "signal":
                self._due = [(now, signal.Signals(order["signal"]))]
            elif order["kill"]:
                self._crew.kill()
            else:
                self._due = [(now, signal.SIGTERM), (now + FAREWELL_SECONDS, signal.SIGKILL)]

    def _start(self, order: Mapping[str, Any]) -> None:
        self._attempt = order["attempt"]
        self._told, self._due = set(), []
        attempt = Attempt(
            self._attempt,
            order["first_rank"],
            order["local_workers"],
            order["workers"],
            self._variables(),
        )
        self._crew = WorkerGroup(self._job, attempt, self._outputs, self._nursery)

    def _variables(self) -> dict[str, str]:
        """Return where the workers of the attempt find each other."""
        host, port = self._member.coordinator
        local = ipaddress.ip_address(host).is_loopback
        interface = "lo" if local else interface_towards(host)
        sockets = {
            name: interface
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            if interface and name not in os.environ
        }
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            **sockets,
            **store_variables((host, port), self._attempt),
        }

    def _report(self, crew: WorkerGroup) -> None:
        """Tell the coordinator who failed, and when all have ended."""
        crew.look()
        for rank, failure in crew.failures.items():
            if rank not in self._told:
                self._told.add(rank)
                told = {"rank": rank, **asdict(failure), "traceback": _shortened(failure.traceback)}
                self._member.tell(
                    "failed", attempt=self._attempt, age=time.monotonic() - failure.at, failure=told
                )
        if not crew.running:
            self._result = None if crew.failures else crew.result()
            self._close_crew()
            self._member.tell("ended", attempt=self._attempt, step=self._job.kept.step)

    def _close_crew(self) -> None:
        if self._crew:
            self._crew.close()
            self._crew = None
        self._outputs.drain()


def _read(told: Mapping[str, Any]) -> tuple[int, Failure]:
    return told["rank"], Failure(**{name: value for name, value in told.items() if name != "rank"})


def _shortened(traceback: str) -> str:
    if len(traceback) <= MOST_TOLD:
        return traceback
    return f"{traceback[: MOST_TOLD // 2]}\n[…]\n{traceback[-MOST_TOLD // 2 :]}"
