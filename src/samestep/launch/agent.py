"""Sees the workers of this host through a run, attempt after attempt: those that were killed are replaced, and a failure ends all."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import closing, suppress
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from samestep.errors import SamestepError, WorkerError
from samestep.launch.crew import Attempt, Crew
from samestep.launch.nursery import Nursery
from samestep.launch.output import Outputs
from samestep.launch.place.told import LOOPBACK
from samestep.record import open_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from samestep.launch.failure import Failure
    from samestep.launch.kept import Kept
    from samestep.launch.worker import Job

LOOPBACK_ONLY: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
LOOK_SECONDS: Final = 0.1
# after a failure, for others to fail by themselves, and again after SIGTERM
FAREWELL_SECONDS: Final = 2.0


class Agent:
    """Starts the workers of a job and sees them to their end.

    What befell a worker from outside (kill -9, a stop, the kernel without memory) ends the attempt
    and not the run: all are forked again from this process, which has torch, and go on from the
    state that is kept. What a program did itself ends the run: the first failure is told, and the
    others get `FAREWELL_SECONDS` to fail by themselves and as long to act on SIGTERM.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._outputs = Outputs(hurried=lambda: bool(job.signals.received))
        self._nursery = Nursery(job)
        self._in_vain = 0  # attempts in a row that made no new step
        self._furthest = -1

    def run(self) -> Any:
        """Return rank 0's result. Raises `WorkerError` for the first worker that failed, `LaunchError` where none could be started."""
        with self._outputs, self._nursery:
            for number in count():
                with (
                    Store() as store,
                    closing(
                        Crew(self._job, self._attempt(number, store), self._outputs, self._nursery)
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

    def _see_to_end(self, crew: Crew) -> None:
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

    def _can_snapshot(self, crew: Crew) -> bool:
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
        return failure.from_outside and step is not None and in_vain < self._job.config.max_restarts

    def _replace(self, rank: int, failure: Failure) -> None:
        """Let a failed worker be replaced, and say so. Raises `WorkerError` where the run ends instead."""
        if not self._may_go_on(failure):
            raise WorkerError(rank, str(failure), failure.traceback, failure.status)
        kept = self._job.kept
        step = kept.step or 0
        self._in_vain = 1 if step > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, step)
        tell_restart(self._outputs, kept, rank, failure)


def tell_restart(outputs: Outputs, kept: Kept, rank: int, failure: Failure) -> None:
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
