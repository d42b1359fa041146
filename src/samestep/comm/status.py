"""The status of a worker: what it is doing, and in which call it waits for the other workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil
from typing_extensions import Self

from samestep.errors import WorldError

FORMING: Final = "forming the world"


class WorkerStatus:
    """What a worker is doing. Plain attributes, because a step sets them many times.

    `step` and the current `activity` in it; `collective` is the call in which the worker waits for
    the others, "" if it does not wait; `since` is when that started, in seconds of the monotonic
    clock. This base class reports nothing: it serves a worker that runs alone.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.step = 0
        self.activity = "starting"
        self.collective = ""
        self.since = time.monotonic()

    def set_activity(self, activity: str) -> None:
        """Record what the worker does from now on."""
        self.activity, self.since = activity, time.monotonic()

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Record an activity for the block, then the previous one again."""
        before = self.activity
        self.set_activity(activity)
        yield
        self.set_activity(before)

    def waiting(self, what: str) -> Self:
        """Return a context in which the worker waits for the others."""
        self.collective, self.since = what, time.monotonic()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.collective, self.since = "", time.monotonic()

    def explain(self, what: str, reason: str, *, timed_out: bool) -> WorldError:
        """Return the error of a call that timed out, or failed because others have exited."""
        return no_response(self.rank, what, reason)

    def report_failure(self, error: BaseException) -> None:
        """Report to the other workers that this one fails, so that all of them exit."""

    def finish(self) -> None:
        """Record that all workers have reached the end of the run: each may exit at any time."""

    def close(self) -> None:
        """Stop reporting."""


def no_response(rank: int, what: str, reason: str, details: str | None = None) -> WorldError:
    """Return the error of worker `rank` whose call `what` failed for `reason`."""
    details = details or "usually another worker failed: look for the first error of the run"
    return WorldError(
        f"worker {rank} got no response from other workers while {what}; {details} ({reason})"
    )


def process_state(pid: int) -> str:
    """Return "running", "stopped" (by a signal or debugger) or "exited" for a local process."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return "exited"
    if state in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}:
        return "stopped"
    return "exited" if state in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD} else "running"


def machine_name() -> str:
    """Return a name that is equal for workers that see each other's processes."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return os.urandom(8).hex()
