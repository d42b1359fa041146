"""The process that forwards a run's record, as the worker that starts it sees it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from samestep.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from samestep.record.record import Record

FINISH_SECONDS: Final = 10.0
EXIT_SECONDS: Final = 2.0  # more, for it to tell what is missing
FIRST_PAUSE_SECONDS: Final = 1.0  # before it is started again; each further one is twice as long
LONGEST_PAUSE_SECONDS: Final = 60.0


class Beside:
    """A process that forwards the record in a directory. One that dies is replaced; what it tells of its sinks is recorded."""

    def __init__(
        self, directory: Path, sinks: Sequence[str], function: str | None, record: Record
    ) -> None:
        """Start it, which nothing here waits for."""
        self._command = [
            sys.executable,
            "-m",
            "samestep.record.forward",
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
            text = "%d bytes of the record did not reach %s; the next start sends them, or python -m samestep.record.forward %s"
            logging.getLogger("samestep").warning(
                text, state["behind_bytes"], state["name"], self._directory
            )
        with suppress(RecordError):  # the run meets a full disk itself
            self._record.event("sink", **state)
