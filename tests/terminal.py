"""Programs on a terminal of their own, and what it shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.terminal import CLEAR
from tests.python import PythonProcess, start_python

ROWS, COLUMNS = 30, 100
# A worker of another test may look for its ended coordinator at a port that the kernel gave away.
STRAY_CONNECTION = re.compile(r".*refused a connection from this host: .*\n")


class Screen:
    """The output of a program, as far as it was read."""

    def __init__(self, reader: int, process: PythonProcess) -> None:
        self._reader, self.process = reader, process
        self._data = b""

    def until(self, pattern: str) -> None:
        """Wait for new output that matches a pattern; what comes after it is new afterwards."""
        text = ""
        while not re.search(pattern, text):
            data = os.read(self._reader, 65536)
            assert data, f"{pattern} did not come after {self.text}"
            self._data += data
            text += data.decode()

    def read(self) -> str:
        """Wait for the end of the program, and return all of its output."""
        with suppress(OSError):  # EIO at the end of a terminal
            while data := os.read(self._reader, 65536):
                self._data += data
        self.process.wait()
        return self.text

    @property
    def text(self) -> str:
        return self._data.decode().replace("\r\n", "\n")


@contextmanager
def started(
    *words: str, folder: Path, is_terminal: bool = True, **variables: str
) -> Iterator[Screen]:
    """Start `python WORDS…` in a folder, on a terminal or with a pipe."""
    reader, output = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(output, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    path = os.pathsep.join([str(Path.cwd()), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "NO_COLOR": "1", **variables}
    files = {"stdout": output, "stderr": output}
    with start_python(*words, **files, cwd=folder, env=environment) as process:
        os.close(output)
        try:
            yield Screen(reader, process)
        except BaseException:
            process.kill()
            raise
    os.close(reader)


def run_samestep(
    *words: str, folder: Path, is_terminal: bool = True, colors: bool = False
) -> tuple[int, str]:
    """Run a command in a folder, on a terminal or with a pipe; return its status and output.

    The terminal shows no progress, which depends on the speed of the machine, and the output is
    without connections that other tests made.
    """
    variables = {"SAMESTEP_PROGRESS": "false", **({"NO_COLOR": ""} if colors else {})}
    words = ("-m", "samestep", *words)
    with started(*words, folder=folder, is_terminal=is_terminal, **variables) as screen:
        text = screen.read()
    return screen.process.returncode, STRAY_CONNECTION.sub("", text)


def shown(text: str) -> tuple[list[str], list[str]]:
    """Return the lines that a terminal shows at the end, and those that were there before."""
    lines, removed = [""], []
    for part in text.replace(CLEAR, "\0").splitlines(keepends=True):
        before, *after = part.rstrip("\n").split("\0")
        lines[-1] += before
        for rest in after:
            removed += filter(None, [lines[-1]])
            lines[-1] = rest
        if part.endswith("\n"):
            lines.append("")
    return lines[:-1] if not lines[-1] else lines, removed
