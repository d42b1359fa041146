"""Supervision of this host's workers, attempt by attempt, and the coordinator of a single host."""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.cluster.launchers import LOOPBACK
from samestep.comm.store_server import StoreServer, StoreThread
from samestep.comm.token_store import store_variables
from samestep.config import Config
from samestep.errors import ConfigError, LaunchError, SamestepError, WorkerError
from samestep.handoff import TERMINAL
from samestep.launch.attempt import ElasticPolicy, Message, Node, WorkerFailure
from samestep.launch.fork_server import ForkServer
from samestep.launch.membership import Membership
from samestep.launch.output import Outputs
from samestep.launch.worker import Job, LocalAttempt
from samestep.launch.worker_group import WorkerGroup
from samestep.record import open_record

if TYPE_CHECKING:  # it is for several hosts
    from samestep.launch.coordinator_client import CoordinatorClient

POLL_SECONDS: Final = 0.1
LOCAL_CONNECTIONS: Final = 1 << 16  # of this user, in a handshake: all workers connect at once
LOCAL_HELLO_SECONDS: Final = 60.0
TERMINATE_SECONDS: Final = 2.0  # between SIGTERM and SIGKILL
MAX_TRACEBACK: Final = 50_000  # characters sent to the coordinator: the beginning and the end


class LocalStore(StoreThread):
    """The store of one attempt on a single host, served by a thread of the launcher.

    Its socket has no port: its abstract `name` is known in this network namespace only. Processes
    of other users are disconnected.
    """

    def __init__(self, token: str, attempt: int) -> None:
        self.name = f"samestep-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{self.name}")
        server = StoreServer(token, attempt, LOCAL_CONNECTIONS, LOCAL_HELLO_SECONDS)
        super().__init__(server, listener)


class LocalCoordinator:
    """The interface of `CoordinatorClient` for a single host, without a network."""

    leads: Final = True

    def __init__(self, workers: int, config: Config, token: str) -> None:
        self._token = token
        policy = ElasticPolicy(1, 1, None, config.max_restarts, config.grace_period)
        now = time.monotonic()
        self._membership = Membership(policy, now, open_attempt=lambda _: None, log=lambda _: None)
        self._orders: list[Message] = []
        self._node = Node(socket.gethostname(), workers, self._orders.append, now, leads=True)
        self._membership.join(self._node)
        self._store: LocalStore | None = None
        self._port: socket.socket | None = None  # reserved for the workers, but nothing listens
        self.files: Sequence[Any] = ()  # open files that become readable when an order arrives

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        if self._port is not None:
            self._port.close()
        self._store = self._port = None

    def report(self, what: str, now: float | None = None, **fields: Any) -> None:
        """Report an event on this host, at a time of `time.monotonic`."""
        now = time.monotonic() if now is None else now
        self._membership.receive(self._node, {"report": what, **fields}, now)

    def orders(self, step: int | None) -> list[Message]:
        """Return the next orders, given the number of completed steps."""
        self.report("heartbeat", step=step)
        self._membership.update(time.monotonic())
        orders, self._orders[:] = list(self._orders), []
        return orders

    def environment(self, attempt: int) -> dict[str, str]:
        """Open a new store; return the variables by which an attempt's workers find it.

        MASTER_PORT is for scripts that read it. Nothing listens there: process groups use the store
        of the run, too. A script may listen there itself, as TCPStore does with this option.
        """
        self.close()
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((LOOPBACK, 0))
        self._store = store = LocalStore(self._token, attempt)
        return {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._port.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            **store_variables(store.name, attempt),
        }


