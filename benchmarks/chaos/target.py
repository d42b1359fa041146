"""A run that faults are injected into: its command, its workers and its record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos.job import HASH_FILE, LANES
from benchmarks.chaos.machines import Host
from samestep.record.events import FILE_NAME, parse_events

JOB = Path(__file__).with_name("job.py")
STALL_SECONDS = 120  # without a new step, until the run counts as failed
LARGEST_BOARD = 4096  # bytes of the launcher's memory for progress; copies of state are larger
PORT = 29517
ABORTED = threading.Event()  # all waiting ends
STARTS = {"started", "resumed"}

Event = dict[str, Any]


class ChaosError(Exception):
    """A fault did not happen, or the run did not survive it."""


class Target:
    """A run in its own directory, on one or more hosts.

    Attributes: `workers` (list[int]): those of each host. `launchers` (list[Popen]): the process of
    each host. `samples`: resources of each launcher after each fault, by process id.
    """

    def __init__(
        self,
        directory: Path,
        epochs: int,
        on: Sequence[Host] = (Host(),),
        output: Path | None = None,
    ) -> None:
        directory.mkdir()
        self.directory = directory
        self.hosts = on
        self.workers: list[int] = []
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.samples: dict[int, list[Resources]] = {}
        self._output = output or directory
        self._epochs = epochs
        self._events: list[Event] = []
        self._read_bytes = 0

    def start(self, workers: Sequence[int]) -> None:
        """Start the run, or resume it, with this number of workers on each host."""
        self.workers = list(workers)
        self.launchers = [self._launch(number) for number in range(len(workers))]

    def start_host(self, number: int) -> None:
        """Start a host's launcher again."""
        self.launchers[number] = self._launch(number)

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        options = {
            "dir": self.directory,
            "hot-every": 5,
            "snapshot-every": 10,
            "timeout": self.timeout,
            "max-restarts": 50,
        }
        if len(self.hosts) > 1:
            master = f"{self.hosts[0].address}:{PORT}"
            options |= {"nodes": len(self.hosts), "master": master, "lanes": LANES}
        flags = [f"--{name}={value}" for name, value in options.items()]
        run = ["run", "-n", str(self.workers[number]), *flags, str(JOB), str(self._epochs)]
        command = self.hosts[number].command(sys.executable, "-m", "samestep", *run)
        with self._output_of(number).open("ab") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, "SAMESTEP_TOKEN": "a token of the test of faults"},
            )

    @property
    def timeout(self) -> int:
        """The run's `timeout`: more than TCP needs to continue after a network was cut."""
        return 5 if len(self.hosts) == 1 else 20

    def _output_of(self, number: int) -> Path:
        return self._output / f"output-{number}.txt"

    def end(self, number: signal.Signals | None = None, status: int | None = None) -> None:
        """Wait until the run ends; send a signal to all launchers first if one is given.

        Raises `ChaosError` if it ends in another way, or workers outlast it.
        """
        pids = self.pids()
        if number is not None:
            for launcher in self.launchers:
                launcher.send_signal(number)
        self.wait_until(lambda: not self.running(), "the run did not end", has_exited=True)
        expected = -(number or 0) if status is None else status
        for launcher in self.launchers:
            if launcher.returncode != expected:
                message = f"expected exit status {expected}, got {launcher.returncode}"
                raise ChaosError(f"{message}; {self.last_output()}")
        self.wait_for_exit(pids)

    def wait_for_exit(self, pids: Sequence[int]) -> None:
        """Wait until processes have exited. Raises `ChaosError` if they do not."""
        complaint = f"processes {pids} outlast the run"
        self.wait_until(lambda: not any(map(_is_alive, pids)), complaint, has_exited=True)

    def sample(self) -> None:
        """Record the resources that the launchers and the coordinator have."""
        processes = [launcher.pid for launcher in self.launchers]
        if len(self.hosts) > 1:
            processes += first_child(processes[0])
        for pid in processes:
            with suppress(OSError):
                self.samples.setdefault(pid, []).append(resources_of(pid))

    def close(self) -> None:
        """Kill the run if it still runs."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()

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

    def starts(self) -> int:
        """Return how often workers have been started so far."""
        return sum(event["event"] in STARTS for event in self.events())

    def pids(self) -> list[int]:
        """Return the process ids of the latest workers, by rank."""
        starts = (event for event in reversed(self.events()) if event["event"] in STARTS)
        return [worker["pid"] for worker in next(starts, {"workers": []})["workers"]]

    def wait_for(self, kinds: Collection[str], since: float, **fields: Any) -> Event:
        """Return the first event of these kinds after `since`, in seconds of `time.time`.

        The event has all `fields`; a text may be the beginning of the event's. Raises `ChaosError`
        as `wait_until` does.
        """
        events: list[Event] = []

        def find() -> bool:
            recent = (event for event in self.events() if event["time"] >= since)
            matches = (event for event in recent if event["event"] in kinds and _has(event, fields))
            events[:] = [event for event in [next(matches, None)] if event is not None]
            return bool(events)

        self.wait_until(find, f"no event of {sorted(kinds)} with {fields}")
        return events[0]

    def wait_until(
        self, condition: Callable[[], bool], complaint: str, *, has_exited: bool = False
    ) -> None:
        """Wait until a condition holds.

        Raises `ChaosError` after `STALL_SECONDS` without a new step, or when the run exits, unless
        it `has_exited` as expected.
        """
        steps, deadline = -1, 0.0
        while not condition():
            if ABORTED.is_set():
                raise ChaosError("aborted")
            if self.steps() > steps:
                steps, deadline = self.steps(), time.monotonic() + STALL_SECONDS
            if not (has_exited or self.is_running() or condition()):
                raise ChaosError(f"{complaint}: the run exited; {self.last_output()}")
            if time.monotonic() > deadline:
                stalled = f"no step in {STALL_SECONDS} s after {steps} steps"
                raise ChaosError(f"{complaint}: {stalled}; {self.last_output()}")
            time.sleep(0.02)

    def is_running(self) -> bool:
        """Return whether all launchers run."""
        return len(self.running()) == len(self.hosts)

    def running(self) -> list[int]:
        """Return the process ids of the launchers that run."""
        return [launcher.pid for launcher in self.launchers if launcher.poll() is None]

    def last_output(self) -> str:
        """Return the end of the run's output and of its record."""
        events = [
            " ".join(f"{name}={event[name]}" for name in ("event", "step", "time") if name in event)
            for event in self.events()[-5:]
        ]
        outputs = map(self._output_of, range(len(self.hosts)))
        printed = [file.read_text(errors="replace")[-2000:] for file in outputs]
        return "\n".join(["its last output and events are:", *printed, *events])

    def hash(self) -> str:
        """Return the hash of the trained model."""
        return (self.directory / HASH_FILE).read_text()


class Resources(NamedTuple):
    """What a process has: bytes of its own memory, threads and open files."""

    memory: int
    threads: int
    files: int


def resources_of(pid: int) -> Resources:
    """Return the resources of a process. Raises `OSError` if it has exited."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    memory = int(fields["RssAnon"].split()[0]) * 1024
    return Resources(
        memory, int(fields["Threads"]), sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    )


def first_child(pid: int) -> list[int]:
    """Return the process that a process started first, which is the coordinator."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children[:1]]
    return []


def flip_byte(file: str | Path, offset: int) -> None:
    """Invert all bits of one byte of a file."""
    with Path(file).open("r+b", buffering=0) as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 0xFF]))


def hot_copies(launcher: int) -> list[Path]:
    """Return the anonymous files in which a launcher holds copies of its workers' state."""
    return [path for path in Path(f"/proc/{launcher}/fd").iterdir() if _is_hot_copy(path)]


def _is_hot_copy(path: Path) -> bool:
    with suppress(FileNotFoundError):  # the launcher closed it in the meantime
        return "samestep-state" in str(path.readlink()) and path.stat().st_size > LARGEST_BOARD
    return False


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
