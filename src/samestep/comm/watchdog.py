"""The watchdog thread of a worker, which publishes its status and diagnoses missing workers."""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

import torch

from samestep.comm.status import (
    EXITED,
    LEFT,
    MAX_LISTED,
    STOPPED,
    Heartbeat,
    WorkerStatus,
    machine_name,
    no_response,
    report_hang,
)
from samestep.comm.store import StoreClient
from samestep.errors import HangError, WorldError

Value = TypeVar("Value")

HEARTBEAT_SECONDS: Final = 1.0
ALARM_POLL_SECONDS: Final = 0.05  # between checks after an alarm
RESPONSE_SECONDS: Final = 2.0  # for others to publish their stacks
DIAGNOSIS_SECONDS: Final = 3.0  # for one worker's report to reach all
EXIT_SECONDS: Final = 2.0  # for a worker to exit normally after the first failure
LINGER_SECONDS: Final = 1.5  # for others to read a failure before the store ends with this process
CLOSE_SECONDS: Final = 0.2
MAX_FRAMES: Final = 12
OWN: Final = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<frozen")
# site-packages may be below the standard library
STANDARD, INSTALLED = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
LOADER: Final = "dataloader.py"  # torch's: shown, because the worker waits for loader processes

GARBAGE: Final = (TypeError, ValueError)  # caused by another program's values in the store

# keys: whether something is wrong, the rank that reports on it, the first failure
ALARM, REPORTER, FAILURE = "alarm", "reporter", "failure"


