"""The iterables that a training loop runs over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from samestep.data.batch import Batch
from samestep.data.plan import Plan, check_end
from samestep.errors import DataError
from samestep.run.progress import Position, Progress


class PlannedLoop:
    """The batches of a data set from where the loop stands to its end; `len()` is the number of steps left.

    With neither `epochs` nor `steps` the end is that of the epoch, each time it is iterated.
    """

    def __init__(
        self,
        progress: Progress,
        name: str,
        plan: Plan,
        batches: Callable[[Callable[[], Iterator[tuple[int, int]]]], Iterator[Batch]],
        *,
        epochs: int | None,
        steps: int | None,
    ) -> None:
        check_end("epochs", epochs)
        check_end("steps", steps)
        progress.settle()
        self._progress, self._name, self._plan, self._batches = progress, name, plan, batches
        self._position = progress.positions.setdefault(name, Position())
        self._described = plan.describe()
        self._take_plan(self._described)
        self._epochs, self._steps = epochs, steps

    def _take_plan(self, plan: dict[str, Any]) -> None:
        at = self._position
        changed = sorted(name for name in {*at.plan, *plan} if at.plan.get(name) != plan.get(name))
        if at.step and changed:
            before, now = (
                ", ".join(f"{name}={some.get(name)}" for name in changed)
                for some in (at.plan, plan)
            )
            raise DataError(
                f"the run stands at step {at.step} of epoch {at.epoch} of a data set with {before}, but {now} was given; expected "
                "the same until the epoch ends, or samples would be lost or repeated"
            )
        at.plan = plan

    def _positions(self) -> Iterator[tuple[int, int]]:
        at, end = Position(**asdict(self._position)), self._end_epoch()
        while (end is None or at.epoch < end) and (self._steps is None or at.done < self._steps):
            yield at.epoch, at.step
            at.advance(self._plan.steps_per_epoch)

    def _end_epoch(self) -> int | None:
        return (
            self._position.epoch + 1
            if self._epochs is None and self._steps is None
            else self._epochs
        )

    def __len__(self) -> int:
        at, end, ends = self._position, self._end_epoch(), []
        if end is not None:
            ends.append((end - at.epoch) * self._plan.steps_per_epoch - at.step)
        if self._steps is not None:
            ends.append(self._steps - at.done)
        return max(0, min(ends))

    def __iter__(self) -> Iterator[Batch]:
        self._progress.settle()
        self._progress.begin_loop(
            self._name,
            steps=self._position.done + len(self),
            epochs=self._epochs,
            steps_per_epoch=self._plan.steps_per_epoch,
            samples=self._described["samples"],
            batch_size=self._described["batch_size"],
        )
        return run_loop(
            self._batches(self._positions),
            self._progress,
            lambda: self._position.advance(self._plan.steps_per_epoch),
        )


def run_loop(
    batches: Iterator[Batch], progress: Progress, complete: Callable[[], int]
) -> Iterator[Batch]:
    """Yield batches, and say when each step begins and ends."""
    for batch in batches:
        progress.begin_step(batch, complete)
        try:
            yield batch
        except GeneratorExit:
            progress.leave_loop()
            raise
        progress.status.set_activity("loading data")  # that the body did not look at
        batch.load()
        progress.end_step()
    progress.end_loop()
