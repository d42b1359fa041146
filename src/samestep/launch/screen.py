"""What a worker prints, kept in a file of the run's directory."""

from __future__ import annotations

import codecs
import os
import select
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, Protocol, TextIO

FOLDER: Final = "logs"
_EARLY_BYTES: Final = 256 * 1024


class Log:
    """All that a worker prints in one attempt, as it printed it, after a line that tells attempt and time.

    The directory of a run becomes known when the run begins: what was printed before is held back,
    the last 256 KiB of it.
    """

    def __init__(self, rank: int, attempt: int) -> None:
        self._rank = rank
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._title = f"=== worker {rank}, attempt {attempt}, {now} ===\n".encode()
        self._early = bytearray()
        self._file: int | None = None

    def keep_in(self, directory: Path) -> None:
        """Write to a file under the run's directory from now on. Raises OSError."""
        self.close()
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"worker-{self._rank}.log"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        separator = b"\n" if os.fstat(self._file).st_size else b""
        early, self._early = self._early, bytearray()
        self.write(separator + self._title + early)

    def write(self, data: bytes) -> None:
        """Keep bytes. Raises OSError where the disk is full or the file was removed."""
        if self._file is None:
            self._early += data
            del self._early[:-_EARLY_BYTES]
            return
        while data:
            data = data[os.write(self._file, data) :]
        if os.fstat(self._file).st_nlink == 0:
            raise FileNotFoundError(f"the log of worker {self._rank} was removed")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


# for a terminal that takes nothing now, since whoever prints has other things to see to
WAIT_SECONDS: Final = 0.02


class Screen:
    """One destination of bytes, which knows whether its last line is unfinished.

    Nobody waits here for a terminal that was stopped or a pager that reads no further: what they do
    not take yet is kept. A destination that fails is given up in silence, since `head` ends when it
    has enough.
    """

    def __init__(self, target: Target | None) -> None:
        self._target = target
        self._pending = bytearray()
        self._unfinished = False

    def write(self, data: bytes) -> None:
        """Print bytes as they are."""
        if data:
            self._unfinished = not data.endswith(b"\n")
            self._pending += data
            self.flush()

    def write_lines(self, lines: bytes) -> None:
        """Print whole lines, from the beginning of a line on."""
        if lines:
            self.write(b"\n" + lines if self._unfinished else lines)

    def flush(self, wait_seconds: float = 0.0) -> bool:
        """Print what is kept, and tell whether all of it was taken."""
        try:
            while self._pending and self._target and self._target.is_ready(wait_seconds):
                with memoryview(self._pending) as data:
                    taken = self._target.write(data)
                del self._pending[:taken]
        except (OSError, ValueError):  # a text stream that was closed raises ValueError
            self._target = None
        if self._target is None:
            self._pending.clear()
        return not self._pending


class Target(Protocol):
    """What takes bytes."""

    def is_ready(self, wait_seconds: float) -> bool:
        """Tell whether a few bytes would be taken at once, or within that time."""

    def write(self, data: memoryview) -> int:
        """Take bytes, and tell how many were taken. Raises OSError or ValueError."""


class File:
    """An open file of this process, by its number."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._poll = select.poll()
        self._poll.register(number, select.POLLOUT)

    def is_ready(self, wait_seconds: float) -> bool:
        return bool(self._poll.poll(1000 * wait_seconds))

    def write(self, data: memoryview) -> int:
        # a pipe that can be written takes as much without waiting
        return os.write(self._number, data[: select.PIPE_BUF])


class Text:
    """A stream of text, which shows bytes that are none as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding_of(stream))("backslashreplace")

    def is_ready(self, wait_seconds: float) -> bool:
        return True

    def write(self, data: memoryview) -> int:
        self._stream.write(self._decoder.decode(bytes(data)))
        self._stream.flush()
        return len(data)


def encoding_of(stream: TextIO | None) -> str:
    """Return how a stream's text becomes bytes; not all of those that are put in the place of stdout say so."""
    return getattr(stream, "encoding", None) or "utf-8"


def standard_screens() -> tuple[Screen, Screen]:
    """Return where this process prints, and where it prints errors: one and the same where both are one terminal."""
    out, err = _target(sys.stdout, sys.__stdout__, 1), _target(sys.stderr, sys.__stderr__, 2)
    screen = Screen(out)
    same = isinstance(out, File) and isinstance(err, File) and _are_one_file(1, 2)
    return screen, screen if same else Screen(err)


def _target(stream: TextIO | None, original: TextIO | None, number: int) -> Target | None:
    if stream is None:  # Python found the file closed; its number may by now be that of another
        return None
    return File(number) if stream is original else Text(stream)


def _are_one_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one of them is closed
        return False
