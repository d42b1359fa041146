"""Progress of training as lines, printed by rank 0, unless a terminal shows the run's own line."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

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
        # samestep shows it, except on a terminal on which workers of other launchers print
        has_line = run.has_terminal and run.config.progress
        self.prints = run.is_main and not (
            has_line and (run.world_size == 1 or not sys.stderr.isatty())
        )
        self._restart()

    def update(self, means: Mapping[str, float], items: float) -> None:
        """Count the current step; every few seconds, print the means of its items."""
        self.items += items
        step, steps, per_epoch = self.loop.step, self.loop.steps, self.loop.steps_per_epoch
        seconds = time.perf_counter() - self.since
        if self.prints and (seconds >= SECONDS_PER_LINE or step == steps):
            epoch = "" if per_epoch is None else f"epoch {step / per_epoch:.1f}  "
            speed = f"{self.items / seconds:,.0f} {self.unit}/s"
            print(f"{epoch}step {step}/{steps}  {_formatted(means)}  {speed}", flush=True)
            self._restart()
        if self.epoch is not None:
            self.epoch.add(means, items)
            if step % per_epoch == 0:
                means = self.epoch.take()
                self.run.log(train=means)
                self.run.print(f"epoch {step // per_epoch}, training means: {_formatted(means)}")

    def is_due(self, every: int) -> bool:
        """Return whether the current step is the last one, or a multiple of `every`."""
        return self.loop.step % every == 0 or self.loop.step == self.loop.steps

    def print(self, text: str) -> None:
        """Print a line, and exclude the time before it from items per second."""
        self.run.print(text)
        self._restart()

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
