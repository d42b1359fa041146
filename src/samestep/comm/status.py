"""The status of each worker, and the report on workers that do not respond."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

from samestep.errors import WorldError
from samestep.host import RunningClock

FORMING: Final = "forming the world"
POLL_SECONDS: Final = 1e-4  # between checks of a GPU


class GpuCalls:
    """Calls that returned at once, since only this worker's GPU waits for them.

    `last` is the newest one that it may not have completed, "" if there is none.
    """

    def __init__(self) -> None:
        self.last = ""
        self._enqueued_at = 0.0
        self._event: torch.cuda.Event | None = None  # after it
        self._calls = 0  # that GPUs were given
        self._completed: Tensor | None = None  # how many of them the GPU has completed, int64 [1]

    def note(self, what: str, device: torch.device) -> None:
        """Remember a call that was just queued on a GPU."""
        # the time first: the watchdog may read it at any moment
        self._enqueued_at, self.last = time.monotonic(), what
        self._calls += 1
        if self._event is None or self._completed is None:
            self._event = torch.cuda.Event()
            self._completed = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._event.record(torch.cuda.current_stream(device))
        calls = torch.full_like(self._completed, self._calls, device=device)
        self._completed.copy_(calls, non_blocking=True)

    def wait(self, seconds: float) -> None:
        """Wait for the last call. Raises `TimeoutError`, or the GPU's own error."""
        clock = RunningClock()
        deadline = clock.now() + seconds
        while self._event is not None and not self._event.query():
            if clock.now() > deadline:
                raise TimeoutError("the GPU did not complete the call")
            time.sleep(POLL_SECONDS)
        self.last = ""

    def overdue(self, seconds: float) -> str:
        """Return the call that the GPU has not completed in `seconds`, "" if there is none.

        The watchdog calls this, because the program may wait for the GPU anywhere. A CUDA call in
        its thread could wait as well, and would take memory on the first GPU.
        """
        what, completed = self.last, self._completed
        late = time.monotonic() - self._enqueued_at > seconds
        if not what or not late or completed is None:
            return ""
        return what if ctypes.c_int64.from_address(completed.data_ptr()).value < self._calls else ""


class WorkerStatus:
    """The current activity of a worker, in plain attributes because a step sets them many times.

    `step` is the current step and `activity` the part of it that runs now. `collective` is the call
    in which the worker waits for the others, "" if it does not wait. `since` is when that started,
    in seconds of the monotonic clock. This base class, for a worker alone, reports nothing.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.step = 0
        self.activity = "starting"
        self.collective = ""
        self.since = time.monotonic()
        self.waited = 0.0  # seconds, in all calls so far
        self.gpu_calls = GpuCalls()

    def set_step(self, step: int) -> None:
        """Record the current step."""
        self.step = step

    def set_activity(self, activity: str) -> None:
        """Record the start of an activity."""
        self.activity, self.since = activity, time.monotonic()

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Record an activity for the block, then restore the previous one."""
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
        now = time.monotonic()
        self.waited += now - self.since
        self.collective, self.since = "", now

    def explain(self, what: str, reason: str, *, timed_out: bool) -> WorldError:
        """Return the error of a call that timed out or lost its peers."""
        return no_response(self.rank, what, reason)

    def report_failure(self, error: BaseException) -> None:
        """Report to the other workers that this one failed, so that all of them exit."""

    def share_sample(
        self, sample: Mapping[str, Any], others: Sequence[int]
    ) -> Sequence[Any] | None:
        """Publish a sample of this host, and return the newest of `others`, None if unknown."""

    def set_key(self, key: bytes) -> None:
        """Sign what this worker publishes, and ignore what is not signed with the same key."""

    def finish(self) -> None:
        """Record that all workers have reached the end of the run: each may exit at any time."""

    def close(self) -> None:
        """Stop reporting."""


def no_response(rank: int, what: str, reason: str, details: str | None = None) -> WorldError:
    """Return the error of a call `what` on worker `rank` that failed for `reason`."""
    details = details or "usually another worker failed: look for the first error of the run"
    return WorldError(
        f"worker {rank} got no response from other workers while {what}; {details} ({reason})"
    )


def process_state(pid: int) -> str:
    """Return "running", "stopped" (by a signal or debugger) or "exited" for a local process."""
    import psutil  # takes 9 ms, and is needed after a failure only

    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return "exited"
    if state in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}:
        return "stopped"
    return "exited" if state in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD} else "running"


