"""Tells the other workers where this one is, and finds out why they do not come."""

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
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

import torch

from samestep.comm.status import (
    GONE,
    LEFT,
    MOST_TOLD,
    STOPPED,
    Heartbeat,
    WorkerStatus,
    machine_name,
    no_answer,
    report,
)
from samestep.comm.store import StoreClient
from samestep.errors import HangError, WorldError

Value = TypeVar("Value")

BEAT_SECONDS: Final = 1.0
ALARMED_SECONDS: Final = 0.05  # between looks, once something is wrong
ANSWER_SECONDS: Final = 2.0  # for others to tell where they are
FIND_OUT_SECONDS: Final = 3.0  # for what one finds out to reach all
FAREWELL_SECONDS: Final = 2.0  # for a worker to end by itself after the first failure
# for others to hear of a failure, before their store goes with this process
LINGER_SECONDS: Final = 1.5
CLOSE_SECONDS: Final = 0.2
MOST_FRAMES: Final = 12
OWN: Final = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<frozen")
# the latter may be below the former
STANDARD, INSTALLED = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
# of torch, shown all the same: then loader processes keep the worker waiting
LOADER: Final = "dataloader.py"

# what a stranger may have written into the store shows as these
GARBAGE: Final = (TypeError, ValueError)

# keys: something is wrong; who finds out; what failed first
ALARM, REPORTER, FAILURE = "alarm", "reporter", "failure"


