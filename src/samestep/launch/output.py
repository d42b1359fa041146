"""What workers print, on one readable screen and in a log each."""

from __future__ import annotations

import fcntl
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, TextIO

from typing_extensions import Self

from samestep.launch.screen import WAIT_SECONDS, Log, Screen, encoding_of, standard_screens

_READ_BYTES: Final = 64 * 1024  # at once, and of an unfinished line: as much as a pipe holds
_FIRST_OTHER_FILE: Final = 3  # after stdin, stdout and stderr


class Outputs:
    """The stdout and stderr of a host's workers, each a pipe that is read here; a context manager.

    Rank 0's bytes pass as they are and at once. Of other ranks whole lines pass, with `[3] ` in
    front, and of a progress bar that is redrawn after carriage returns what a terminal would show
    at the end of its line. Lines never mix: where rank 0 left one unfinished, that of another rank
    begins a new one. There are no threads here, so that workers can be forked at any time.
    """

    def __init__(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Print where this process prints. At the end, a screen that takes nothing is waited for unless `hurried` says otherwise."""
        self._hurried = hurried
        self._screens = standard_screens()
        self._channels: dict[int, _Channel] = {}
        self._logs: dict[int, Log] = {}
        self._attempts: Counter[int] = Counter()
        self._directory: Path | None = None
        self._gives_up_logs = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def pipes_of(self, rank: int) -> Iterator[Pipes]:
        """Make the pipes of a worker that is forked, or sent them, in the block."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or none at all
                stream.flush()  # or the worker would print it once more
        self._attempts[rank] += 1
        self._logs[rank] = Log(rank, self._attempts[rank])
        self._on_log(self._logs[rank], self._open_log)
        ends = []
        try:
            for screen in self._screens:
                file, end = _pipe()
                ends.append(end)
                self._channels[file] = _Channel(file, rank, screen, self._logs[rank])
            yield Pipes(ends, self._leave)
        finally:
            for end in ends:
                os.close(end)

    def files(self) -> Sequence[int]:
        """Return what becomes readable when a worker prints, or closes what it prints to."""
        return list(self._channels)

    def pump(self, file: int) -> None:
        """Pass on what was printed to one of `files()`; another file is left alone.

        While the screen takes nothing, nothing is read either, and a worker that prints much comes
        to wait.
        """
        channel = self._channels.get(file)
        if channel is not None and channel.screen.flush(WAIT_SECONDS):
            self._pass_on(channel)

    def pass_on(self, ready: Collection[object], directory: str) -> None:
        """Pump those of `files()` that are `ready`, print what the screen would not take before, and keep logs in a run's directory."""
        for file in self.files():
            if file in ready:
                self.pump(file)
        self.flush()
        self.keep_in(directory)

    def flush(self) -> None:
        """Print what the screen would not take before."""
        for screen in self._screens:
            screen.flush()

    def drain(self) -> None:
        """Pass on the last words of workers that have ended; what they started and left running prints to nobody from now on."""
        for channel in list(self._channels.values()):
            # no more than was there, since somebody may go on printing
            for _ in range(0, channel.capacity, _READ_BYTES):
                if channel.file in self._channels:
                    self._pass_on(channel)
            self._end(channel)
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def keep_in(self, directory: str | Path) -> None:
        """Write logs under the directory of a run, which exists; "" means none."""
        if not directory or Path(directory) == self._directory:
            return
        self._directory = Path(directory)
        self._gives_up_logs = False
        for log in self._logs.values():
            self._on_log(log, self._open_log)

    def tell(self, text: str) -> None:
        """Print a line of the launcher's own to stderr."""
        self._screens[1].write_lines(f"{text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Drain, and print all."""
        self.drain()
        for screen in self._screens:
            while not screen.flush(WAIT_SECONDS) and not self._hurried():
                pass

    def _leave(self) -> None:
        """Close, in a forked worker, what is the launcher's."""
        for channel in self._channels.values():
            os.close(channel.file)
        for log in self._logs.values():
            # before others are opened: where the launcher has no stderr, it may be file 2
            log.close()

    def _pass_on(self, channel: _Channel) -> None:
        try:
            data = os.read(channel.file, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._on_log(channel.log, lambda log: log.write(data))
            channel.show(data)
        else:
            self._end(channel)

    def _end(self, channel: _Channel) -> None:
        if self._channels.pop(channel.file, None):
            channel.close()

    def _open_log(self, log: Log) -> None:
        if self._directory:
            log.keep_in(self._directory)

    def _on_log(self, log: Log, act: Callable[[Log], None]) -> None:
        """Act on a log unless logs were given up; give them up where that fails."""
        if self._gives_up_logs:
            return
        try:
            act(log)
        except OSError as error:
            self._gives_up_logs = True
            reason = error.strerror or str(error)
            self.tell(
                f"samestep: no logs of workers are written any more in {self._directory}: {reason}; the run goes on"
            )


@dataclass(frozen=True)
class Pipes:
    """The `ends` to which a worker prints."""

    ends: Sequence[int]
    leave: Callable[[], None]

    def take_over(self) -> None:
        """Print to them from now on, in the worker that was forked for that."""
        self.leave()
        print_to(self.ends)


def print_to(ends: Sequence[int]) -> None:
    """Take open files for this process's stdout and stderr; they are closed under their own numbers."""
    encodings = [encoding_of(stream) for stream in (sys.stdout, sys.stderr)]
    # first: streams that end here may close files 1 and 2
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for number, end in enumerate(ends, start=1):
        os.dup2(end, number)
        os.close(end)
    sys.stdout, sys.stderr = (
        _line_by_line(number, encoding) for number, encoding in enumerate(encodings, start=1)
    )


class _Channel:
    """A pipe from a worker to a screen."""

    def __init__(self, file: int, rank: int, screen: Screen, log: Log) -> None:
        self.file = file
        self.screen = screen
        self.log = log
        self.capacity = fcntl.fcntl(file, fcntl.F_GETPIPE_SZ)
        self._prefix = b"" if rank == 0 else f"[{rank}] ".encode()
        self._rest = b""
        os.set_blocking(file, False)

    def show(self, data: bytes) -> None:
        """Print as much of what the worker printed as may be printed by now."""
        if not self._prefix:
            self.screen.write(data)
            return
        *lines, rest = (self._rest + data).split(b"\n")
        rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        if len(rest) > _READ_BYTES:
            lines.append(rest)
            rest = b""
        self._rest = rest
        self._show_lines(lines)

    def close(self) -> None:
        """Print an unfinished line as a whole one, and close the pipe."""
        self._show_lines([self._rest] if self._rest else [])
        os.close(self.file)

    def _show_lines(self, lines: Sequence[bytes]) -> None:
        shown = ((self._prefix, line.rstrip(b"\r").rpartition(b"\r")[2], b"\n") for line in lines)
        self.screen.write_lines(b"".join(chain.from_iterable(shown)))


def _pipe() -> tuple[int, int]:
    """Return both ends of a pipe, neither of them in the place of a standard file that is closed."""
    ends = os.pipe()
    try:
        reading, writing = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_OTHER_FILE) for end in ends
        )
    finally:
        for end in ends:
            os.close(end)
    return reading, writing


def _line_by_line(number: int, encoding: str) -> TextIO:
    """Return a stream to an open file of this process that passes on every line, and that no character breaks."""
    return open(
        number, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False
    )