MAX_LISTED: Final = 8  # missing workers
MAX_PID: Final = 2**31
MAX_NUMBER: Final = 1e15  # of steps and seconds, in a heartbeat
MANY: Final = 16  # workers, of which more are listed as ranges

STOPPED: Final = "its process is stopped (state T)"
EXITED: Final = "its process has exited"
SILENT: Final = "it does not respond"
LEFT: Final = "it has left the run"
RETRYABLE: Final = (STOPPED, EXITED, SILENT)  # not caused by the program
ENDINGS: Final = ("ending a loop", "ending the run")

CAUSES: Final = {
    STOPPED: "SIGSTOP, Ctrl-Z or a debugger: resume it with kill -CONT, or restart the run",
    EXITED: "it was killed, ran out of memory, or crashed in native code: see its last output",
    SILENT: "its host is down, the network to it is cut, or native code blocks Python: "
    "check whether the host responds",
    LEFT: "a return, break or exit that depends on the rank or on a worker's own data: "
    "let all workers run the same steps",
}
ACTIVITIES: Final = {
    "loading data": "the dataset does not return, because of a file system, download or lock: see "
    "the last line of its stack; if reading takes this long, increase timeout",
    "computing": "a lane computes for very long, because it is being compiled or its device hangs; "
    "if that is expected, increase timeout",
    "taking a snapshot": "a slow disk or remote storage; "
    "if that is expected, increase timeout or take snapshots less often",
}
LOADERS: Final = (
    "its loader processes return no batch: try loader_workers=0 to see where; "
    "if reading takes this long, increase timeout"
)
OTHER_CALL: Final = (
    "a condition that depends on the rank or on a worker's own data: "
    "let all workers make the same calls in the same order"
)
FEWER_STEPS: Final = (
    "a worker has fewer batches, or left its loop early: "
    "give all workers the same dataset and the same number of steps"
)
ONE_WORKER_ONLY: Final = (
    "something that only one worker does, such as a download or an evaluation: "
    "let all workers do it, use run.once, or increase timeout"
)
NETWORK: Final = (
    "all workers made the same call, and the network between them lost data: "
    "check firewalls and network interfaces"
)


@dataclass(frozen=True)
class Heartbeat:
    """The status that a worker published at clock time `at`, unchanged for `seconds` until then.

    `machine` is equal for workers that see each other's processes. A worker that has `left` or
    knows of a failure (`failed`) no longer needs the store. `stack` is present after an alarm.
    """

    rank: int
    host: str
    pid: int
    machine: str
    at: float
    step: int
    activity: str
    collective: str
    seconds: float
    left: bool
    failed: bool
    stack: Sequence[str] | None

    @classmethod
    def read(cls, value: Any) -> Heartbeat | None:
        """Return a worker's heartbeat, None if another program wrote it."""
        text, number = (str,), (int, float)
        kinds: dict[str, tuple[type, ...]] = {
            "rank": (int,), "host": text, "pid": (int,), "machine": text, "at": number,
            "step": (int,), "activity": text, "collective": text, "seconds": number,
            "left": (bool,), "failed": (bool,), "stack": (list, type(None)),
        }  # fmt: skip
        if (
            isinstance(value, dict)
            and value.keys() == kinds.keys()
            and all(type(value[name]) in kind for name, kind in kinds.items())
            and 0 <= value["rank"] < MAX_PID
            and 0 < value["pid"] < MAX_PID
            and all(abs(value[name]) < MAX_NUMBER for name in ("at", "seconds", "step"))
            and all(isinstance(line, str) for line in value["stack"] or ())
        ):
            return cls(**value)
        return None

    @property
    def name(self) -> str:
        """The worker, its host and its process."""
        return f"worker {self.rank} (host {self.host}, process {self.pid})"

    def trouble(self, machine: str) -> str:
        """Return why the worker cannot respond, as seen from `machine`; "" if it responds."""
        if self.left:
            return LEFT
        if self.stack is not None:
            return ""
        state = process_state(self.pid) if self.machine == machine else "unknown"
        return {"stopped": STOPPED, "exited": EXITED}.get(state, SILENT)

    def cause(self, machine: str) -> str:
        """Return the likely cause of a hang in which this worker is missing."""
        if trouble := self.trouble(machine):
            return CAUSES[trouble]
        if self.collective:
            return FEWER_STEPS if self.collective in ENDINGS else OTHER_CALL
        activity = next((start for start in ACTIVITIES if self.activity.startswith(start)), "")
        if activity == "loading data" and any("dataloader.py" in line for line in self.stack or ()):
            return LOADERS
        return ACTIVITIES.get(activity, ONE_WORKER_ONLY)

    def describe(self, machine: str) -> str:
        """Return the worker's step, activity and stack."""
        age = max(0.0, time.time() - self.at)
        does = f"waiting for others while {self.collective}" if self.collective else self.activity
        if trouble := self.trouble(machine):
            return f"{self.name}: {trouble}; last seen {age:.1f} s ago, at step {self.step}: {does}"
        stack = "".join(self.stack or ()).rstrip().replace("\n", "\n  ")
        total = age + self.seconds
        return f"{self.name}: at step {self.step} for {total:.1f} s: {does}; its stack:\n  {stack}"


