"""What is told when workers wait in vain: who waited where, who did not come, and the usual cause."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import Self

from samestep.errors import WorldError

MOST_TOLD: Final = 8  # of those who did not come

STOPPED: Final = "its process is stopped (state T)"
GONE: Final = "its process has ended"
SILENT: Final = "it does not answer any more"
LEFT: Final = "it has left the run"
FROM_OUTSIDE: Final = (STOPPED, GONE, SILENT)  # nothing that the program did
ENDINGS: Final = ("ending a loop", "ending the run")

CAUSES: Final = {
    STOPPED: "SIGSTOP, Ctrl-Z or a debugger: let it go on with kill -CONT, or start again",
    GONE: "it was killed, memory ran out, or native code crashed: see the end of what it printed",
    SILENT: "its host is gone, the network to it is cut, or native code keeps Python from running: see whether the host answers",
    LEFT: "a return, break or exit that depends on the rank or on a worker's own data: let all workers make the same steps",
}
PARTS: Final = {
    "loading data": "the data set does not return, because of a file system, download or lock: see the last line of its stack; "
    "where reading takes so long, raise timeout",
    "computing": "a lane that computes for very long, because it is compiled or its device hangs; where it has to, raise timeout",
    "taking a snapshot": "a disk or a remote storage that is slow; where it has to be, raise timeout or take snapshots more rarely",
}
LOADERS: Final = "its loader processes give no batch: try loader_workers=0 to see where; where reading takes so long, raise timeout"
OTHER_CALL: Final = "a condition that depends on the rank or on a worker's own data: let all workers make the same calls in the same order"
FEWER: Final = "a worker has fewer batches, or left its loop early: give all the same data set and the same number of steps"
ALONE: Final = "something that one worker does alone, such as a download or an evaluation: let all do it, or raise timeout"
NETWORK: Final = "all made the same call, and the network between them lost what they sent: look at firewalls and network interfaces"


@dataclass(frozen=True)
class Heartbeat:
    """What a worker said of where it is, at clock time `at`: it had been there for `seconds`. Plain data.

    `machine` is common to workers that see each other's processes; one that `left` or `knows` of a
    failure asks nothing more. `stack` is there in answer to a question.
    """

    rank: int
    host: str
    pid: int
    machine: str
    at: float
    step: int
    part: str
    waits: str
    seconds: float
    left: bool
    knows: bool
    stack: Sequence[str] | None

    def state(self, machine: str) -> str:
        """Return what keeps the worker from coming whatever it does, as a worker on `machine` sees it; "" for nothing."""
        if self.left:
            return LEFT
        if self.stack is not None:
            return ""
        state = process_state(self.pid) if self.machine == machine else "unknown"
        return STOPPED if state in {"T", "t"} else GONE if state in {"", "Z", "X"} else SILENT

    def cause(self, machine: str) -> str:
        """Return the usual cause for which a worker like this one does not come."""
        if state := self.state(machine):
            return CAUSES[state]
        if self.waits:
            return FEWER if self.waits in ENDINGS else OTHER_CALL
        part = next((part for part in PARTS if self.part.startswith(part)), "")
        if part == "loading data" and any("dataloader.py" in line for line in self.stack or ()):
            return LOADERS
        return PARTS.get(part, ALONE)

    def told(self, machine: str) -> str:
        """Return where the worker is, with its stack."""
        state = self.state(machine)
        age = max(0.0, time.time() - self.at)
        does = f"waiting for the others while {self.waits}" if self.waits else self.part
        where = f"worker {self.rank} (host {self.host}, process {self.pid})"
        if state:
            return f"{where}: {state}; it was last heard of {age:.1f} s ago, at step {self.step}: {does}"
        lines = "".join(self.stack or ()).rstrip().replace("\n", "\n  ")
        return f"{where}: at step {self.step} for {age + self.seconds:.1f} s: {does}; its stack:\n  {lines}"


@dataclass(frozen=True)
class HangReport:
    """What happened, in one line and in full; `is_retryable` where nothing that the program did is to blame."""

    headline: str
    text: str
    is_retryable: bool


def report(
    own: Heartbeat, beats: Sequence[Heartbeat], size: int, timeout_seconds: float
) -> HangReport:
    """Tell why worker `own` of `size` waits in vain, from what the others said last, in the order of ranks."""
    what, machine = own.waits, own.machine
    silent = sorted(set(range(size)).difference(beat.rank for beat in [own, *beats]))
    late = [beat for beat in beats if beat.state(machine) or beat.waits != what]
    waiting = [own, *(beat for beat in beats if beat not in late)]
    missing = sorted([*silent, *(beat.rank for beat in late)])
    came = sorted(beat.rank for beat in waiting)
    were = "were" if len(came) > 1 else "was"
    if missing:
        headline = f"{workers(missing)} did not come within {timeout_seconds:g} s while {workers(came)} {were} {what} at step {own.step}"
    else:
        headline = f"{workers(came)} {were} {what} at step {own.step}, and waited for each other in vain for {timeout_seconds:g} s"
    lines = [beat.told(machine) for beat in late[:MOST_TOLD]]
    lines += [f"worker {rank}: was never heard of" for rank in silent[:MOST_TOLD]]
    lines += [
        f"worker {beat.rank} (host {beat.host}, process {beat.pid}): waited"
        for beat in waiting[:MOST_TOLD]
    ]
    cause = late[0].cause(machine) if late else CAUSES[SILENT] if silent else NETWORK
    is_retryable = bool(silent) or any(beat.state(machine) in FROM_OUTSIDE for beat in late)
    return HangReport(
        headline, "\n".join([headline, *lines, f"usual cause: {cause}"]), is_retryable
    )


def workers(ranks: Iterable[int]) -> str:
    """Return "worker 1", or "workers 0, 2 and 3"."""
    *most, last = map(str, ranks)
    return f"workers {', '.join(most)} and {last}" if most else f"worker {last}"


def process_state(pid: int) -> str:
    """Return the state of a process of this machine as in /proc: T where it is stopped, "" where there is none."""
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except OSError:
        return ""


def machine_name() -> str:
    """Return what workers have in common that see each other's processes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return os.urandom(8).hex()


