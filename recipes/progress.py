"""Progress of training: a bar on a terminal, lines elsewhere; printed by rank 0 only."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from shutil import get_terminal_size
from typing import Any

from tqdm import tqdm

import samestep as ss

SECONDS_PER_LINE = 5.0


class Progress:
    """Shows epoch, step, means and items per second of a loop over `run.batches` or `run.streams`.

    `unit` is the plural of an item.
    """

    def __init__(self, run: ss.Run, loop: Any, unit: str = "images") -> None:
        self.run, self.loop, self.unit = run, loop, unit
        options = {"total": loop.steps, "initial": loop.step, "unit": "step"}
        self.bar = None
        if run.has_terminal:
            options["dynamic_ncols"] = sys.stderr.isatty()
            if not sys.stderr.isatty():  # samestep run also writes each state of the bar to a log
                options |= {"ncols": get_terminal_size().columns - 1, "mininterval": 1.0}
            self.bar = tqdm(**options)
        self._restart()

    def update(self, means: Mapping[str, float], items: float) -> None:
        """Count the current step; every few seconds, show the means of its items."""
        self.items += items
        step, steps = self.loop.step, self.loop.steps
        if self.bar is not None:
            self.bar.update()
        seconds = time.perf_counter() - self.since
        if not self.run.is_main or (seconds < SECONDS_PER_LINE and step < steps):
            return
        # Read the means only when they are shown: reading waits for the device.
        shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
        shown += f"  {self.items / seconds:,.0f} {self.unit}/s"
        if self.bar is not None:
            self.bar.set_postfix_str(shown)
        else:
            per_epoch = self.loop.steps_per_epoch
            epoch = "" if per_epoch is None else f"epoch {step / per_epoch:.1f}  "
            print(f"{epoch}step {step}/{steps}  {shown}", flush=True)
        self._restart()

    def print(self, text: str) -> None:
        """Print a line above the bar, and exclude the time before it from items per second."""
        if self.bar is not None and sys.stderr.isatty():  # else the launcher starts a new line
            self.bar.clear()
        self.run.print(text)
        self._restart()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()

    def _restart(self) -> None:
        self.since, self.items = time.perf_counter(), 0.0
