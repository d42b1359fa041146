from __future__ import annotations

import io
import os
import pty
from contextlib import suppress

import pytest

from samestep import terminal
from samestep.terminal import (
    CLEAR,
    COLUMNS,
    QUIET_STEPS,
    STARTING,
    TerminalLine,
    columns_of,
    fitted,
    starting,
)


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "term", "loaded", "shown"),
    [
        (True, "xterm", {}, f"{STARTING}in{CLEAR}"),
        (True, "dumb", {}, "in"),
        (True, None, {}, "in"),
        (False, "xterm", {}, "in"),
        (True, "xterm", {"torch": None}, "in"),
    ],
)
def test_a_terminal_shows_that_torch_is_imported(monkeypatch, is_terminal, term, loaded, shown):
    stream = Stream(is_terminal)
    monkeypatch.setattr(terminal.sys, "stderr", stream)
    monkeypatch.setattr(terminal.sys, "modules", loaded)
    monkeypatch.setattr(terminal.os, "environ", {} if term is None else {"TERM": term})
    with suppress(KeyboardInterrupt), starting():
        stream.write("in")
        raise KeyboardInterrupt
    monkeypatch.undo()
    assert stream.getvalue() == shown


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the time, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_a_line_waits_until_nothing_was_printed_for_a_while(clock):
    line = TerminalLine()
    assert line.draw("step 1", 1, COLUMNS) == ""
    clock[0] += terminal.QUIET_SECONDS
    assert line.draw("step 1", 1, COLUMNS) == f"{CLEAR}step 1"
    assert line.draw("step 1", 1, COLUMNS) == ""  # it is there
    assert line.draw("step 2", 2, COLUMNS) == f"{CLEAR}step 2"
    assert line.before_print(ends_line=True) == CLEAR
    assert line.before_print(ends_line=True) == ""
    assert line.draw("step 2", 2, COLUMNS) == ""
    clock[0] += terminal.QUIET_SECONDS
    assert line.draw("step 3", 3, COLUMNS) == ""  # so few steps later
    assert line.draw("step 5", 2 + QUIET_STEPS, COLUMNS) == f"{CLEAR}step 5"
    assert line.draw("", 6, COLUMNS) == CLEAR
    assert line.draw("", 6, COLUMNS) == line.clear() == ""


def test_a_program_that_prints_in_every_step_sees_no_line(clock):
    line = TerminalLine()
    for step in range(20):
        clock[0] += 10
        assert line.draw(f"step {step}", step, COLUMNS) == "" or step == 0
        line.before_print(ends_line=True)


def test_an_unfinished_line_is_left_alone(clock):
    line = TerminalLine()
    line.before_print(ends_line=False)
    for step in range(100):
        clock[0] += 10
        assert line.draw(f"step {step}", step, COLUMNS) == ""
    line.before_print(ends_line=True)
    clock[0] += 10
    assert line.draw("step 200", 200, COLUMNS)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [(40, "step 3/10  loss 0.5"), (19, "step 3/10"), (9, "step 3/1"), (1, "")],
)
def test_a_line_never_reaches_the_last_column(columns, expected):
    assert fitted("step 3/10  loss 0.5", columns) == expected


def test_the_width_is_that_of_the_terminal_and_has_a_default():
    reader, screen = pty.openpty()  # of unknown size
    assert columns_of(screen) == COLUMNS
    os.close(screen)
    os.close(reader)
    assert columns_of(screen) == COLUMNS
