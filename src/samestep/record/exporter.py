"""The process that forwards a run's record, as the worker that starts it sees it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from typing import IO, Any, Final

from samestep.config import is_url
from samestep.errors import RecordError, SamestepError
from samestep.record.cursor import Cursor, Destination, Sender, lock
from samestep.record.events import FILE_NAME
from samestep.record.record import Record
from samestep.record.sinks.base import SinkAdapter, check_sinks
from samestep.record.sinks.function import FunctionDestination
from samestep.record.sinks.storage import StorageDestination
from samestep.record.source import open_source

FINISH_SECONDS: Final = 10.0
EXIT_SECONDS: Final = 2.0  # more, for it to tell what is missing
FIRST_PAUSE_SECONDS: Final = 1.0  # before it is started again; each further one is twice as long
LONGEST_PAUSE_SECONDS: Final = 60.0


class ExporterProcess:
    """A process that forwards the record in a directory. One that dies is replaced; what it tells of its sinks is recorded."""

    def __init__(
        self, directory: Path, sinks: Sequence[str], function: str | None, record: Record
    ) -> None:
        """Start it, which nothing here waits for."""
        self._command = [
            sys.executable,
            "-m",
            "samestep.record.exporter",
            str(directory),
            "--beside",
            str(os.getpid()),
        ]
        self._command += [word for sink in sinks for word in ("--to", sink)]
        self._command += [] if function is None else ["--transfer", function]
        self._directory, self._record = directory, record
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._ending = threading.Event()
        self._abandoned = False
        self._thread = threading.Thread(target=self._watch, name="forward the record", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process that forwards now."""
        return None if self._process is None else self._process.pid

    def finish(self) -> None:
        """Give it some seconds to send the rest. What is missing then is told, and sent by the next start."""
        with self._starting:
            self._ending.set()
            self._tell_to_end()
        self._thread.join(FINISH_SECONDS + EXIT_SECONDS)
        if self._thread.is_alive():
            with self._starting:
                self._abandoned = True
                if self._process is not None:
                    self._process.kill()
            self._thread.join()

    def _watch(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while (process := self._start()) is not None:
            with process:
                for line in process.stdout or ():
                    self._take(line)
            if self._ending.is_set() and process.returncode >= 0:
                return
            if not self._ending.is_set():
                text = (
                    "the process that forwards the record ended with status %d; it is started again"
                )
                logging.getLogger("samestep").warning(text, process.returncode)
            self._ending.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _start(self) -> subprocess.Popen[bytes] | None:
        # users' functions are found where this process finds them
        paths = os.pathsep.join(path for path in sys.path if path)
        with self._starting:
            if self._abandoned:
                return None
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is this process's
                    env={**os.environ, "PYTHONPATH": paths},
                )
            except OSError as error:
                logging.getLogger("samestep").warning("the record is not forwarded: %s", error)
                self._process = None
            if self._ending.is_set():
                self._tell_to_end()
            return self._process

    def _tell_to_end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                self._process.stdin.write(f"{FINISH_SECONDS}\n".encode())
                self._process.stdin.flush()

    def _take(self, line: bytes) -> None:
        state = json.loads(line)
        if self._ending.is_set() and state["behind_bytes"]:
            text = "%d bytes of the record did not reach %s; the next start sends them, or python -m samestep.record.exporter %s"
            logging.getLogger("samestep").warning(
                text, state["behind_bytes"], state["name"], self._directory
            )
        with suppress(RecordError):  # the run meets a full disk itself
            self._record.event("sink", **state)


LOOK_SECONDS: Final = 0.5
TELL_SECONDS: Final = 10.0  # at least, between two events of a sink
WITHOUT_PARENT_SECONDS: Final = 3.0  # to send the rest once the run was killed
NICENESS: Final = 5  # training comes first where there are too few cores


