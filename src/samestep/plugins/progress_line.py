"""A line with the progress of a loop, on the terminal that shows the output of rank 0."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TextIO

from samestep.cluster import ProcessInfo
from samestep.handoff import TERMINAL, LauncherState
from samestep.host import printable
from samestep.metrics import Means
from samestep.plugin import EndedStep, RunPlugin
from samestep.terminal import GAP, TerminalLine, columns_of

SECONDS: Final = 0.25  # between two updates
RECENT: Final = 40  # updates over which the speed is taken
DEFAULT_LOOP: Final = "train"  # whose name says nothing
MOST_LOSSES: Final = 3  # of the calls of a step

Show = Callable[[str, int], None]  # a text, and the number of completed steps


@dataclass
class Pace:
    """The pace of a loop since it began: of its steps, and of its samples without evaluations."""

    planned: Mapping[str, int | None]
    first: tuple[float, int] | None = None  # time and steps at the end of the first step
    samples: int | None = 0  # None for streams, whose samples nobody counts
    # seconds without evaluations, and samples or steps
    marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))


class ProgressLine(RunPlugin):
    """Shows epoch, step, loss, speed and the time left of the current loop.

    It is updated at most every `SECONDS`, with the losses that the host has anyway: nothing waits
    for a GPU. The first step of a loop, which may compile, counts as no time.
    """

    def __init__(self, show: Show, stop_after: int | None) -> None:
        self._show, self._stop_after = show, stop_after
        self._loops: dict[str, Pace] = {}
        self._means: list[Means] = []  # of the current step
        self._evaluated = 0.0  # seconds
        self._text, self._step, self._due = "", 0, 0.0

    def begin_loop(self, name: str, planned: Mapping[str, int | None]) -> None:
        """Start the clock of a loop; `planned` has the fields of the record's event `loop`."""
        self._loops[name] = Pace(planned)

    def add(self, means: Means) -> None:
        """Add the means of a call of the current step."""
        self._means.append(means)

    def end_step(self, ended: EndedStep) -> None:
        """Count a step of a loop, and show it if the last update is old."""
        step, name, done, batch = ended
        samples = None if batch.counts is None else sum(batch.counts)  # of all workers
        pace, means, self._means = self._loops[name], self._means, []
        if pace.samples is not None:
            pace.samples = None if samples is None else pace.samples + samples
        now = time.monotonic()
        pace.first = pace.first or (now, done)
        if now < self._due:
            return
        self._due = now + SECONDS
        pace.marks.append((now - self._evaluated, done if pace.samples is None else pace.samples))
        parts = [
            "" if name == DEFAULT_LOOP else printable(name),
            *_position(pace.planned, done, batch.epoch),
            _losses(means),
            _speed(pace),
            self._left(pace, now, step, done),
        ]
        self._step, self._text = step, GAP.join(filter(None, parts))
        self._show(self._text, step)

    def evaluating(self, seconds: float | None = None) -> None:
        """Say that an evaluation runs; with the `seconds` that it took, that it has ended."""
        if seconds is None and self._text:
            self._show(f"{self._text}{GAP}evaluating", self._step)
        self._evaluated += seconds or 0.0

    def clear(self) -> None:
        """Remove the line."""
        self._text = ""
        self._show("", self._step)

    def _left(self, pace: Pace, now: float, step: int, done: int) -> str:
        """Return the time left, from the mean duration of a step, evaluations included."""
        last = pace.planned.get("steps")
        ends = [] if last is None else [last - done]
        if self._stop_after is not None:
            ends.append(self._stop_after - step)
        (began, before), left = pace.first or (now, done), min(ends, default=0)
        if left <= 0 or done == before:
            return ""
        seconds = (now - began) / (done - before) * left
        return f"{_clock(seconds)} left{' in epoch' if pace.planned.get('ends_with_epoch') else ''}"


def _position(planned: Mapping[str, int | None], done: int, epoch: int) -> list[str]:
    steps, per_epoch = planned.get("steps"), planned.get("steps_per_epoch")
    if planned.get("ends_with_epoch") and steps is not None and per_epoch is not None:
        # the script counts the epochs
        return [f"epoch {epoch + 1}", _of("step", done - (steps - per_epoch), per_epoch)]
    epochs = planned.get("epochs")
    parts = [_of("step", done, steps)]
    return [_of("epoch", epoch + 1, epochs), *parts] if per_epoch and epochs != 1 else parts


def _of(noun: str, number: int, total: int | None) -> str:
    return f"{noun} {number:,}" if total is None else f"{noun} {number:,}/{total:,}"


def _losses(means: list[Means]) -> str:
    values = [means["loss"] for means in means[:MOST_LOSSES] if "loss" in means]
    return f"loss {' '.join(f'{value:.4g}' for value in values)}" if values else ""


def _speed(pace: Pace) -> str:
    (start, before), (end, now) = pace.marks[0], pace.marks[-1]
    if end <= start:
        return ""
    speed = (now - before) / (end - start)
    number = f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
    return f"{number} {'steps' if pace.samples is None else 'samples'}/s"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class OwnTerminal:
    """The terminal of this process, where it shows a line below what Python code prints.

    The methods `write` and `flush` of stdout and stderr remove the line first, if they print there.
    They are replaced in the streams, which handlers of logging may have stored already.
    """

    def __init__(self) -> None:
        self._line = TerminalLine()
        self._write, self._file = sys.stderr.write, sys.stderr.fileno()
        self._hooks: list[tuple[TextIO, str, Any]] = []
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and stream.isatty():
                self._hook(stream, "write", partial(self._print, stream.write))
                self._hook(stream, "flush", partial(self._flush, stream.flush))

    def show(self, text: str, step: int) -> None:
        """Show a text after `step` steps."""
        # stderr is line-buffered, for which a carriage return is an end of a line as well
        self._write(self._line.draw(text, step, columns_of(self._file)))

    def close(self) -> None:
        """Remove the line, and give the streams their own methods again."""
        with suppress(OSError, ValueError):  # the terminal is gone, or the stream was closed
            self._write(self._line.clear())
        for stream, name, hook in self._hooks:
            if vars(stream).get(name) is hook:
                delattr(stream, name)

    def _hook(self, stream: TextIO, name: str, hook: Any) -> None:
        setattr(stream, name, hook)
        self._hooks.append((stream, name, hook))

    def _print(self, write: Callable[[str], int], text: str) -> int:
        if text:
            self._write(self._line.before_print(ends_line=text.endswith("\n")))
        return write(text)

    def _flush(self, flush: Callable[[], None]) -> None:
        self._write(self._line.clear())  # for input(), and for processes that start now
        flush()


def open_line(
    process: ProcessInfo, stop_after: int | None, call_at_close: Callable[..., object]
) -> ProgressLine | None:
    """Return the line of rank 0, if its output reaches a terminal; None otherwise.

    A launcher of samestep draws it, because it prints what all workers print. Without one, this
    process does, unless others print on the same terminal.
    """
    if process.rank > 0 or os.environ.get("TERM", "dumb") == "dumb":
        return None
    state = LauncherState.from_environment(os.environ)
    if state is not None and os.environ.get(TERMINAL):
        line = ProgressLine(state.report_line, stop_after)
    elif process.local_world_size == 1 and sys.stderr is not None and sys.stderr.isatty():
        terminal = OwnTerminal()
        call_at_close(terminal.close)
        line = ProgressLine(terminal.show, stop_after)
    else:
        return None
    call_at_close(line.clear)
    return line
