"""Commands of samestep on a terminal of their own."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from contextlib import suppress
from pathlib import Path

from tests.python import start_python

ROWS, COLUMNS = 30, 100


def run_samestep(
    *words: str, folder: Path, is_terminal: bool = True, colors: bool = False
) -> tuple[int, str]:
    """Run a command in a folder, on a terminal or with a pipe; return its status and output."""
    reader, output = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(output, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = {
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path]),
        "TERM": "xterm",
        "NO_COLOR": "" if colors else "1",
    }
    with start_python(
        *("-m", "samestep", *words),
        stdout=output,
        stderr=output,
        cwd=folder,
        env={**os.environ, **variables},
    ) as process:
        os.close(output)
        text = b""
        with suppress(OSError):  # EIO at the end of a terminal
            while data := os.read(reader, 65536):
                text += data
    os.close(reader)
    return process.returncode, text.decode().replace("\r\n", "\n")