class Exporter:
    """The senders of a run's record, and what is told of them."""

    def __init__(
        self, directory: Path, sinks: Sequence[str], function: str | None, channel: IO[str]
    ) -> None:
        forwarded = Cursor(directory)
        self._file, self._channel = directory / FILE_NAME, channel
        self._told: dict[str, tuple[float, dict[str, Any]]] = {}
        destinations: list[Destination] = []
        for name in sinks:
            kind = StorageDestination if is_url(name) else SinkAdapter
            destinations.append(kind(name, directory, open_source(directory), forwarded))
        if function is not None:
            destinations.append(
                FunctionDestination(function, directory, open_source(directory), forwarded)
            )
        self._senders = [
            Sender(open_source(directory), destination) for destination in destinations
        ]

    def tell(self) -> None:
        """Tell of each sink whose state changed, at most every few seconds. What is only being gathered is not behind."""
        for sender in self._senders:
            state = sender.state(self._size())
            state["behind_bytes"] *= state["error"] is not None
            when, told = self._told.get(state["name"], (-TELL_SECONDS, {}))
            is_known = sender.has_answered or state["error"] is not None
            if is_known and time.monotonic() - when >= TELL_SECONDS and _differs(state, told):
                self._told[state["name"]] = time.monotonic(), state
                self._write(state)

    def finish(self, seconds: float | None) -> bool:
        """Send what is there, for so long at most, and tell what is missing then; return whether everything arrived."""
        for sender in self._senders:
            sender.end()
        deadline = None if seconds is None else time.monotonic() + seconds
        arrived = [
            sender.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for sender in self._senders
        ]
        self.tell()
        for sender in (
            sender for sender, has_all in zip(self._senders, arrived, strict=True) if not has_all
        ):
            state = sender.state(self._size())
            self._write(
                {**state, "error": state["error"] or "the rest did not arrive before the run ended"}
            )
        return all(arrived)

    def _write(self, state: dict[str, Any]) -> None:
        self._channel.write(f"{json.dumps(state)}\n")
        self._channel.flush()

    def _size(self) -> int:
        return self._file.stat().st_size if self._file.exists() else 0


def _differs(state: dict[str, Any], told: dict[str, Any]) -> bool:
    """Tell whether a state is news: what is waiting must at least have doubled."""
    if not told or (state["error"] is None, state["dropped"]) != (
        told["error"] is None,
        told["dropped"],
    ):
        return True
    return state["error"] is not None and state["behind_bytes"] >= 2 * max(1, told["behind_bytes"])


def main() -> int:
    """Forward as the command line says; return 1 where something is missing at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m samestep.record.exporter",
        description="Send what sinks lack of a run's record.",
    )
    parser.add_argument("directory", type=Path, help="directory of a run")
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="SINK",
        help="a URL, tensorboard, mlflow, wandb, or module:Class",
    )
    parser.add_argument(
        "--transfer",
        metavar="FUNCTION",
        help="module:function that is called with the path of every file",
    )
    parser.add_argument(
        "--beside",
        type=int,
        metavar="PID",
        help="go on until that parent process says or has ended",
    )
    options = parser.parse_args()
    if options.beside is not None:
        return _forward_beside(options)
    check_sinks(options.to)
    if not (options.to or options.transfer):
        parser.error("nothing was given to send to; expected --to or --transfer")
    if not (options.directory / FILE_NAME).is_file():
        parser.error(f"{options.directory} holds no {FILE_NAME}; expected the directory of a run")
    held = lock(options.directory)
    if held is None:
        parser.error(
            f"another process forwards the record of {options.directory}; wait until its run has ended"
        )
    return (
        0
        if Exporter(options.directory, options.to, options.transfer, sys.stdout).finish(None)
        else 1
    )


def _forward_beside(options: argparse.Namespace) -> int:
    os.nice(NICENESS)
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what users' code prints
    while (held := lock(options.directory)) is None:  # the one before it is about to end
        if _word_of(options.beside, LOOK_SECONDS) is not None:
            return 1
    with held:
        forwarder = Exporter(options.directory, options.to, options.transfer, channel)
        while (seconds := _word_of(options.beside, LOOK_SECONDS)) is None:
            forwarder.tell()
        return 0 if forwarder.finish(seconds) else 1


def _word_of(parent: int, seconds: float) -> float | None:
    """Return how many seconds are left to send the rest, once the parent has told or is gone; None after `seconds` without a word."""
    if os.getppid() != parent:
        return WITHOUT_PARENT_SECONDS
    if not select([sys.stdin], [], [], seconds)[0]:
        return None
    word = sys.stdin.readline()
    return float(word) if word else WITHOUT_PARENT_SECONDS


if __name__ == "__main__":
    try:
        status = main()
    except SamestepError as error:
        sys.stderr.write(f"samestep: {error}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that hang in a storage are not waited for
