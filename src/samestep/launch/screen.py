"""Destinations of worker output: log files in the run's directory, and the launcher's streams."""

from __future__ import annotations

import codecs
import os
import select
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, TextIO

from samestep.handoff import TERMINAL
from samestep.record.files import LOGS
from samestep.storage import make_folder, open_regular
from samestep.terminal import TerminalLine

WAIT_SECONDS: Final = 0.02  # for a terminal that accepts no output; other files must not wait long
_EARLY_BYTES: Final = 256 * 1024


class WorkerLog:
    """The unchanged output of a worker in one attempt, under a title with attempt and time.

    The run's directory is known only after the run has begun. Until then, the last 256 KiB are held
    in memory.
    """

    def __init__(self, rank: int, attempt: int) -> None:
        self._rank = rank
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._title = f"=== worker {rank}, attempt {attempt}, {now} ===\n".encode()
        self._early = bytearray()
        self._file: int | None = None

    def open(self, directory: Path) -> None:
        """Write to a file in the run's directory from now on. Raises `OSError`."""
        self.close()
        folder = directory / LOGS
        make_folder(folder)
        path = folder / f"worker-{self._rank}.log"
        self._file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        separator = b"\n" if os.fstat(self._file).st_size else b""
        early, self._early = self._early, bytearray()
        self.write(separator + self._title + early)

    def write(self, data: bytes) -> None:
        """Append bytes. Raises `OSError` if the disk is full or the file was removed."""
        if self._file is None:
            self._early += data
            del self._early[:-_EARLY_BYTES]
            return
        while data:
            data = data[os.write(self._file, data) :]
        if os.fstat(self._file).st_nlink == 0:
            raise FileNotFoundError(f"the log of worker {self._rank} was removed")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Screen:
    """A buffered stream that knows whether its last line is unfinished.

    Writing never waits for a stopped terminal or a pager that does not read. A stream that fails is
    dropped silently, because `head` exits when it has enough.
    """

    def __init__(self, stream: FileStream | TextStream | None) -> None:
        self._stream = stream
        self._line = TerminalLine()
        self._pending = bytearray()
        self._unfinished = False
        self._writer = 0  # of the last bytes: a worker's stdout (1) or stderr (2), or the launcher

    def write(self, data: bytes, writer: int = 0) -> None:
        """Print bytes, on a new line if the file `writer` did not print the unfinished one.

        A progress bar on stderr is such a line, and a line on stdout does not continue it.
        """
        if data:
            if self._unfinished and writer != self._writer and data[:1] not in b"\r\n":
                data = b"\n" + data
            self._writer = writer
            self._unfinished = not data.endswith(b"\n")
            self._pending += self._line.before_print(ends_line=not self._unfinished).encode()
            self._pending += data
            self.flush()

    def write_lines(self, lines: bytes) -> None:
        """Print complete lines, starting on a new line."""
        self.write(b"\n" + lines if lines and self._unfinished else lines)

    def show(self, text: str, step: int, columns: int) -> None:
        """Show a line of text after `step` steps below everything else, or remove it: ""."""
        if not self._pending:  # else the terminal is stopped, and the line would be old
            self._pending += self._line.draw(text, step, columns).encode()
            self.flush()

    def flush(self, wait_seconds: float = 0.0) -> bool:
        """Print pending bytes; return whether none are left."""
        try:
            while self._pending and self._stream and self._stream.is_ready(wait_seconds):
                with memoryview(self._pending) as data:
                    written = self._stream.write(data)
                del self._pending[:written]
        except (OSError, ValueError):  # a closed text stream raises ValueError
            self._stream = None
        if self._stream is None:
            self._pending.clear()
        return not self._pending


class FileStream:
    """An open file of this process, by its number."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._poll = select.poll()
        self._poll.register(number, select.POLLOUT)

    def is_ready(self, wait_seconds: float) -> bool:
        """Return whether some bytes can be written without waiting longer than this."""
        return bool(self._poll.poll(1000 * wait_seconds))

    def write(self, data: memoryview) -> int:
        """Write bytes and return how many. Raises `OSError`."""
        # a writable pipe accepts this many bytes without blocking
        return os.write(self._number, data[: select.PIPE_BUF])


class TextStream:
    """A text stream, in which invalid bytes are shown as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding_of(stream))("backslashreplace")

    def is_ready(self, _wait_seconds: float) -> bool:
        """Return True: text streams are not polled."""
        return True

    def write(self, data: memoryview) -> int:
        """Write all bytes and return how many. Raises `OSError` or `ValueError`."""
        self._stream.write(self._decoder.decode(bytes(data)))
        self._stream.flush()
        return len(data)


def terminal_variables() -> dict[str, str]:
    """Return the variables that describe the launcher's terminal, if any, to workers."""
    try:
        if sys.stderr.isatty():
            size = os.get_terminal_size(sys.stderr.fileno())
            sizes = {"COLUMNS": size.columns, "LINES": size.lines}
            positive = {name: str(number) for name, number in sizes.items() if number > 0}
            return {TERMINAL: "1", **positive}
    except (OSError, ValueError, AttributeError):  # closed or None
        pass
    return {TERMINAL: ""}


def encoding_of(stream: TextIO | None) -> str:
    """Return a stream's encoding; some replacements of stdout have none."""
    return getattr(stream, "encoding", None) or "utf-8"


def standard_screens() -> tuple[Screen, Screen]:
    """Return the screens of stdout and stderr: the same one if both are one terminal."""
    out, err = _stream(sys.stdout, sys.__stdout__, 1), _stream(sys.stderr, sys.__stderr__, 2)
    screen = Screen(out)
    if isinstance(out, FileStream) and isinstance(err, FileStream):
        with suppress(OSError):  # one of them is closed
            if os.path.sameopenfile(1, 2):
                return screen, screen
    return screen, Screen(err)


def _stream(
    stream: TextIO | None, original: TextIO | None, number: int
) -> FileStream | TextStream | None:
    if stream is None:  # the file was closed when Python started; its number may be reused by now
        return None
    return FileStream(number) if stream is original else TextStream(stream)