@dataclass(frozen=True)
class HangReport:
    """A hang in one line and in full; `is_retryable` if the program did not cause it."""

    headline: str
    text: str
    is_retryable: bool


def report_hang(
    own_beat: Heartbeat, beats: Sequence[Heartbeat], size: int, timeout_seconds: float
) -> HangReport:
    """Report why a worker of `size` timed out, given its own and the others' heartbeats by rank."""
    what, machine = own_beat.collective, own_beat.machine
    unseen = sorted(set(range(size)).difference(beat.rank for beat in [own_beat, *beats]))
    late = [beat for beat in beats if beat.trouble(machine) or beat.collective != what]
    waiting = [own_beat, *(beat for beat in beats if beat not in late)]
    missing = sorted([*unseen, *(beat.rank for beat in late)])
    arrived = sorted(beat.rank for beat in waiting)
    target = f" waiting for {list_workers(missing)}" if missing else ""
    verb = "were" if len(arrived) > 1 else "was"
    where = f"{list_workers(arrived)} {verb} {what} at step {own_beat.step}"
    headline = f"timed out after {timeout_seconds:g} s{target}: {where}"
    headline += "" if missing else " and waited for each other"
    lines = [beat.describe(machine) for beat in late[:MAX_LISTED]]
    lines += [f"worker {rank}: never reported its status" for rank in unseen[:MAX_LISTED]]
    lines += [f"{beat.name}: waiting" for beat in waiting[:MAX_LISTED]]
    cause = late[0].cause(machine) if late else CAUSES[SILENT] if unseen else NETWORK
    return HangReport(
        headline,
        "\n".join([headline, *lines, f"likely cause: {cause}"]),
        bool(unseen) or any(beat.trouble(machine) in RETRYABLE for beat in late),
    )


def describe_stall(
    own_beat: Heartbeat, beats: Sequence[Heartbeat], size: int, timeout_seconds: float
) -> str:
    """Return one line about the workers that keep that of `own_beat` waiting, given the others'."""
    late = [beat for beat in beats if beat.collective != own_beat.collective]
    unseen = sorted(set(range(size)).difference(beat.rank for beat in [own_beat, *beats]))
    does = [
        f"{beat.name}, which is at step {beat.step} ({beat.collective or beat.activity})"
        for beat in late[:MAX_LISTED]
    ]
    if missing := [*(beat.rank for beat in late[MAX_LISTED:]), *unseen]:
        does.append(list_workers(missing))
    return (
        f"stalled: worker {own_beat.rank} has waited {own_beat.seconds:.0f} s at step "
        f"{own_beat.step} while {own_beat.collective}, "
        f"for {' and '.join(does) or 'data lost in the network'}; "
        f"the run ends after timeout={timeout_seconds:g} s"
    )


def mismatched_calls(rank: int, what: str, other: int, other_what: str) -> WorldError:
    """Return the error of worker `rank` in the call `what` if worker `other` made another call."""
    cause = FEWER_STEPS if {what, other_what}.intersection(ENDINGS) else OTHER_CALL
    return WorldError(
        "all workers must make the same calls: "
        f"worker {rank} was {what} while worker {other} was {other_what}; likely cause: {cause}"
    )


def list_workers(ranks: Iterable[int]) -> str:
    """Return "worker 1", or "workers 0, 2 and 3"; of many, "workers 0 to 20 and 23"."""
    numbers = list(ranks)
    names = list(map(str, numbers))
    if len(numbers) > MANY:
        runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
        ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
        names = [f"{first} to {last}" if first < last else str(first) for first, last in ends]
    *earlier, last = names
    several = f"workers {', '.join(earlier)} and {last}" if earlier else f"workers {last}"
    return several if len(numbers) > 1 else f"worker {last}"