class Watchdog(WorkerStatus):
    """Leaves a worker's status in the store from a thread of its own, which alone uses the `line`.

    The first that waited for more than `timeout_seconds` raises the alarm: all leave their stacks,
    and it tells what it finds. Once a failure is known, be it a hang or another, a worker that does
    not end by itself soon is ended here, whatever it does.
    """

    def __init__(self, line: StoreClient, rank: int, size: int, timeout_seconds: float) -> None:
        super().__init__(rank)
        self._line, self._size, self._timeout_seconds = line, size, timeout_seconds
        self._host, self._machine = socket.gethostname(), machine_name()
        self._name = f"worker {rank} (host {self._host}, process {os.getpid()})"
        self._main = threading.get_ident()
        self._alarmed = False
        self._stuck = False
        self._all_ended = False
        self._failure: str | None = None
        self._ends_at = math.inf
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._jobs.put(self._beat)
        self._thread = threading.Thread(target=self._watch, name="samestep watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def explain(self, what: str, reason: str, *, late: bool) -> WorldError:
        if not late:
            return no_answer(self.rank, what, reason, self._ask(self._who_left, ANSWER_SECONDS))
        found = self._ask(self._find_out, FIND_OUT_SECONDS)
        if isinstance(found, str):
            return no_answer(self.rank, what, reason, found)
        silent = "nor does the store answer, over which workers tell where they are: see whether its host does"
        return found or HangError(
            str(no_answer(self.rank, what, reason, silent)), is_retryable=True
        )

    def report_failure(self, error: BaseException) -> None:
        summary = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._ask(
            partial(self._tell, f"{self._name} failed first, at step {self.step}: {summary}"),
            FAREWELL_SECONDS,
        )

    def end(self) -> None:
        self._all_ended = True

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._thread.is_alive():  # not so in a process that was forked from this one
            self._ask(self._leave, CLOSE_SECONDS + LINGER_SECONDS * self._line.keeps_store)
            self._jobs.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _ask(self, question: Callable[[], Value], seconds: float) -> Value | None:
        """Return what the thread answers; None where it cannot, or not in time: the store may be gone, or never answer."""
        answer: Future[Value] = Future()

        def job() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
                raise

        if not self._thread.is_alive() or self._stuck:
            return None
        self._jobs.put(job)
        try:
            return answer.result(seconds)
        except LateError:
            self._stuck = True
        except (OSError, *GARBAGE):
            pass
        return None

    # What follows runs in the thread.

    def _watch(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                with suppress(*GARBAGE):
                    job()
            except OSError as error:
                if self._all_ended:  # whoever kept the store may go then
                    break
                with suppress(OSError):
                    self._note_failure(f"{error}; it was kept by the launcher, or by worker 0")
            if time.monotonic() > self._ends_at:
                self._end_process()
        self._line.close()

    def _next_job(self) -> Callable[[], None] | None:
        try:
            return self._jobs.get(
                timeout=ALARMED_SECONDS
                if self._alarmed
                else min(BEAT_SECONDS, self._timeout_seconds / 4)
            )
        except Empty:
            return self._beat

    def _beat(self) -> None:
        if self._failure is not None:
            return
        self._line.put(f"beat/{self.rank}", asdict(self._where()))
        if self._alarmed:
            self._note_failure(self._line.get(FAILURE))
        elif self._line.has([ALARM]):
            self._alarmed = True
            self._beat()

    def _where(self, *, left: bool = False) -> Heartbeat:
        return Heartbeat(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            machine=self._machine,
            at=time.time(),
            step=self.step,
            part=self.part,
            waits=self.waits,
            seconds=round(time.monotonic() - self.since, 3),
            left=left,
            knows=self._failure is not None,
            stack=_stack(self._main) if self._alarmed else None,
        )

    def _note_failure(self, failure: object) -> None:
        """Give the process so long to end by itself. From now on nothing is asked of the store: whoever keeps it may go."""
        if failure is not None and self._failure is None:
            self._failure, self._ends_at = str(failure), time.monotonic() + FAREWELL_SECONDS
            self._line.put(f"beat/{self.rank}", asdict(self._where()))

    def _tell(self, failure: str) -> None:
        if self._failure is None:
            self._line.put(ALARM, value=True)
            self._note_failure(self._line.put_first(FAILURE, failure))

    def _find_out(self) -> HangError | str | None:
        """Raise the alarm and return what is found; where another worker did so before, wait for what it finds."""
        self._line.put(ALARM, value=True)
        self._alarmed = True
        finds_out = self._line.put_first(REPORTER, self.rank) == self.rank
        deadline = time.monotonic() + (ANSWER_SECONDS if finds_out else FIND_OUT_SECONDS)
        beats: list[Heartbeat] = []
        while time.monotonic() < deadline and self._failure is None:
            self._beat()
            if finds_out:
                beats = self._beats_of_others()
                if len(beats) == self._size - 1 and all(
                    beat.stack is not None or self._is_gone(beat) for beat in beats
                ):
                    break
            time.sleep(ALARMED_SECONDS)
        if self._failure is not None or not finds_out:
            return self._failure
        found = report(self._where(), beats, self._size, self._timeout_seconds)
        self._tell(f"{found.headline}: {self._name} tells more")
        return HangError(found.text, is_retryable=found.is_retryable)

    def _who_left(self) -> str:
        """Return what is known of an end of others: the first failure, or who left the run or ended before."""
        failure = self._failure or self._line.get(FAILURE)
        if failure is not None:
            return str(failure)
        gone = [beat for beat in self._beats_of_others() if self._is_gone(beat)]
        told = [beat.told(self._machine) for beat in gone[:MOST_TOLD]]
        return "; ".join([*told, f"usual cause: {gone[0].cause(self._machine)}"]) if gone else ""

    def _beats_of_others(self) -> list[Heartbeat]:
        """Return what the others said last, of those who did."""
        told = [self._line.get(f"beat/{rank}") for rank in range(self._size) if rank != self.rank]
        return [Heartbeat(**beat) for beat in told if beat is not None]

    def _is_gone(self, beat: Heartbeat) -> bool:
        return beat.state(self._machine) in {LEFT, GONE, STOPPED}

    def _leave(self) -> None:
        """Say that this worker leaves. After a failure the worker that keeps the store stays until all others know."""
        self._ends_at = math.inf
        if self._failure is None and not self._all_ended:
            self._line.put(f"beat/{self.rank}", asdict(self._where(left=True)))
        deadline = time.monotonic() + LINGER_SECONDS
        while self._line.keeps_store and self._failure is not None and time.monotonic() < deadline:
            if all(beat.knows or self._is_gone(beat) for beat in self._beats_of_others()):
                return
            time.sleep(ALARMED_SECONDS)

    def _end_process(self) -> None:
        """End this process, whatever its main thread does."""
        where = f"waiting while {self.waits}" if self.waits else self.part
        line = f"samestep: worker {self.rank} ends here, at step {self.step}: {where}. {self._failure}\n"
        os.write(2, line.encode(errors="replace"))
        os._exit(1)


def _stack(thread: int) -> list[str]:
    """Return where a thread is: the user's own frames, and the innermost one."""
    # there is no other way
    frames = traceback.extract_stack(sys._current_frames().get(thread))  # noqa: SLF001
    return traceback.format_list([*filter(_is_users, frames[:-1]), *frames[-1:]][-MOST_FRAMES:])


def _is_users(frame: traceback.FrameSummary) -> bool:
    file = frame.filename
    return file.endswith(LOADER) or (
        not file.startswith(OWN) and (file.startswith(INSTALLED) or not file.startswith(STANDARD))
    )
