"""A run that faults are injected into: its command, its workers and its record."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from benchmarks.chaos.job import HASH_FILE
from samestep.record.events import FILE_NAME, parse_events

JOB = Path(__file__).with_name("job.py")
STALL_SECONDS = 120  # without a new step, until the run counts as failed
LARGEST_BOARD = 4096  # bytes of the launcher's memory for progress; copies of state are larger
STARTS = {"started", "resumed"}

Event = dict[str, Any]


class ChaosError(Exception):
    """A fault did not happen, or the run did not survive it."""


class Target:
    """A run in its own directory."""

    def __init__(self, directory: Path, epochs: int) -> None:
        directory.mkdir()
        self.directory = directory
        self.workers = 0
        self._epochs = epochs
        self._launcher: subprocess.Popen[bytes] | None = None
        self._events: list[Event] = []
        self._read_bytes = 0

    def start(self, workers: int) -> None:
        """Start the run, or resume it."""
        options = {
            "dir": self.directory,
            "hot-every": 5,
            "snapshot-every": 10,
            "timeout": 5,
            "max-restarts": 50,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        run = ["run", "-n", str(workers), *flags, str(JOB), str(self._epochs)]
        with (self.directory / "output.txt").open("ab") as output:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "samestep", *run], stdout=output, stderr=output
            )
        self.workers = workers

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        """The launcher's process."""
        assert self._launcher is not None  # noqa: S101  faults come after the start
        return self._launcher

    def end(self, number: signal.Signals | None = None) -> None:
        """Wait until the run ends; send a signal first if one is given.

        Raises `ChaosError` if it ends in another way, or workers outlast it.
        """
        pids = self.pids()
        if number is not None:
            self.launcher.send_signal(number)
        self.wait_until(lambda: not self.is_running(), "the run did not end", has_exited=True)
        status, expected = self.launcher.returncode, -(number or 0)
        if status != expected:
            raise ChaosError(f"expected exit status {expected}, got {status}; {self.last_output()}")
        complaint = f"processes {pids} outlast the run"
        self.wait_until(lambda: not any(map(_is_alive, pids)), complaint, has_exited=True)

    def close(self) -> None:
        """Kill the run if it still runs."""
        if self.is_running():
            self.launcher.kill()
            self.launcher.wait()

    def events(self) -> list[Event]:
        """Return all events of the record so far."""
        record = self.directory / FILE_NAME
        if record.exists():
            with record.open("rb") as file:
                file.seek(self._read_bytes)
                complete, end, _ = file.read().rpartition(b"\n")
            self._read_bytes += len(complete + end)
            self._events += parse_events(complete)
        return self._events

    def steps(self) -> int:
        """Return how many steps the run has made so far, repeated ones included."""
        return sum(event["event"] == "scalars" for event in self.events())

    def pids(self) -> list[int]:
        """Return the process ids of the latest workers, by rank."""
        starts = (event for event in reversed(self.events()) if event["event"] in STARTS)
        return [worker["pid"] for worker in next(starts, {"workers": []})["workers"]]

    def wait_for(self, kinds: Collection[str], since: float, **fields: Any) -> Event:
        """Return the first event of these kinds after `since`, in seconds of `time.time`.

        The event has all `fields`; a text may be the beginning of the event's. Raises `ChaosError`
        as `wait_until` does.
        """
        found: list[Event] = []

        def find() -> bool:
            recent = (event for event in self.events() if event["time"] >= since)
            some = (event for event in recent if event["event"] in kinds and _has(event, fields))
            found[:] = [event for event in [next(some, None)] if event is not None]
            return bool(found)

        self.wait_until(find, f"no event of {sorted(kinds)} with {fields}")
        return found[0]

    def wait_until(
        self, condition: Callable[[], bool], complaint: str, *, has_exited: bool = False
    ) -> None:
        """Wait until a condition holds.

        Raises `ChaosError` after `STALL_SECONDS` without a new step, or when the run exits, unless
        it `has_exited` as expected.
        """
        steps, deadline = -1, 0.0
        while not condition():
            if self.steps() > steps:
                steps, deadline = self.steps(), time.monotonic() + STALL_SECONDS
            if not (has_exited or self.is_running() or condition()):
                raise ChaosError(f"{complaint}: the run exited; {self.last_output()}")
            if time.monotonic() > deadline:
                stalled = f"no step in {STALL_SECONDS} s after {steps} steps"
                raise ChaosError(f"{complaint}: {stalled}; {self.last_output()}")
            time.sleep(0.02)

    def is_running(self) -> bool:
        """Return whether the launcher runs."""
        return self._launcher is not None and self._launcher.poll() is None

    def last_output(self) -> str:
        """Return the end of the run's output and of its record."""
        events = [
            " ".join(f"{name}={event[name]}" for name in ("event", "step", "time") if name in event)
            for event in self.events()[-5:]
        ]
        printed = (self.directory / "output.txt").read_text(errors="replace")[-2000:]
        return "\n".join(["its last output and events are:", printed, *events])

    def hash(self) -> str:
        """Return the hash of the trained model."""
        return (self.directory / HASH_FILE).read_text()


def flip_byte(file: str | Path, offset: int) -> None:
    """Invert all bits of one byte of a file."""
    with Path(file).open("r+b", buffering=0) as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 0xFF]))


def hot_copies(launcher: int) -> list[Path]:
    """Return the anonymous files in which a launcher holds copies of its workers' state."""
    files = [*Path(f"/proc/{launcher}/fd").iterdir()]
    kept = [path for path in files if "samestep-state" in str(path.readlink())]
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
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
