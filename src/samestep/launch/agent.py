"""Torch's elastic agent on one host: it forks workers and tells them their places; how they end is decided here."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import time
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from samestep.errors import LaunchError
from samestep.launch.preload import no_collection
from samestep.launch.report import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.process import BaseProcess
    from typing import Any

    from samestep.launch.worker import Job

LOOPBACK: Final = "127.0.0.1"
LOOK_SECONDS: Final = 0.1
FAREWELL_SECONDS: Final = 2.0  # after a failure, for others to fail by themselves, and again after SIGTERM
SNAPSHOT_SECONDS: Final = 30.0  # after a signal to the launcher, for workers to snapshot and end
SIGNALS_VARIABLE: Final = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def run(job: Job) -> dict[int, Failure]:
    """Run a job's workers to their end; return by rank how those that failed did.

    The agent ends here, and its store with it, so that no traceback keeps them.
    """
    agent = Agent(job)
    agent.run()
    return agent.failures


class Agent(LocalElasticAgent):
    """Starts the workers of a job and sees them to their end.

    Elastic's monitor would name the failed worker that it meets first instead of the one that failed first, and give the others
    30 seconds, as after a signal to the launcher. Here a failure ends all within 4 seconds, and a signal still gives them 30.
    After `run`, `failures` tells by rank who failed.
    """

    def __init__(self, job: Job) -> None:
        def work() -> None:  # elastic asks for a plain function
            job.work()

        # LaunchConfig and elastic_launch are not used: they ask CUDA for its devices, after which no forked worker can use CUDA.
        spec = WorkerSpec(
            role="worker",
            local_world_size=len(job.reports),
            entrypoint=work,
            rdzv_handler=LoopbackRendezvous(),
            max_restarts=0,
            monitor_interval=LOOK_SECONDS,
            local_addr=LOOPBACK,
        )
        super().__init__(spec, logs_specs=NoLogs(), start_method="fork")
        self.failures: dict[int, Failure] = {}
        self._job = job
        self._running: dict[int, BaseProcess] = {}
        self._groups: list[int] = []
        self._looked_at = time.monotonic()
        self._signals_answered = 0
        self._due: list[tuple[float, signal.Signals]] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before = multiprocessing.active_children()
        try:
            # Elastic's handlers would stay behind, and raise wherever the launcher is.
            # Garbage stays as it is: each worker freezes what it inherits before it collects again.
            with _variable(SIGNALS_VARIABLE, ""), no_collection():
                pids: dict[int, Any] = super()._start_workers(worker_group)
        except OSError as error:
            for process in multiprocessing.active_children():
                if process not in before:
                    process.kill()
                    process.join()
            raise LaunchError(f"workers could not be started: {error}") from error
        # The processes themselves, because multiprocessing may have reaped one already: then its id tells nothing any more.
        self._running = dict(enumerate(self._pcontext._pc.processes))  # type: ignore[union-attr]  # noqa: SLF001
        self._groups = list(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        if self._running:
            self._stop_when_due()
            return RunResult(state=WorkerState.HEALTHY)
        if not self.failures:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(range(len(self._groups))))
        for group in self._groups:
            _kill_group(group)  # what failed workers started and did not end
        return RunResult(state=WorkerState.FAILED)

    def _look(self) -> None:
        """Note who ended. Without last words a worker counts from when it was last seen alive: its end came before all it caused."""
        now = time.monotonic()
        for rank, process in list(self._running.items()):
            if process.exitcode is None:
                continue
            del self._running[rank]
            if process.exitcode != 0:
                self.failures[rank] = self._job.reports[rank].failure() or Failure.of_exit(process.exitcode, at=self._looked_at)
        self._looked_at = now

    def _stop_when_due(self) -> None:
        now = time.monotonic()
        received = self._job.signals.received
        if len(received) > self._signals_answered:
            patient = self._signals_answered == 0 and not self.failures
            self._signals_answered = len(received)
            self._due = [(now, received[0]), (now + SNAPSHOT_SECONDS, signal.SIGKILL)] if patient else [(now, signal.SIGKILL)]
        elif self.failures and not self._due:
            self._due = [(now + FAREWELL_SECONDS, signal.SIGTERM), (now + 2 * FAREWELL_SECONDS, signal.SIGKILL)]
        while self._due and self._due[0][0] <= now:
            _, number = self._due.pop(0)
            for process in self._running.values():
                _send(process, number)


class LoopbackRendezvous(RendezvousHandler):
    """The meeting of one agent with itself, around a store that listens on the loopback address alone.

    A TCPStore that opens its own socket listens on all addresses, whatever host name it is given; so it gets one that is open.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        listener = socket.create_server((LOOPBACK, 0))
        self._port: int = listener.getsockname()[1]
        self._store = TCPStore(LOOPBACK, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class NoLogs(LogsSpecs):
    """Workers write where the launcher writes, and elastic makes no files."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environment in envs.values():
            environment["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(stdouts=dict.fromkeys(envs, ""), stderrs=dict.fromkeys(envs, ""), error_files=dict.fromkeys(envs, os.devnull))


@contextmanager
def quiet_elastic() -> Iterator[None]:
    """Keep elastic's own log from the terminal: the first thing to be seen of a failure is the failure."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _send(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