class WorkerStatus:
    """Where a worker is: plain attributes, because a step sets them many times. Of a worker alone nobody reads them.

    `step` and the `part` of it; what the worker `waits` for, "" while for nobody; `since` when, in
    seconds of the monotonic clock.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.step = 0
        self.part = "starting"
        self.waits = ""
        self.since = time.monotonic()

    def at(self, part: str) -> None:
        """Say what the worker does from now on."""
        self.part, self.since = part, time.monotonic()

    @contextmanager
    def doing(self, part: str) -> Iterator[None]:
        """Say that the worker does something inside of what it did before."""
        before = self.part
        self.at(part)
        yield
        self.at(before)

    def waiting(self, what: str) -> Self:
        """Return a context in which the worker waits for the others."""
        self.waits, self.since = what, time.monotonic()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.waits, self.since = "", time.monotonic()

    def explain(self, what: str, reason: str, *, late: bool) -> WorldError:
        """Return the error of a wait in vain, with what is known of those who did not come in time (`late`), or are gone."""
        return no_answer(self.rank, what, reason)

    def report_failure(self, error: BaseException) -> None:
        """Tell the other workers that this one fails, so that all end."""

    def end(self) -> None:
        """Say that all workers have come to the end of the run: from now on each may go when it likes."""

    def close(self) -> None:
        """Tell nobody any more."""


def no_answer(rank: int, what: str, reason: str, told: str | None = None) -> WorldError:
    """Return the error of worker `rank` whose call was not answered, for `reason`, with what others `told` of it."""
    why = told or "usually another worker failed: look for the first error of the run"
    return WorldError(f"worker {rank} got no answer from the others while {what}; {why} ({reason})")
