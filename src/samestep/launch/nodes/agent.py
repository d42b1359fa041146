"""Sees the workers of this host through a run on several hosts, as its coordinator orders."""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from dataclasses import asdict
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from samestep.errors import LaunchError, WorkerError
from samestep.launch.agent import FAREWELL_SECONDS, LOOK_SECONDS, tell_restart
from samestep.launch.crew import Attempt, Crew
from samestep.launch.failure import Failure
from samestep.launch.nodes.store import store_variables
from samestep.launch.nursery import Nursery
from samestep.launch.output import Outputs
from samestep.launch.place.interface import interface_towards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from samestep.launch.nodes.member import Member
    from samestep.launch.worker import Job

MOST_TOLD = 50_000  # characters of a traceback; the first and last tell most


class HostAgent:
    """Starts, watches and ends the workers of one host of several. What is to be done about a failure, the coordinator decides."""

    def __init__(self, job: Job, member: Member) -> None:
        self._job, self._member = job, member
        self._outputs = Outputs(hurried=lambda: bool(job.signals.received))
        self._nursery = Nursery(job)
        self._crew: Crew | None = None
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
                tell_restart(self._outputs, self._job.kept, rank, failure)
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
        self._crew = Crew(self._job, attempt, self._outputs, self._nursery)

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

    def _report(self, crew: Crew) -> None:
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
