"""The watchdog thread of a worker, which publishes its status and diagnoses missing workers."""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from samestep.comm.mesh import StatusBoard, boards
from samestep.comm.status import (
    EXITED,
    LEFT,
    MAX_LISTED,
    STOPPED,
    Heartbeat,
    WorkerStatus,
    describe_stall,
    no_response,
    report_hang,
)
from samestep.comm.store import StoreClient
from samestep.errors import FAILED_FIRST, HangError, WorldError
from samestep.host import RunningClock, kernel_id
from samestep.user_code import is_callers

Value = TypeVar("Value")
OnStall = Callable[[str | None], object]

HEARTBEAT_SECONDS: Final = 1.0
CHECKS: Final = 4  # of a board between two heartbeats
MISSED: Final = 2.5  # heartbeats of a worker, after which another one publishes for its host
ALARM_POLL_SECONDS: Final = 0.05  # between checks after an alarm
ALARM_POLL_SECONDS_PER_BOARD: Final = 0.0005  # one store answers all
FEW_BOARDS: Final = 64  # few enough for every worker to read them all
STALL_SHARE: Final = 0.25  # of the timeout, after which a wait is reported
MIN_STALL_SECONDS: Final = 2.0  # lower bound of that
RESPONSE_SECONDS: Final = 2.0  # for others to publish their stacks
DIAGNOSIS_SECONDS: Final = 3.0  # for one worker's report to reach all
EXIT_SECONDS: Final = 2.0  # for a worker to exit normally after the first failure
LINGER_SECONDS: Final = 1.5  # for others to read a failure before the store ends with this process
CLOSE_SECONDS: Final = 0.2
MAX_FRAMES: Final = 12
MAX_FRAME: Final = 1000  # characters, so that a status fits on its board

GARBAGE: Final = (TypeError, ValueError)  # caused by another program's values in the store

# keys: whether something is wrong, the rank that reports on it, the first failure, and the first
# worker that left the run
ALARM, REPORTER, FAILURE, FIRST_LEFT = "alarm", "reporter", "failure", "left"
LOST: Final = "lost"  # on a board: why the host's connection to the store is lost


