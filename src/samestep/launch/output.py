"""The output of a host's workers, printed with their ranks and written to a log per worker."""

from __future__ import annotations

import fcntl
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TextIO

from samestep.host import YELLOW, colored
from samestep.launch.screen import WAIT_SECONDS, Screen, WorkerLog, encoding_of, standard_screens
from samestep.terminal import COLUMNS, columns_of

_READ_BYTES: Final = 64 * 1024  # per read, and of an unfinished line: the capacity of a pipe
_FIRST_OTHER_FILE: Final = 3  # after stdin, stdout and stderr


class Outputs:
    """The stdout and stderr of a host's workers.

    Bytes of rank 0 are printed unchanged and immediately, except that stdout and stderr do not
    continue each other's lines if both are one terminal. Other ranks are printed in complete
    lines that start with `[3] `; of a progress bar that is redrawn after carriage returns, only the
    final state of its line is printed. Lines never mix: a line of another rank starts on a new line
    if rank 0 left one unfinished. There are no threads here, so workers can be forked at any time.
    """

    def __init__(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Print where this process prints.

        At the end, wait for a screen that accepts no output unless `is_urgent()` is true.
        """
        self._is_urgent = is_urgent
        self._screens = standard_screens()
        self._channels: dict[int, _Channel] = {}
        self._logs: dict[int, WorkerLog] = {}
        self._ends: dict[int, bytes] = {}
        self._attempts: Counter[int] = Counter()
        self._directory: Path | None = None
        self._logs_failed = False

    @contextmanager
    def pipes_of(self, rank: int) -> Iterator[Pipes]:
        """Open a worker's pipes. Fork it, or send it the pipes, inside the block."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed or None
                stream.flush()  # the worker would print the buffer again
        self._attempts[rank] += 1
        self._logs[rank] = WorkerLog(rank, self._attempts[rank])
        self._on_log(self._logs[rank], self._open_log)
        ends = []
        try:
            for number, screen in enumerate(self._screens, start=1):
                file, end = _pipe()
                ends.append(end)
                self._channels[file] = _Channel(file, rank, number, screen, self._logs[rank])
            yield Pipes(ends, self._close_inherited)
        finally:
            for end in ends:
                os.close(end)

    def files(self) -> Sequence[int]:
        """Return the files that become readable when a worker prints or closes its output."""
        return list(self._channels)

    def forward(self, ready: Collection[object], directory: str = "") -> None:
        """Print what can be read from the `ready` ones of `files()`.

        Nothing is read while the screen accepts no output, so workers that print much have to
        wait. Logs go to the run's directory, which exists; "" if it is unknown.
        """
        for file in self.files():
            channel = self._channels[file]
            if file in ready and channel.screen.flush(WAIT_SECONDS):
                self._forward(channel)
        for screen in self._screens:
            screen.flush()
        if directory and Path(directory) != self._directory:
            self._directory, self._logs_failed = Path(directory), False
            for log in self._logs.values():
                self._on_log(log, self._open_log)

    def log_end(self, rank: int, reason: str, traceback: str) -> None:
        """Write why a worker ended to its log only, after everything that it printed."""
        text = f"\n=== worker {rank} ended: {reason} ===\n{traceback}"
        self._ends[rank] = text.encode(errors="backslashreplace")

    def drain(self) -> None:
        """Print the remaining output of workers that have exited, and close their pipes and logs.

        Processes that they left running can no longer print.
        """
        for channel in list(self._channels.values()):
            # at most what is in the pipe now, because a process may continue to print
            for _ in range(0, channel.capacity, _READ_BYTES):
                if channel.file in self._channels:
                    self._forward(channel)
            self._end(channel)
        for rank, log in self._logs.items():
            if rank in self._ends:
                self._on_log(log, partial(WorkerLog.write, data=self._ends[rank]))
            log.close()
        self._logs.clear()
        self._ends.clear()

    def print(self, text: str) -> None:
        """Print a warning of the launcher to stderr."""
        title = colored("samestep:", YELLOW, sys.stderr)
        self._screens[1].write_lines(f"{title} {text}\n".encode(errors="backslashreplace"))

    def show(self, text: str, step: int) -> None:
        """Show a line of text after `step` steps below all output on the terminal of stderr."""
        self._screens[1].show(text, step, columns_of(sys.stderr.fileno()) if text else COLUMNS)

    def close(self) -> None:
        """Drain, and wait until everything is printed."""
        self.drain()
        self.show("", 0)
        for screen in self._screens:
            while not screen.flush(WAIT_SECONDS) and not self._is_urgent():
                pass

    def _close_inherited(self) -> None:
        """Close the launcher's files in a forked worker."""
        for channel in self._channels.values():
            os.close(channel.file)
        for log in self._logs.values():
            # before other files are opened: if the launcher has no stderr, this may be file 2
            log.close()

    def _forward(self, channel: _Channel) -> None:
        try:
            data = os.read(channel.file, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._on_log(channel.log, lambda log: log.write(data))
            channel.print(data)
        else:
            self._end(channel)

    def _end(self, channel: _Channel) -> None:
        if self._channels.pop(channel.file, None):
            channel.close()

    def _open_log(self, log: WorkerLog) -> None:
        if self._directory:
            log.open(self._directory)

    def _on_log(self, log: WorkerLog, act: Callable[[WorkerLog], None]) -> None:
        """Act on a log; after an error, stop writing logs."""
        if self._logs_failed:
            return
        try:
            act(log)
        except OSError as error:
            self._logs_failed = True
            where, reason = self._directory, error.strerror or str(error)
            self.print(f"cannot write worker logs in {where}: {reason}; the run continues")


@dataclass(frozen=True)
class Pipes:
    """The `ends` to which a worker prints."""

    ends: Sequence[int]
    close_inherited: Callable[[], None]

    def take_over(self) -> None:
        """Print to the pipes from now on, in the forked worker."""
        self.close_inherited()
        print_to(self.ends)


def print_to(ends: Sequence[int]) -> None:
    """Replace this process's stdout and stderr by open files, which are closed afterwards."""
    encodings = [encoding_of(stream) for stream in (sys.stdout, sys.stderr)]
    # first: a stream that is deleted here may close file 1 or 2
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for number, end in enumerate(ends, start=1):
        os.dup2(end, number)
        os.close(end)
    sys.stdout, sys.stderr = (
        _line_buffered(number, encoding) for number, encoding in enumerate(encodings, start=1)
    )


def _line_buffered(number: int, encoding: str) -> TextIO:
    return open(number, "w", 1, encoding, "backslashreplace", closefd=False)


class _Channel:
    """A pipe from a worker's file `number` (1 is stdout) to a screen."""

    def __init__(self, file: int, rank: int, number: int, screen: Screen, log: WorkerLog) -> None:
        self.file, self._number, self.screen, self.log = file, number, screen, log
        self.capacity = fcntl.fcntl(file, fcntl.F_GETPIPE_SZ)
        self._prefix = b"" if rank == 0 else f"[{rank}] ".encode()
        self._rest = b""
        os.set_blocking(file, False)

    def print(self, data: bytes) -> None:
        """Print what the worker printed, except an unfinished line of a rank above 0."""
        if not self._prefix:
            self.screen.write(data, self._number)
            return
        *lines, rest = (self._rest + data).split(b"\n")
        rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        if len(rest) > _READ_BYTES:
            lines, rest = [*lines, rest], b""
        self._rest = rest
        self._print_lines(lines)

    def close(self) -> None:
        """Print an unfinished line as a complete one, and close the pipe."""
        self._print_lines([self._rest] if self._rest else [])
        os.close(self.file)

    def _print_lines(self, lines: Sequence[bytes]) -> None:
        final = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
        self.screen.write_lines(b"".join(b"%b%b\n" % (self._prefix, line) for line in final))


def _pipe() -> tuple[int, int]:
    """Return both ends of a pipe, neither with the number of a closed standard file."""
    ends = os.pipe()
    try:
        reading, writing = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_OTHER_FILE) for end in ends
        )
    finally:
        for end in ends:
            os.close(end)
    return reading, writing
