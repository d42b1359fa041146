"""Training loops: iterables that yield a batch per step and count the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from samestep.data.batch import Batch, steps_left
from samestep.data.plan import Plan, check_end
from samestep.errors import DataError
from samestep.run.progress import Position, Progress


class Loop:
    """A training loop: iterate it to get one `Batch` per step.

    In the body of the loop, `step` is the number of the current step: 1 for the first one, counted
    over resumes and over all loops with the same name. Before the first step of this process it is
    the number of completed steps. `steps_per_epoch` is None for streams.
    """

    steps_per_epoch: int | None = None

    def __init__(self, progress: Progress, name: str) -> None:
        progress.settle()
        self._progress, self._name = progress, name
        self._position = progress.positions.setdefault(name, Position())
        self.step = self._position.done

    def _run(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._progress.begin_step(batch, self._complete)
            self.step = self._position.done + 1
            try:
                yield batch
            except GeneratorExit:
                self._progress.leave_loop()
                raise
            self._progress.status.set_activity(
                "loading data"
            )  # if the body did not iterate the batch
            batch.load()
            self._progress.end_step()
        self._progress.end_loop()

    def _complete(self) -> int:
        return self._position.advance(self.steps_per_epoch)


class PlannedLoop(Loop):
    """The batches of a data set from the loop's position to its end.

    `steps_per_epoch` is the number of steps in an epoch, `steps` the number of the last step
    (counted like `step`), and `len()` the number of steps left. Without `epochs` and `steps`, the
    loop ends with the current epoch each time it is iterated.
    """

    steps_per_epoch: int

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
        super().__init__(progress, name)
        self.steps_per_epoch = plan.steps_per_epoch
        self._batches, self._described = batches, plan.describe()
        self._set_plan(self._described)
        self._max_epochs, self._max_steps = epochs, steps

    def _set_plan(self, plan: dict[str, Any]) -> None:
        at = self._position
        changed = sorted(name for name in {*at.plan, *plan} if at.plan.get(name) != plan.get(name))
        if at.step and changed:
            before, now = (
                ", ".join(f"{name}={some.get(name)}" for name in changed)
                for some in (at.plan, plan)
            )
            raise DataError(
                "the data set must stay the same until the epoch ends: "
                f"step {at.step} of epoch {at.epoch} expected {before}, got {now}; "
                "samples would be lost or repeated"
            )
        at.plan = plan

    @property
    def steps(self) -> int:
        """The number of the last step."""
        return self._position.done + len(self)

    def __len__(self) -> int:
        at, end, ends = self._position, self._end_epoch(), []
        if end is not None:
            ends.append((end - at.epoch) * self.steps_per_epoch - at.step)
        if self._max_steps is not None:
            ends.append(self._max_steps - at.done)
        return max(0, min(ends))

    def _end_epoch(self) -> int | None:
        if self._max_epochs is None and self._max_steps is None:
            return self._position.epoch + 1
        return self._max_epochs

    def _positions(self) -> Iterator[tuple[int, int]]:
        at, left = Position(**asdict(self._position)), len(self)
        for _ in range(left):
            yield at.epoch, at.step
            at.advance(self.steps_per_epoch)

    def __iter__(self) -> Iterator[Batch]:
        self._progress.settle()
        self._progress.begin_loop(
            self._name,
            steps=self.steps,
            epochs=self._max_epochs,
            steps_per_epoch=self.steps_per_epoch,
            samples=self._described["samples"],
            batch_size=self._described["batch_size"],
        )
        return self._run(self._batches(self._positions))


class StreamLoop(Loop):
    """The batches of a stream per lane; `steps` is the number of the last step, None for no end."""

    def __init__(
        self,
        progress: Progress,
        name: str,
        batches: Callable[[int | None], Iterator[Batch]],
        *,
        steps: int | None,
    ) -> None:
        super().__init__(progress, name)
        left = steps_left(steps, self._position.done)
        self.steps = None if left is None else self._position.done + left
        self._batches = batches
        progress.begin_loop(name, steps=self.steps)

    def __iter__(self) -> Iterator[Batch]:
        self._progress.settle()
        return self._run(self._batches(steps_left(self.steps, self._position.done)))
