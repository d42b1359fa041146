"""The last line of a terminal, rewritten in place while nothing else is printed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

CLEAR: Final = "\r\x1b[K"  # the cursor's line, with the cursor at its start
QUIET_SECONDS: Final = 0.5  # without other output until the line is drawn
QUIET_STEPS: Final = 3  # likewise: a program that prints in every step shows its own progress
COLUMNS: Final = 80  # if the terminal does not say
GAP: Final = "  "  # between the parts of a line
STARTING: Final = "samestep: starting …"


class TerminalLine:
    """Decides what to write so that a terminal shows a line of text below all other output.

    Its methods return characters and write nothing, so the line may belong to any kind of stream.
    All other output of the terminal is announced by `before_print`. The line is drawn where a line
    begins, never on one that a program left unfinished, such as a progress bar of its own.
    """

    def __init__(self) -> None:
        self._shown = ""
        self._is_free = True  # the cursor is at the start of a line, or on this one
        self._step = self._printed_step = -QUIET_STEPS  # at the last call, and when it was printed
        self._printed_at = time.monotonic()

    def before_print(self, *, ends_line: bool) -> str:
        """Return what comes before other output, of which `ends_line` tells how it ends."""
        self._is_free, self._printed_step = ends_line, self._step
        self._printed_at = time.monotonic()
        return self.clear()

    def clear(self) -> str:
        """Return what removes the line until it is drawn again."""
        shown, self._shown = self._shown, ""
        return CLEAR if shown else ""

    def draw(self, text: str, step: int, columns: int) -> str:
        """Return what shows a text after `step` steps, "" if nothing changes or it must wait."""
        self._step = step
        text = fitted(text, columns)
        if not text:
            return self.clear()
        is_quiet = (
            step - self._printed_step >= QUIET_STEPS
            and time.monotonic() - self._printed_at >= QUIET_SECONDS
        )
        if text == self._shown or not (self._is_free and (self._shown or is_quiet)):
            return ""
        self._shown = text
        return f"{CLEAR}{text}"


@contextmanager
def starting() -> Iterator[None]:
    """Show on the terminal of stderr, if it is one, that the block starts: it imports torch."""
    stream = sys.stderr
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    if "torch" in sys.modules or is_dumb or stream is None or not stream.isatty():
        yield
        return
    print(STARTING, end="", file=stream, flush=True)
    try:
        yield
    finally:
        print(CLEAR, end="", file=stream, flush=True)


def fitted(text: str, columns: int) -> str:
    """Return the first parts of a text that fit into a row without its last column.

    A terminal would move the cursor to the next row, which cannot be rewritten.
    """
    while len(text) >= columns and GAP in text:
        text = text.rpartition(GAP)[0]
    return text[: columns - 1]


def columns_of(file: int) -> int:
    """Return the number of columns of the terminal that is open as `file`."""
    try:
        return os.get_terminal_size(file).columns or COLUMNS
    except OSError:  # it was closed
        return COLUMNS