class Watchdog(WorkerStatus):
    """A worker's status, published in the store by a thread; only this thread uses the `client`.

    The first worker that waits for more than `timeout_seconds` raises the alarm: all publish their
    stacks, and it reports on them. Once a failure is known (a hang, or an exception on another
    worker), the thread terminates its worker unless that exits soon, whatever it is doing.
    """

    def __init__(self, client: StoreClient, rank: int, size: int, timeout_seconds: float) -> None:
        super().__init__(rank)
        self._client, self._size, self._timeout_seconds = client, size, timeout_seconds
        self._machine = machine_name()
        self._main = threading.get_ident()
        self._alarmed = self._stuck = self._finished = False
        self._failure: str | None = None
        self._exit_by = math.inf
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._jobs.put(self._publish)
        self._thread = threading.Thread(target=self._watch, name="samestep watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def explain(self, what: str, reason: str, *, timed_out: bool) -> WorldError:
        if not timed_out:
            details = self._call(self._describe_exits, RESPONSE_SECONDS)
            return no_response(self.rank, what, reason, details)
        found = self._call(self._diagnose, DIAGNOSIS_SECONDS)
        if isinstance(found, str):
            return no_response(self.rank, what, reason, found)
        details = "the store that holds their status does not respond either: check its host"
        unknown = no_response(self.rank, what, reason, details)
        return found or HangError(str(unknown), is_retryable=True)

    def report_failure(self, error: BaseException) -> None:
        summary = f"{type(error).__name__}: {error}".partition("\n")[0]
        failure = f"{self._heartbeat().name} failed first, at step {self.step}: {summary}"
        self._call(partial(self._publish_failure, failure), EXIT_SECONDS)

    def finish(self) -> None:
        self._finished = True

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._thread.is_alive():  # not in a process that was forked from this one
            self._call(self._leave, CLOSE_SECONDS + LINGER_SECONDS * self._client.hosts_store)
            self._jobs.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _call(self, function: Callable[[], Value], seconds: float) -> Value | None:
        """Run a function in the thread; return None if the store fails or is too slow."""
        result: Future[Value] = Future()

        def job() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
                raise

        if not self._thread.is_alive() or self._stuck:
            return None
        self._jobs.put(job)
        try:
            return result.result(seconds)
        except FutureTimeoutError:
            self._stuck = True
        except (OSError, *GARBAGE):
            pass
        return None

    # The methods below run in the thread.

    def _watch(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                with suppress(*GARBAGE):
                    job()
            except OSError as error:
                if self._finished:  # the process that hosts the store may exit then
                    break
                with suppress(OSError):
                    self._record_failure(f"{error}; the launcher or worker 0 hosted it")
            if time.monotonic() > self._exit_by:
                self._terminate()
        self._client.close()

    def _next_job(self) -> Callable[[], None] | None:
        pause = min(HEARTBEAT_SECONDS, self._timeout_seconds / 4)
        try:
            return self._jobs.get(timeout=ALARM_POLL_SECONDS if self._alarmed else pause)
        except Empty:
            return self._publish

    def _publish(self) -> None:
        if self._failure is not None:
            return
        self._put_heartbeat()
        if self._alarmed:
            self._record_failure(self._client.get(FAILURE))
        elif self._client.has([ALARM]):
            self._alarmed = True
            self._publish()

    def _put_heartbeat(self, *, left: bool = False) -> None:
        self._client.put(f"heartbeat/{self.rank}", asdict(self._heartbeat(left=left)))

    def _heartbeat(self, *, left: bool = False) -> Heartbeat:
        return Heartbeat(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=self._machine,
            at=time.time(),
            step=self.step,
            activity=self.activity,
            collective=self.collective,
            seconds=round(time.monotonic() - self.since, 3),
            left=left,
            failed=self._failure is not None,
            stack=_stack(self._main) if self._alarmed else None,
        )

    def _record_failure(self, failure: object) -> None:
        """Set a deadline for exiting, and stop reading the store: its host may exit."""
        if failure is not None and self._failure is None:
            self._failure, self._exit_by = str(failure), time.monotonic() + EXIT_SECONDS
            self._put_heartbeat()

    def _publish_failure(self, failure: str) -> None:
        if self._failure is None:
            self._client.put(ALARM, value=True)
            self._record_failure(self._client.put_first(FAILURE, failure))

    def _diagnose(self) -> HangError | str | None:
        """Raise the alarm and return a report, or wait for the worker that raised it first."""
        self._client.put(ALARM, value=True)
        self._alarmed = True
        is_reporter = self._client.put_first(REPORTER, self.rank) == self.rank
        deadline = time.monotonic() + (RESPONSE_SECONDS if is_reporter else DIAGNOSIS_SECONDS)
        beats: list[Heartbeat] = []
        while time.monotonic() < deadline and self._failure is None:
            self._publish()
            if is_reporter:
                beats = self._other_heartbeats()
                known = [beat for beat in beats if beat.stack is not None or self._is_gone(beat)]
                if len(known) == self._size - 1:
                    break
            time.sleep(ALARM_POLL_SECONDS)
        if self._failure is not None or not is_reporter:
            return self._failure
        own = self._heartbeat()
        report = report_hang(own, beats, self._size, self._timeout_seconds)
        self._publish_failure(f"{report.headline}; see the report of {own.name}")
        return HangError(report.text, is_retryable=report.is_retryable)

    def _describe_exits(self) -> str:
        """Return the first failure, or which workers left the run or exited; "" if unknown."""
        failure = self._failure or self._client.get(FAILURE)
        if failure is not None:
            return str(failure)
        gone = [beat for beat in self._other_heartbeats() if self._is_gone(beat)]
        workers = [beat.describe(self._machine) for beat in gone[:MAX_LISTED]]
        causes = [f"likely cause: {beat.cause(self._machine)}" for beat in gone[:1]]
        return "; ".join([*workers, *causes])

    def _other_heartbeats(self) -> list[Heartbeat]:
        others = [rank for rank in range(self._size) if rank != self.rank]
        found = [self._client.get(f"heartbeat/{rank}") for rank in others]
        return [Heartbeat(**beat) for beat in found if beat is not None]

    def _is_gone(self, beat: Heartbeat) -> bool:
        return beat.trouble(self._machine) in {LEFT, EXITED, STOPPED}

    def _leave(self) -> None:
        """Report that this worker leaves; after a failure, the store's host waits for all."""
        self._exit_by = math.inf
        if self._failure is None and not self._finished:
            self._put_heartbeat(left=True)
        deadline = time.monotonic() + LINGER_SECONDS
        while self._client.hosts_store and self._failure and time.monotonic() < deadline:
            if all(beat.failed or self._is_gone(beat) for beat in self._other_heartbeats()):
                return
            time.sleep(ALARM_POLL_SECONDS)

    def _terminate(self) -> None:
        """End this process, whatever its main thread is doing."""
        doing = f"waiting while {self.collective}" if self.collective else self.activity
        where = f"worker {self.rank} at step {self.step} ({doing})"
        os.write(2, f"samestep: terminating {where}: {self._failure}\n".encode(errors="replace"))
        os._exit(1)


def _stack(thread: int) -> list[str]:
    """Return the stack of a thread: the user's own frames, and the innermost one."""
    # the only way to see another thread's frames
    frames = traceback.extract_stack(sys._current_frames().get(thread))  # noqa: SLF001
    return traceback.format_list([*filter(_is_users, frames[:-1]), *frames[-1:]][-MAX_FRAMES:])


def _is_users(frame: traceback.FrameSummary) -> bool:
    file = frame.filename
    return file.endswith(LOADER) or (
        not file.startswith(OWN) and (file.startswith(INSTALLED) or not file.startswith(STANDARD))
    )
