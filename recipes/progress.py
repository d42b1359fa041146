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

    `unit` is the plural of an item. With `epoch_means`, the means over all items of an epoch are
    logged as `train/NAME` and printed at its end; they are tracked, so that a resume within an
    epoch changes nothing.
    """

    def __init__(
        self, run: ss.Run, loop: Any, unit: str = "images", *, epoch_means: bool = False
    ) -> None:
        self.run, self.loop, self.unit = run, loop, unit
        self.epoch = EpochMeans() if epoch_means else None
        if self.epoch is not None:
            run.track(epoch_means=self.epoch)
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
        step, steps, per_epoch = self.loop.step, self.loop.steps, self.loop.steps_per_epoch
        if self.bar is not None:
            self.bar.update()
        seconds = time.perf_counter() - self.since
        if self.run.is_main and (seconds >= SECONDS_PER_LINE or step == steps):
            text = f"{_formatted(means)}  {self.items / seconds:,.0f} {self.unit}/s"
            if self.bar is not None:
                self.bar.set_postfix_str(text)
            else:
                epoch = "" if per_epoch is None else f"epoch {step / per_epoch:.1f}  "
                print(f"{epoch}step {step}/{steps}  {text}", flush=True)
            self._restart()
        if self.epoch is not None:
            self.epoch.add(means, items)
            if step % per_epoch == 0:
                epoch_means = self.epoch.take()
                self.run.log(train=epoch_means)
                self._print(f"epoch {step // per_epoch}, training means: {_formatted(epoch_means)}")

    def is_due(self, every: int) -> bool:
        """Return whether the current step is the last one, or a multiple of `every`."""
        return self.loop.step % every == 0 or self.loop.step == self.loop.steps

    def print(self, text: str) -> None:
        """Print a line above the bar, and exclude the time before it from items per second."""
        self._print(text)
        self._restart()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()

    def _print(self, text: str) -> None:
        if self.bar is not None and sys.stderr.isatty():  # else the launcher starts a new line
            self.bar.clear()
        self.run.print(text)

    def _restart(self) -> None:
        self.since, self.items = time.perf_counter(), 0.0


class EpochMeans:
    """Means over the items of an epoch so far, from the means of its steps, in float64."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.items = 0.0

    def add(self, means: Mapping[str, float], items: float) -> None:
        """Add the means of a step over `items`."""
        self.items += items
        for name, value in means.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * items

    def take(self) -> dict[str, float]:
        """Return the means, and start the next epoch."""
        means = {name: total / self.items for name, total in self.sums.items()}
        self.sums, self.items = {}, 0.0
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the number of items."""
        return {"sums": dict(self.sums), "items": self.items}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.sums, self.items = dict(state["sums"]), state["items"]


def _formatted(means: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in means.items())
