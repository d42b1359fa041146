"""What a person sees of training: a bar on a terminal, plain lines elsewhere; once a run, not once a worker."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Mapping

    import samestep as ss

SECONDS_A_LINE = 5.0


class Progress:
    """Shows the epoch, step, means and items a second of a run that makes `steps` steps; `unit` is the plural of an item."""

    def __init__(
        self, run: ss.Run, steps: int, steps_per_epoch: int | None = None, unit: str = "images"
    ) -> None:
        self.run, self.steps, self.steps_per_epoch, self.unit = run, steps, steps_per_epoch, unit
        show_bar = run.is_main and sys.stderr.isatty()
        self.bar = (
            tqdm(total=steps, initial=run.step, unit="step", dynamic_ncols=True)
            if show_bar
            else None
        )
        self._restart()

    def update(self, means: Mapping[str, float], items: float) -> None:
        """Count the step that runs, with the means over its items. A line, or a change of the bar's text, comes every few seconds."""
        self.items += items
        done = self.run.step + 1
        if self.bar is not None:
            self.bar.update()
        seconds = time.perf_counter() - self.since
        if not self.run.is_main or (seconds < SECONDS_A_LINE and done < self.steps):
            return
        # Only what is shown is read: reading waits for the device.
        shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
        speed = f"{self.items / seconds:,.0f} {self.unit}/s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"{shown}  {speed}")
        else:
            epoch = (
                "" if self.steps_per_epoch is None else f"epoch {done / self.steps_per_epoch:.1f}  "
            )
            print(f"{epoch}step {done}/{self.steps}  {shown}  {speed}", flush=True)
        self._restart()

    def say(self, text: str) -> None:
        """Print a line above the bar. What took place before it does not count in items a second."""
        if self.bar is not None:
            self.bar.clear()
        self.run.print(text)
        self._restart()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()

    def _restart(self) -> None:
        self.since, self.items = time.perf_counter(), 0.0
