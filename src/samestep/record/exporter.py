"""The exporter: a process alongside training that sends a run's record to its sinks."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from select import select
from typing import IO, Any, Final

from samestep.config import is_url
from samestep.errors import RecordError, SamestepError
from samestep.record.cursor import Cursor, Destination, Sender, lock
from samestep.record.events import FILE_NAME
from samestep.record.record import Record
from samestep.record.sinks import HOOK, HookAdapter, SinkAdapter, SinkSpec, begin_hook, check_sinks
from samestep.record.sinks.files import FunctionDestination, StorageDestination
from samestep.record.source import open_source

FINISH_SECONDS: Final = 10.0
SLOW_FINISH_SECONDS: Final = 3600.0  # for a function that copies the last snapshot
EXIT_SECONDS: Final = 2.0  # extra time to report unsent data
FIRST_PAUSE_SECONDS: Final = 1.0  # time before a restart; doubles with each further one
MAX_PAUSE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.5
LOCK_SECONDS: Final = 0.05  # between two attempts to take over from the previous exporter
REPORT_SECONDS: Final = 10.0  # minimum time between two events of a sink
ORPHAN_SECONDS: Final = 3.0  # time to send the rest after the run was killed
RECORD_SECONDS: Final = 1.0  # the part of it in which the launcher records the worker's exit
# the exporter's sinks as JSON: a URL may be secret, and arguments are public
SINKS_VARIABLE: Final = "SAMESTEP_INTERNAL_SINKS"
NICENESS: Final = 5  # training has priority if there are too few cores
logger: Final = logging.getLogger("samestep")


class ExporterProcess:
    """The exporter of a run, as a child process of the worker that writes the record.

    It is restarted if it dies or is stopped by a signal. The status that it reports for each sink
    is added to the record.
    """

    def __init__(self, directory: Path, sinks: Sequence[SinkSpec], record: Record) -> None:
        """Start the process in the background."""
        self._command = [sys.executable, "-m", "samestep.record.exporter", str(directory)]
        self._command += ["--parent", str(os.getpid())]
        self._directory, self._record = directory, record
        self._sinks = {sink.name: sink for sink in sinks}
        self._copies = any(sink.option == "transfer" for sink in sinks)
        self._finish_seconds = FINISH_SECONDS
        if HOOK in self._sinks:
            begin_hook(directory)
        self._failure: str | None = None  # of a sink that must work and never did
        self._process: subprocess.Popen[bytes] | None = None
        self._start_lock = threading.Lock()
        self._finishing = threading.Event()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="supervise exporter", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The ID of the current process."""
        return None if self._process is None else self._process.pid

    def finish(self) -> None:
        """Give the exporter some seconds to send the rest, and end it.

        A function of the option `transfer` has more time, unless an error ends the run. Reports
        anything that is still missing; the run's next start sends it.
        """
        with self._start_lock:
            self._finishing.set()
            if self._copies and not isinstance(sys.exc_info()[1], Exception):
                self._finish_seconds = SLOW_FINISH_SECONDS
            self._request_finish()
        self._thread.join(self._finish_seconds + EXIT_SECONDS)
        if self._thread.is_alive():
            with self._start_lock:
                self._abandoned = True
                if self._process is not None:
                    self._process.kill()
            # no longer: something else may hold its end of the pipe, or a disk that hangs its exit
            self._thread.join(EXIT_SECONDS)
            for status in _unsent(self._directory, self._sinks, "the exporter did not respond"):
                self._record_status(status)

    def raise_if_failed(self) -> None:
        """Raise `RecordError` if the function of the option `transfer` raised at every call."""
        if self._failure is not None:
            raise RecordError(self._failure)

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while (process := self._start()) is not None:
            with process, _ended_when_stopped(process):
                for line in process.stdout or ():
                    if not self._abandoned:  # `finish` has reported, and the record may be closed
                        self._record_status(json.loads(line))
            if self._finishing.is_set() and process.returncode >= 0:
                return
            if not self._finishing.is_set():
                message = "the exporter exited with status %d; restarting it"
                logger.warning(message, process.returncode)
            self._finishing.wait(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _start(self) -> subprocess.Popen[bytes] | None:
        # users' modules are found where this process finds them
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        sinks = json.dumps(list(self._sinks.values()))
        environment = {**os.environ, **paths, SINKS_VARIABLE: sinks}
        with self._start_lock:
            if self._abandoned:
                return None
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is handled by this process
                    env=environment,
                )
            except OSError as error:
                logger.warning("the exporter cannot start, so sinks receive nothing: %s", error)
                self._process = None
            if self._finishing.is_set():
                self._request_finish()
            return self._process

    def _request_finish(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # it has exited
                # not through the buffer, which would be written again, and fail, when it is closed
                os.write(self._process.stdin.fileno(), f"{self._finish_seconds}\n".encode())

    def _record_status(self, status: dict[str, Any]) -> None:
        sink, nbytes = self._sinks[status["name"]], status["behind_bytes"]
        command = f"python -m samestep.record.exporter {self._directory} {sink.flag}"
        if status.pop("has_never_worked", False):
            self._failure = (
                f"{sink.option}={sink.value!r} failed at every call, so nothing was copied "
                f"({status['error']}); the run itself is complete in {self._directory}. "
                f"Correct the function, which gets the path of a file as text, and run: {command}"
            )
        elif self._finishing.is_set() and nbytes:
            logger.warning(
                "%d bytes of the record were not sent to %s. They will be sent when the run "
                "starts again; or run: %s",
                *(nbytes, sink.name, command),
            )
        with suppress(RecordError):  # the run itself reports a full disk
            self._record.event("sink", **status)


@contextmanager
def _ended_when_stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process that a signal stops during the block, and wait until it exits."""

    def watch() -> None:
        # the status of an exit stays for `process`, which reads it after the block
        states = os.WEXITED | os.WSTOPPED | os.WNOWAIT
        with suppress(ChildProcessError):  # `process` has read it already
            state = os.waitid(os.P_PID, process.pid, states)
            if state is not None and state.si_code == os.CLD_STOPPED:
                logger.warning("the exporter was stopped by signal %d; ending it", state.si_status)
                process.kill()

    thread = threading.Thread(target=watch, name="watch exporter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Exporter:
    """The senders of a run's record. Writes the status of each sink to `channel`, as JSON lines."""

    def __init__(self, directory: Path, sinks: Iterable[SinkSpec], channel: IO[str]) -> None:
        cursor = Cursor(directory)
        self._file, self._channel = directory / FILE_NAME, channel
        self._reported: dict[str, tuple[float, dict[str, Any]]] = {}
        self._senders = []
        for sink in sinks:
            kind = _destination_of(sink)
            destination = kind(sink.value, directory, open_source(directory), cursor)
            self._senders.append(Sender(open_source(directory), destination))

    def report(self) -> None:
        """Report each sink whose status changed, at most every few seconds.

        Events that wait for the next regular `send` do not count as behind.
        """
        for sender in self._senders:
            status = sender.status(self._size())
            if status["error"] is None:
                if not sender.is_open:
                    continue
                status["behind_bytes"] = 0
            when, last = self._reported.get(status["name"], (-math.inf, {}))
            if time.monotonic() - when >= REPORT_SECONDS and _has_changed(status, last):
                self._reported[status["name"]] = time.monotonic(), status
                self._write(status)

    def finish(self, timeout: float | None) -> bool:
        """Send the rest within `timeout` seconds; return whether everything was sent.

        Reports the sinks that did not receive everything.
        """
        for sender in self._senders:
            sender.finish()
        started, unfinished = time.monotonic(), []
        for sender in sorted(self._senders, key=attrgetter("is_slow")):
            left = timeout
            if timeout is not None:
                seconds = timeout if sender.is_slow else min(timeout, FINISH_SECONDS)
                left = max(0.0, started + seconds - time.monotonic())
            if not sender.wait(left):
                unfinished.append(sender)
        self.report()
        for sender in unfinished:
            status = sender.status(self._size())
            error = status["error"] or "the rest was not sent before the run ended"
            failure = {"has_never_worked": True} if sender.has_never_worked else {}
            self._write({**status, "error": error, **failure})
        return not unfinished

    def _write(self, status: dict[str, Any]) -> None:
        self._channel.write(f"{json.dumps(status)}\n")
        self._channel.flush()

    def _size(self) -> int:
        return self._file.stat().st_size if self._file.exists() else 0


def _destination_of(sink: SinkSpec) -> type[Destination]:
    if sink.option == "sinks":
        return StorageDestination if is_url(sink.value) else SinkAdapter
    return FunctionDestination if sink.option == "transfer" else HookAdapter


def _has_changed(status: dict[str, Any], last: dict[str, Any]) -> bool:
    """Return whether to report a status; a larger backlog must at least have doubled."""
    if not last or status["dropped"] != last["dropped"]:
        return True
    if status["error"] is None or last["error"] is None:
        return status["error"] is not last["error"]
    return bool(status["behind_bytes"] >= 2 * max(1, last["behind_bytes"]))


def main() -> int:
    """Run the command; return 1 if something was not sent."""
    description = "Send the missing parts of a run's record to sinks."
    parser = argparse.ArgumentParser("python -m samestep.record.exporter", description=description)
    parser.add_argument("directory", type=Path, help="directory of a run")
    add = partial(parser.add_argument, action="append", dest="sinks", default=[])
    text = "a URL, tensorboard, mlflow, wandb, or module:Class"
    add("--to", type=partial(SinkSpec, "sinks"), metavar="SINK", help=text)
    text = "module:function called with the path of every file"
    add("--transfer", type=partial(SinkSpec, "transfer"), metavar="FUNCTION", help=text)
    text = "module:function or http(s) URL called for alerts"
    add("--on-event", type=partial(SinkSpec, HOOK), metavar="HOOK", help=text)
    # the process that writes the record, if it started this one
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parent is not None:
        return _run_with_parent(options.directory, options.parent)
    check_sinks(options.sinks)
    if not options.sinks:
        parser.error("expected a destination; pass --to, --transfer or --on-event")
    if not (options.directory / FILE_NAME).is_file():
        parser.error(f"expected a run's directory with {FILE_NAME}, got {options.directory}")
    locked = lock(options.directory)
    if locked is None:
        parser.error(f"another exporter uses {options.directory}; wait until its run has ended")
    with locked:
        if any(sink.option == HOOK for sink in options.sinks):
            begin_hook(options.directory)
        exporter = Exporter(options.directory, options.sinks, sys.stdout)
        return 0 if exporter.finish(None) else 1


def _run_with_parent(directory: Path, parent: int) -> int:
    os.nice(NICENESS)
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what users' code prints
    sinks = [SinkSpec(*pair) for pair in json.loads(os.environ[SINKS_VARIABLE])]
    seconds = None
    while (locked := lock(directory)) is None:  # the previous exporter is about to exit
        if seconds is None:
            seconds = _wait_for_end(parent)
        elif seconds <= 0:
            error = "another exporter of this run did not exit before the run ended"
            for status in _unsent(directory, [sink.name for sink in sinks], error):
                channel.write(f"{json.dumps(status)}\n")
            channel.flush()
            return 1
        else:
            time.sleep(LOCK_SECONDS)
            seconds -= LOCK_SECONDS
    # a process that users' code forks may outlive this one, which then would not seem to have ended
    os.register_at_fork(after_in_child=partial(_let_go, channel.fileno(), locked.fileno()))
    with locked:
        exporter = Exporter(directory, sinks, channel)
        while seconds is None and (seconds := _wait_for_end(parent)) is None:
            exporter.report()
        return 0 if exporter.finish(seconds) else 1


def _let_go(*files: int) -> None:
    """Replace open files by /dev/null: closed ones would be closed again with their objects."""
    null = os.open(os.devnull, os.O_RDWR)
    for file in files:
        os.dup2(null, file, inheritable=False)
    os.close(null)


def _unsent(directory: Path, names: Iterable[str], error: str) -> list[dict[str, Any]]:
    """Return the status of sinks, none of which may have received anything of the record."""
    size = (directory / FILE_NAME).stat().st_size
    status = {"behind_bytes": size, "dropped": 0, "error": error}
    return [{"name": name, **status} for name in names]


def _wait_for_end(parent: int) -> float | None:
    """Wait until the parent requests the end or exits; return the seconds left to send the rest.

    Returns None if neither happens within `POLL_SECONDS`.
    """
    if os.getppid() == parent:
        if not select([sys.stdin], [], [], POLL_SECONDS)[0]:
            return None
        if request := sys.stdin.readline():
            return float(request)
    time.sleep(RECORD_SECONDS)
    return ORPHAN_SECONDS - RECORD_SECONDS


if __name__ == "__main__":
    try:
        status = main()
    except SamestepError as error:
        sys.stderr.write(f"samestep: {error}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # do not wait for threads that hang in a storage