class Watchdog(WorkerStatus):
    """A worker's status, published in the store by a thread; only this thread uses the `client`.

    Workers write to a `board` that they share with others of their host, one of which publishes it.
    `hosts` are all ranges of workers that share boards.

    The first worker that waits for more than `timeout_seconds` raises the alarm: all publish their
    stacks, and it reports on them. Once a failure is known (a hang, or an exception on another
    worker), the thread terminates its worker unless that exits soon, whatever it is doing.

    `on_stall` is called from the thread with one line about workers that keep others waiting, and
    with None when they no longer do.
    """

    def __init__(
        self,
        client: StoreClient,
        timeout_seconds: float,
        hosts: Sequence[range],
        board: StatusBoard,
        on_stall: OnStall,
    ) -> None:
        super().__init__(board.rank)
        self._on_stall = on_stall
        self._client, self._board, self._boards = client, board, boards(hosts)
        self._size, self._timeout_seconds = self._boards[-1].stop, timeout_seconds
        self._heartbeat_seconds = min(HEARTBEAT_SECONDS, timeout_seconds / 4)
        self._clock = RunningClock()
        self._write_at = self._publish_at = 0.0
        self._published = 0  # stacks and failures in what was published last
        self._stalled_since = 0.0  # the start of the last wait that was long
        self._stall_reported = False  # by this worker, and it goes on
        # Only the thread waits for a store whose process is stopped; it may continue later.
        client.seconds = None
        self._machine = kernel_id("pid") or os.urandom(8).hex()
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
        diagnosis = self._call(self._diagnose, DIAGNOSIS_SECONDS)
        if isinstance(diagnosis, str):
            return no_response(self.rank, what, reason, diagnosis)
        details = "the store with their statuses is not responding either: check its host"
        unknown = no_response(self.rank, what, reason, details)
        return diagnosis or HangError(str(unknown), is_retryable=True)

    def report_failure(self, error: BaseException) -> None:
        summary = f"{type(error).__name__}: {error}".partition("\n")[0]
        failure = f"{self._heartbeat().name} {FAILED_FIRST}, at step {self.step}: {summary}"
        self._call(partial(self._publish_failure, failure), EXIT_SECONDS)

    def share_sample(
        self, sample: Mapping[str, Any], others: Sequence[int]
    ) -> Sequence[Any] | None:
        def share() -> Sequence[Any] | None:
            if self._failure is not None:  # the store may be gone
                return None
            if self.rank > 0:  # the worker that writes the record needs only the others'
                self._client.put(f"system/{self.rank}", sample)
            return self._client.get_many([f"system/{rank}" for rank in others])

        return self._call(share, RESPONSE_SECONDS, is_urgent=False)

    def set_key(self, key: bytes) -> None:
        self._client.key = key
        self._write_at = self._publish_at = 0.0
        self._jobs.put(self._publish)

    def finish(self) -> None:
        self._finished = True

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._thread.is_alive():  # not in a process that was forked from this one
            self._call(self._leave, CLOSE_SECONDS + LINGER_SECONDS * self._client.hosts_store)
            self._jobs.put(None)
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._board.close()

    def _call(
        self, function: Callable[[], Value], seconds: float, *, is_urgent: bool = True
    ) -> Value | None:
        """Run a function in the thread; return None if the store fails or is too slow.

        After an urgent call that was too slow, no call waits again.
        """
        result: Future[Value | None] = Future()

        def job() -> None:
            value = None
            try:
                value = function()
            finally:  # the thread handles errors; in the result, they would keep the store open
                result.set_result(value)

        if not self._thread.is_alive() or self._stuck:
            return None
        self._jobs.put(job)
        try:
            return result.result(seconds)
        except FutureTimeoutError:
            self._stuck = self._stuck or is_urgent
            return None

    # The methods below run in the thread.

    def _watch(self) -> None:
        while (job := self._next_job()) is not None:
            self._clock.now()
            try:
                with suppress(*GARBAGE):
                    job()
            except OSError as error:
                if self._finished:  # the process that hosts the store may exit then
                    break
                with suppress(OSError):
                    self._record_failure(f"{error}; the launcher or worker 0 hosted it", LOST)
            with suppress(OSError, RuntimeError, *GARBAGE):
                self._check_gpu()
            if time.monotonic() > self._exit_by:
                self._terminate()
        self._client.close()

    def _check_gpu(self) -> None:
        """Report a hang of the GPU while the program waits for it elsewhere, as in `.item()`."""
        if self._failure is not None or self.collective:
            return
        is_new = time.monotonic() - self._clock.resumed_at < self._timeout_seconds
        if not is_new and (what := self.gpu_calls.overdue(self._timeout_seconds)):
            self.collective = what
            diagnosis = self._diagnose()
            os.write(2, f"samestep: {diagnosis}\n".encode(errors="replace"))
            self._record_failure(diagnosis or f"its GPU did not complete the call: {what}")

    def _next_job(self) -> Callable[[], None] | None:
        checks = CHECKS if len(self._board.ranks) > 1 else 1
        pause = ALARM_POLL_SECONDS if self._alarmed else self._heartbeat_seconds / checks
        try:
            return self._jobs.get(timeout=pause)
        except Empty:
            return self._publish

    def _publish(self) -> None:
        """Write this worker's status to the board if it is due, and act on news from the store."""
        if time.monotonic() >= self._write_at:
            self._board.write(asdict(self._heartbeat()))
            self._write_at = time.monotonic() + 0.9 * self._heartbeat_seconds
        if self._board.publishes(MISSED * self._heartbeat_seconds):
            self._sync_news()
        self._report_stall()
        news = self._board.news()
        if not self._finished:
            self._record_failure(news.get(LOST), LOST)
        if self._alarmed:
            self._record_failure(news.get(FAILURE))
        elif news.get(ALARM):
            self._raise_alarm()
            self._publish()

    def _sync_news(self) -> None:
        """Publish the board if it is due, and read the alarm and the first failure."""
        now = time.monotonic()
        statuses = self._board.statuses()
        changes = sum((beat["stack"] is not None) + beat["failed"] for beat in statuses)
        if now < self._publish_at and changes == self._published:
            return
        poll = max(ALARM_POLL_SECONDS, ALARM_POLL_SECONDS_PER_BOARD * len(self._boards))
        self._publish_at = now + (poll if self._alarmed else 0.9 * self._heartbeat_seconds)
        self._published = changes
        self._client.put(f"heartbeat/{self._board.ranks.start}", statuses)
        if self._failure is not None:
            return
        if not self._alarmed and self._client.get(ALARM):
            self._board.write_news({ALARM: True})
        if self._alarmed and (failure := self._client.get(FAILURE)) is not None:
            self._board.write_news({FAILURE: str(failure)})

    def _report_stall(self) -> None:
        """Report a wait of a quarter of the timeout; only the first of the waiting workers does."""
        what, since = self.collective, self.since
        limit = self._timeout_seconds
        if self._stall_reported and since != self._stalled_since:
            self._stall_reported = False
            if self._failure is None and not self._alarmed:
                self._on_stall(None)
        waited = time.monotonic() - max(since, self._clock.resumed_at)
        is_long = waited > max(STALL_SHARE * limit, MIN_STALL_SECONDS)
        if what and is_long and since != self._stalled_since and not self._alarmed:
            self._stalled_since = since
            key = f"stalled/{self.step}/{what}"
            if self._client.put_first(key, self.rank) == self.rank and self.since == since:
                others = list(self._heartbeats().values())
                self._stall_reported = True
                self._on_stall(describe_stall(self._heartbeat(), others, self._size, limit))

    def _raise_alarm(self) -> None:
        self._alarmed = True
        # the program may wait for its GPU, which began to wait later than that of the reporter
        self.collective = self.collective or self.gpu_calls.overdue(0.0)
        self._write_at = self._publish_at = 0.0
        self._board.write_news({ALARM: True})

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

    def _record_failure(self, failure: object, kind: str = FAILURE) -> None:
        """Set a deadline for exiting, and stop reading the store: its host may exit."""
        if failure is not None and self._failure is None:
            self._failure, self._exit_by = str(failure), time.monotonic() + EXIT_SECONDS
            self._board.write_news({ALARM: True, kind: self._failure})
            self._write_at = 0.0
            self._publish()

    def _publish_failure(self, failure: str) -> None:
        if self._failure is None:
            self._client.put(ALARM, value=True)
            self._record_failure(self._client.put_first(FAILURE, failure))

    def _diagnose(self) -> HangError | str | None:
        """Raise the alarm and return a report, or wait for the worker that raised it first."""
        is_reporter = self._client.put_first(REPORTER, self.rank) == self.rank
        if is_reporter:
            self._client.put(ALARM, value=True)
        self._raise_alarm()
        deadline = time.monotonic() + (RESPONSE_SECONDS if is_reporter else DIAGNOSIS_SECONDS)
        beats: dict[int, Heartbeat] = {}
        while time.monotonic() < deadline and self._failure is None:
            self._publish()
            if is_reporter:
                explained = {rank for rank, beat in beats.items() if self._is_explained(beat)}
                beats |= self._heartbeats(explained)
                if all(map(self._is_explained, beats.values())) and len(beats) == self._size - 1:
                    break
            time.sleep(ALARM_POLL_SECONDS)
        if self._failure is not None or not is_reporter:
            return self._failure
        own_beat, others = self._heartbeat(), [beat for _, beat in sorted(beats.items())]
        report = report_hang(own_beat, others, self._size, self._timeout_seconds)
        self._publish_failure(f"{report.headline}; see the report of {own_beat.name}")
        return HangError(report.text, is_retryable=report.is_retryable)

    def _is_explained(self, beat: Heartbeat) -> bool:
        return beat.stack is not None or self._is_gone(beat)

    def _describe_exits(self) -> str:
        """Return the first failure, or which workers left the run or exited; "" if unknown."""
        failure = self._failure or self._client.get(FAILURE)
        if failure is not None:
            return str(failure)
        beats = _newest(self._board.statuses())
        if len(self._boards) <= FEW_BOARDS:
            beats = self._heartbeats()
        if (left := self._client.get(FIRST_LEFT)) is not None:
            beats |= _newest([left])
        gone = [beat for _, beat in sorted(beats.items()) if self._is_gone(beat)]
        workers = [beat.describe(self._machine) for beat in gone[:MAX_LISTED]]
        causes = [f"likely cause: {beat.cause(self._machine)}" for beat in gone[:1]]
        return "; ".join([*workers, *causes])

    def _heartbeats(self, explained: Container[int] = ()) -> dict[int, Heartbeat]:
        """Return other workers' heartbeats by rank, except of boards that are all `explained`.

        Workers that cannot open the board of their host publish their own.
        """
        needed = [ranks for ranks in self._boards if any(rank not in explained for rank in ranks)]
        keys = [f"heartbeat/{ranks.start}" for ranks in needed if ranks != self._board.ranks]
        beats = _newest([*_listed(self._client.get_many(keys)), *self._board.statuses()])
        unseen = [rank for ranks in needed for rank in ranks if rank not in beats]
        alone = self._client.get_many([f"heartbeat/{rank}" for rank in unseen])
        beats |= _newest(_listed(alone))
        beats.pop(self.rank, None)
        return beats

    def _is_gone(self, beat: Heartbeat) -> bool:
        return beat.trouble(self._machine) in {LEFT, EXITED, STOPPED}

    def _leave(self) -> None:
        """Report that this worker leaves; after a failure, the store's host waits for all."""
        self._exit_by = math.inf
        left = self._failure is None and not self._finished
        status = asdict(self._heartbeat(left=left))
        if left:
            self._client.put_first(FIRST_LEFT, status)
        publishes = self._board.publishes(MISSED * self._heartbeat_seconds)
        self._board.write(status, left=True)
        if publishes and not self._finished:
            self._client.put(f"heartbeat/{self._board.ranks.start}", self._board.statuses())
        deadline = time.monotonic() + LINGER_SECONDS
        while self._client.hosts_store and self._failure and time.monotonic() < deadline:
            if all(beat.failed or self._is_gone(beat) for beat in self._heartbeats().values()):
                return
            time.sleep(ALARM_POLL_SECONDS)

    def _terminate(self) -> None:
        """End this process, whatever its main thread is doing."""
        doing = f"waiting while {self.collective}" if self.collective else self.activity
        where = f"worker {self.rank} at step {self.step} ({doing})"
        os.write(2, f"samestep: terminating {where}: {self._failure}\n".encode(errors="replace"))
        os._exit(1)


def _listed(values: Sequence[Any]) -> list[Any]:
    """Return the items of all values that are lists, as every worker writes them."""
    return [item for value in values if isinstance(value, list) for item in value]


def _newest(statuses: Sequence[Mapping[str, Any]]) -> dict[int, Heartbeat]:
    """Return the newest heartbeat of each rank."""
    parsed = (Heartbeat.read(status) for status in statuses)
    beats = sorted((beat for beat in parsed if beat is not None), key=attrgetter("at"))
    return {beat.rank: beat for beat in beats}


def _stack(thread: int) -> list[str]:
    """Return the stack of a thread: the user's own frames, and the innermost one."""
    # the only way to see another thread's frames
    frames = traceback.extract_stack(sys._current_frames().get(thread))  # noqa: SLF001
    relevant = [*filter(is_callers, frames[:-1]), *frames[-1:]][-MAX_FRAMES:]
    return [text[:MAX_FRAME] for text in traceback.format_list(relevant)]