class Supervisor:
    """Starts, watches and stops the workers of one host.

    It reports failures and exits to the run's coordinator and carries out its orders. Only the
    coordinator decides about restarts; on a single host it runs in this process.
    """

    def __init__(self, job: Job, coordinator: CoordinatorClient | LocalCoordinator) -> None:
        self._job, self._coordinator = job, coordinator
        self._outputs = Outputs(is_urgent=lambda: bool(job.signals.received))
        self._fork_server = ForkServer(job)
        self._group: WorkerGroup | None = None
        self._attempt = -1
        self._reported: set[int] = set()  # ranks whose failure the coordinator knows
        self._signals_reported = 0
        self._signals_due: list[tuple[float, signal.Signals]] = []
        self._result: Any = None
        self._errors: dict[int, Exception | None] = {}  # of the current attempt, by rank

    def run(self) -> Any:
        """Return rank 0's result, None on other hosts.

        Raises `WorkerError` for the first worker of the run that failed, with its traceback on the
        first host; `LaunchError` if workers cannot be started, too few hosts joined, or the first
        host is lost.
        """
        with closing(self._outputs), closing(self._fork_server):
            try:
                self._coordinator.report("ready")
                while (end := self._poll()) is None:
                    pass
                self._forward_logged()  # what arrived since
            finally:
                self._close_group()
        if "error" in end:
            raise LaunchError(end["error"])
        if "signal" in end and not self._job.signals.received:
            self._job.signals.received.append(signal.Signals(end["signal"]))
        elif "failure" in end:
            failure = WorkerFailure(**end["failure"])
            if self._coordinator.leads:
                self._record_failure(failure)
            traceback = failure.traceback if self._coordinator.leads else ""
            cause = self._errors.get(failure.rank)
            raise WorkerError(failure.rank, str(failure), traceback, failure.status) from cause
        return self._result

    def _poll(self) -> Message | None:
        """Wait for an event and handle it; return the order that ends the run, if it arrived."""
        state, received = self._job.launcher_state, self._job.signals.received
        group_files = self._group.files if self._group else ()
        log_files = [] if self._job.logged is None else [self._job.logged.file]
        files = [*self._coordinator.files, *group_files, *log_files, *self._outputs.files()]
        ready = wait(files, POLL_SECONDS)
        self._forward_logged()
        self._outputs.forward(ready, state.directory)
        if self._job.environment.get(TERMINAL):
            self._outputs.show(*state.line)
        if self._group:
            self._fork_server.prepare()
            self._report(self._group)
        while self._job.notices:
            self._outputs.print(self._job.notices.popleft())
        if len(received) > self._signals_reported:
            again = self._signals_reported > 0
            self._coordinator.report("signaled", signal=received[0], again=again)
            self._signals_reported = len(received)
        for order in self._coordinator.orders(state.step):
            if order["order"] == "end":
                return order
            self._execute(order)
        self._send_due_signals()
        return None

    def _forward_logged(self) -> None:
        if self._job.logged is not None:
            self._job.logged.forward()

    def _execute(self, order: Message) -> None:
        now = time.monotonic()
        if order["order"] == "start":
            self._start(order)
        elif order["order"] == "lost":
            self._outputs.print(order["reason"])
            self._join_again()
        elif order["order"] == "restarting":
            if self._coordinator.leads:
                failure = WorkerFailure(**order["failure"])
                self._outputs.print(f"worker {failure.rank}: {failure}; restarting all workers")
                self._record("restarting", failure, reason=failure.summary)
        elif self._group and order["attempt"] == self._attempt:
            if order["order"] == "signal":
                self._signals_due = [(now, signal.Signals(order["signal"]))]
            elif order["kill"]:
                if order.get("overdue") and self._coordinator.leads:
                    limit = f"grace_period={self._job.config.grace_period:g} s"
                    self._outputs.print(f"workers did not exit within {limit}; killing them")
                self._group.kill()
            else:
                kill_at = now + TERMINATE_SECONDS
                self._signals_due = [(now, signal.SIGTERM), (kill_at, signal.SIGKILL)]

    def _start(self, order: Mapping[str, Any]) -> None:
        self._attempt = order["attempt"]
        self._reported, self._signals_due, self._errors = set(), [], {}
        if self._attempt > 0:
            self._job.launcher_state.begin_attempt()
        ranks = order["first_rank"], order["local_workers"], order["workers"]
        environment = self._coordinator.environment(self._attempt)
        attempt = LocalAttempt(self._attempt, *ranks, environment)
        self._group = WorkerGroup(self._job, attempt, self._outputs, self._fork_server)

    def _join_again(self) -> None:
        """End the workers of a run that continues without this host, and offer to start others."""
        self._close_group()
        self._attempt, self._signals_reported = -1, 0
        self._job.launcher_state.leave_run()
        self._coordinator.report("ready")

    def _report(self, group: WorkerGroup) -> None:
        """Report workers that failed, and the end of the attempt on this host."""
        group.poll()
        for rank, failure in group.failures.items():
            if rank not in self._reported:
                self._reported.add(rank)
                self._errors[rank] = group.error(rank)
                self._outputs.log_end(rank, str(failure), failure.traceback)
                fields = {**asdict(failure), "traceback": _shortened(failure.traceback)}
                now = time.monotonic()  # on one host, the same at both ends: the order is exact
                times = {"now": now, "age": now - failure.at}
                self._coordinator.report("failed", attempt=self._attempt, failure=fields, **times)
        if not group.running:
            self._result = None if group.failures else group.result()
            self._close_group()
            step = self._job.launcher_state.step
            self._coordinator.report("ended", attempt=self._attempt, step=step)

    def _send_due_signals(self) -> None:
        """Send due signals, but not before restarted workers can take a snapshot."""
        state = self._job.launcher_state
        if self._group and (state.step is None or state.is_under_way or self._group.failures):
            while self._signals_due and self._signals_due[0][0] <= time.monotonic():
                self._group.send(self._signals_due.pop(0)[1])

    def _record_failure(self, failure: WorkerFailure) -> None:
        """Record the failure that ends the run, if the worker could not: it was killed."""
        if not failure.traceback and not failure.summary.startswith(ConfigError.__name__):
            self._record("failed", failure, error=failure.summary, is_secondary=False)

    def _record(self, event: str, failure: WorkerFailure, **fields: Any) -> None:
        state = self._job.launcher_state
        if state.directory:
            with suppress(SamestepError):  # if the directory is gone, the workers raise the error
                record = open_record(Path(state.directory), writes=True)
                worker = {"rank": failure.rank, "host": failure.host}
                record.event(event, step=state.step or 0, **worker, **fields)
                record.close()

    def _close_group(self) -> None:
        if self._group:
            self._group.close()
            self._group = None
        self._outputs.drain()


def _shortened(traceback: str) -> str:
    if len(traceback) <= MAX_TRACEBACK:
        return traceback
    return f"{traceback[: MAX_TRACEBACK // 2]}\n[…]\n{traceback[-MAX_TRACEBACK // 2 :]}"
