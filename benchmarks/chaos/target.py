"""A run that is attacked: its command, its workers, and what its record tells."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.chaos.job import HASH_FILE
from samestep.errors import RecordError
from samestep.record import read_events

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection

JOB = Path(__file__).with_name("job.py")
TIMEOUT_SECONDS = 2
LARGEST_BOARD = 4096  # bytes; where the launcher keeps how far the run is
LIMIT_SECONDS = 60  # for whatever is waited for
STARTS = {"started", "resumed"}

Event = dict[str, Any]


class ChaosError(Exception):
    """A fault did not happen, or the run did not survive it."""


class Target:
    """A run in a directory of its own."""

    def __init__(self, directory: Path, epochs: int) -> None:
        self.directory = directory
        self._epochs = epochs
        self._launcher: subprocess.Popen[bytes] | None = None
        self.workers = 0

    def start(self, workers: int) -> None:
        """Give the command, the first time or again."""
        options = {
            "dir": self.directory,
            "hot-every": 5,
            "snapshot-every": 10,
            "timeout": TIMEOUT_SECONDS,
            "max_restarts": 50,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [
            sys.executable,
            "-m",
            "samestep",
            "run",
            "-n",
            str(workers),
            *flags,
            str(JOB),
            str(self._epochs),
        ]
        self.directory.mkdir(exist_ok=True)
        with (self.directory / "output.txt").open("ab") as output:
            self._launcher = subprocess.Popen(command, stdout=output, stderr=output)
        self.workers = workers

    @property
    def launcher(self) -> int:
        """The launcher's process id."""
        assert self._launcher is not None  # noqa: S101  faults come after the start
        return self._launcher.pid

    def end(self, number: signal.Signals | None = None) -> None:
        """Return when the launcher has ended, by a signal where one is given. Raises `ChaosError` if it ends otherwise, or workers stay."""
        assert self._launcher is not None  # noqa: S101  faults come after the start
        pids = self.pids()
        if number is not None:
            self._launcher.send_signal(number)
        try:
            status = self._launcher.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ChaosError(
                f"the run did not end within {LIMIT_SECONDS} s; {self.last_words()}"
            ) from None
        if status != (0 if number is None else -number):
            raise ChaosError(
                f"the run ended with status {status} where {number or 0!r} was expected; {self.last_words()}"
            )
        self.wait_until(
            lambda: not any(map(_is_alive, pids)),
            f"processes {pids} of a run that has ended are still there",
            ended=True,
        )

    def close(self) -> None:
        """Leave no process."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()

    def events(self) -> list[Event]:
        """Return all that the record has by now."""
        try:
            return list(read_events(self.directory))
        except RecordError:
            return []

    def pids(self) -> list[int]:
        """Return the process ids of the workers that started last, by rank."""
        last = next((event for event in reversed(self.events()) if event["event"] in STARTS), None)
        return [] if last is None else [worker["pid"] for worker in last["workers"]]

    def wait_for(self, kinds: str | Collection[str], since: float, **fields: Any) -> Event:
        """Return the first event of some kind after `since`, in seconds of `time.time`, with these fields, when it is there.

        A field that is given as text may be the beginning of the event's. Raises `ChaosError` when
        it does not come.
        """
        wanted = {kinds} if isinstance(kinds, str) else kinds
        found: list[Event] = []

        def come() -> bool:
            found[:] = [
                event
                for event in self.events()
                if event["time"] >= since and event["event"] in wanted and _has(event, fields)
            ]
            return bool(found)

        self.wait_until(come, f"no event of {sorted(wanted)} with {fields} came")
        return found[0]

    def wait_until(self, true: Callable[[], bool], complaint: str, *, ended: bool = False) -> None:
        """Return when something is true. Raises `ChaosError` when it is not in time, or when the run has ended unless it should have."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not true():
            if time.monotonic() > deadline or not (ended or self.is_running() or true()):
                raise ChaosError(f"{complaint}; {self.last_words()}")
            time.sleep(0.02)

    def is_running(self) -> bool:
        """Tell whether the launcher runs."""
        return self._launcher is not None and self._launcher.poll() is None

    def last_words(self) -> str:
        """Return the end of what the run printed, and of its record."""
        events = [
            " ".join(f"{name}={event[name]}" for name in ("event", "step", "time") if name in event)
            for event in self.events()[-5:]
        ]
        status = None if self._launcher is None else self._launcher.poll()
        printed = (self.directory / "output.txt").read_text(errors="replace")[-2000:]
        return "\n".join([f"its status is {status}, and the last it said was", printed, *events])

    def hash(self) -> str:
        """Return the hash of what was trained."""
        return (self.directory / HASH_FILE).read_text()


def flip_byte(file: str | Path, offset: int) -> None:
    """Invert all bits of one byte of a file."""
    with Path(file).open("r+b", buffering=0) as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 0xFF]))


def hot_copies(launcher: int) -> list[Path]:
    """Return the anonymous files in which a launcher keeps copies of its workers' state."""
    kept = [
        path
        for path in Path(f"/proc/{launcher}/fd").iterdir()
        if "samestep-state" in str(path.readlink())
    ]
    return [path for path in kept if path.stat().st_size > LARGEST_BOARD]


def _has(event: Event, fields: dict[str, Any]) -> bool:
    return all(
        str(event.get(name)).startswith(value)
        if isinstance(value, str)
        else event.get(name) == value
        for name, value in fields.items()
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
