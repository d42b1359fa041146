"""Training loops: iterables that yield a batch per step and count the steps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import wraps
from inspect import signature
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from samestep.data.batch import Batch, BeginLanes, LaneStream, steps_left, stream_batches
from samestep.data.lane_body import counter_of
from samestep.data.mixture_plan import MixturePlan
from samestep.data.plan import NONE, Plan, check_end, check_positive
from samestep.errors import ConfigError, DataError
from samestep.run.loop_states import Position
from samestep.run.progress import Progress

END_MISSING: Final = (
    "loop %r trains a second epoch, and samestep cannot know where a resumed run should stop: "
    "for epoch in range(3) would train three more epochs at every start. "
    "Write for epoch in range(run.epoch, 3), or one loop with run.batches(..., epochs=3)"
)

AFTER_FINISH: Final = (
    "loop {!r} was begun again after run.finish(), which ends all loops; leave your own loop over"
    " epochs with break after run.finish(), and when run.finished is true"
)
EPOCH_CONTINUES: Final = (
    "loop %r was left after %d of %d steps of epoch %d, and this pass continues that epoch. If"
    " every pass should be a new epoch, write run.batches(...).limit(%d) instead of break"
)

COUNTS_ANEW: Final = (
    "loop %r continues after step %d of epoch %d, but the index %s of enumerate, with which it"
    " computes, counts from 0 again. Use loop.step, which is 1 in the first step of the"
    " loop, or run.step, which is 0 in that of the run: they go on after a resume"
)

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
OWN_ORDER: Final = (
    "samestep selects the samples, so that they are the same at any number of workers; run.batches"
    " has order= (indices, a function of the epoch, ss.Weighted, ss.ByLength or ss.ShardOrder),"
    " shuffle= and group_by=, and run.evaluate uses each sample once"
)
BY_LENGTH: Final = "write order=ss.ByLength(lengths, max_tokens=...) in run.batches"
LOADER_PROCESSES: Final = "loader_workers= starts the loader processes, which need no other option"
INSTEAD: Final = {
    "sampler": OWN_ORDER,
    "batch_sampler": OWN_ORDER,
    "generator": "the order of samples and all random numbers are keyed by the option seed",
    "shuffle": "an evaluation uses each sample once, in the order of the data set",
    "drop_last": "an evaluation uses each sample once, in the order of the data set",
    "num_workers": "use loader_workers=",
    "persistent_workers": LOADER_PROCESSES,
    "prefetch_factor": LOADER_PROCESSES,
    "worker_init_fn": "all generators are seeded for each lane batch; " + LOADER_PROCESSES,
    "weights": "write order=ss.Weighted(weights) in run.batches",
    "lengths": BY_LENGTH,
    "max_tokens": BY_LENGTH,
    "exclude": "it leaves out samples of training; evaluate a torch.utils.data.Subset",
    "pin_memory": "batches are pinned automatically if the device is a GPU",
}


def without_loader_options(
    method: Callable[Parameters, Returned],
) -> Callable[Parameters, Returned]:
    """Make a method raise `ConfigError` for options of `INSTEAD` that it does not have."""
    missing = INSTEAD.keys() - signature(method).parameters.keys()

    @wraps(method)
    def checked(*args: Parameters.args, **options: Parameters.kwargs) -> Returned:
        for name in sorted(options.keys() & missing):
            raise ConfigError(f"run.{method.__name__} has no option {name}: {INSTEAD[name]}")
        return method(*args, **options)

    return checked


class Loop:
    """A training loop: iterate it to get one `Batch` per step.

    Attributes:
        step (int): In the body of the loop, the number of the current step: 1 for the first one,
            counted over resumes and over all loops with the same name. Before the first step of
            this process, the number of completed steps.
        steps_per_epoch (int | None): Number of steps in an epoch; None for streams.
    """

    steps_per_epoch: int | None = None
    _ends_with_epoch = False  # each time that it is iterated

    def __init__(self, progress: Progress, name: str, begin: BeginLanes) -> None:
        """`begin` computes the gradient of a loop over the lanes of a batch."""
        progress.complete_left_step()
        self._progress, self._name, self._begin = progress, name, begin
        # of the snapshot, after a resume
        self._position = progress.loops.positions.setdefault(name, Position())
        self.step = self._position.done

    def _run(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        self._progress.status.set_activity("loading data")  # samples to compare
        for batch in batches:
            # The body of the user's loop runs during `yield`, so a step lasts from here to
            # `end_step`. The generator is closed instead of resumed if the body ends by break,
            # return or an exception.
            self._progress.begin_step(self._name, batch, self._complete)
            self.step = self._position.done + 1
            try:
                yield batch.attach(self._begin)
            except GeneratorExit:
                batch.leave_lanes()
                self._progress.leave_step()  # counts if the body had made an update
                raise
            batch.leave_lanes()
            # If the body did not iterate the batch, this step still loads it.
            self._progress.status.set_activity("loading data")
            batch.load()
            self._progress.end_step()
            if self._progress.finished:
                break
        self._progress.end_loop(self._name)

    def _complete(self) -> int:
        return self._position.advance(self.steps_per_epoch, opens=self._ends_with_epoch)


class PlannedLoop(Loop):
    """The batches of a data set, from the loop's position to its end; `run.batches` creates it.

    `len()` is the number of steps left. Without `epochs` and `steps`, the loop ends with the
    current epoch each time it is iterated.
    """

    steps_per_epoch: int

    def __init__(
        self,
        progress: Progress,
        name: str,
        begin: BeginLanes,
        plan: Plan,
        batches: Callable[[Callable[[], Iterator[tuple[int, int]]]], Iterator[Batch]],
        *,
        epochs: int | None,
        steps: int | None,
    ) -> None:
        check_end("epochs", epochs)
        check_end("steps", steps)
        super().__init__(progress, name, begin)
        self._batches, self._plan = batches, plan
        self._max_epochs, self._max_steps = epochs, steps
        self._ends_with_epoch = epochs is None and steps is None
        if not self._ends_with_epoch:
            progress.loops.resumed_open.discard(name)
        if self._ends_with_epoch and self._position.step and name in progress.loops.resumed_orders:
            # the order that the epoch has begun with, whatever the script computes it from now
            plan.use_array(progress.loops.resumed_orders[name])
        self.steps_per_epoch = plan.steps_per_epoch
        self._check_plan(without="limit")

    def limit(self, steps: int) -> PlannedLoop:
        """End every epoch of this loop after some steps, and return the loop.

        The epoch uses the samples of its first steps, in an order of its own. Raises `ConfigError`
        if `steps` is not a whole number of at least 1, and `DataError` if an epoch has begun with
        another limit.

        Example:
            >>> len(run.batches(train_set, 32, epochs=3).limit(2))
            6
        """
        check_positive("limit", steps, "of an epoch")
        self.steps_per_epoch = min(steps, self._plan.steps_per_epoch)
        return self

    def _check_end(self) -> None:
        """Warn once if user code counts epochs from 0 at every start, which trains too many."""
        progress, at, loops = self._progress, self._position, self._progress.loops
        if progress.finished:
            if self._name in loops.skipped:
                raise ConfigError(AFTER_FINISH.format(self._name))
            loops.skipped.add(self._name)
        elif self._name in loops.end_with_epoch - loops.continued and at.step:
            loops.continued.add(self._name)
            advice = (self._name, at.step, self.steps_per_epoch, at.epoch, at.step)
            if progress.is_main:
                logging.getLogger("samestep").warning(EPOCH_CONTINUES, *advice)
        if self._name not in loops.end_with_epoch:
            loops.end_with_epoch.add(self._name)
            progress.reads.discard("step")  # perhaps to do something once per run
        elif not progress.reads and progress.can_resume:
            progress.reads.add("epoch")
            if progress.is_main:
                logging.getLogger("samestep").warning(END_MISSING, self._name)

    def _check_plan(self, without: str = "") -> None:
        at = self._position
        if at.step == 0:
            return
        # In the middle of an epoch, the samples that are left depend on what was used before.
        plan = self._describe(at.epoch)
        names = {*at.plan, *plan} - {without}
        changed = sorted(name for name in names if at.plan.get(name) != plan.get(name))
        if changed == ["exclude"]:
            self._refuse_used()
        elif changed:
            old, new = (
                ", ".join(f"{name}={description.get(name)}" for name in changed)
                for description in (at.plan, plan)
            )
            raise DataError(
                "the data set must stay the same until the epoch ends: "
                f"step {at.step} of epoch {at.epoch} expected {old}, got {new}; "
                "samples would be lost or repeated. Restore the old data or value (any file may "
                "replace a removed one), resume from a snapshot that was taken at the end of an "
                "epoch (resume=PATH), or start a new run"
            )

    def _refuse_used(self) -> None:
        """Raise `DataError` if a sample is left out only now, or no longer, that was used.

        All others stay where they are. So the rest of the epoch is that of one which has begun so.
        """
        at, excluded = self._position, self._plan.excluded
        changed = np.setxor1d(excluded, self._progress.loops.excluded.get(self._name, NONE))
        step = self._plan.first_step_with(changed, at.epoch, at.step)
        if step is not None:
            raise DataError(
                f"exclude may not change within an epoch for samples that it has used: step {step}"
                f" of epoch {at.epoch} of loop {self._name!r} used one of {len(changed)} samples,"
                f" such as {changed[0]}, and the run resumes at step {at.step}. Restore exclude, or"
                " resume from an earlier snapshot (resume=PATH); samestep forget finds one before"
                " their first use in the run"
            )

    def _describe(self, epoch: int) -> dict[str, Any]:
        """Return what must stay the same within an epoch."""
        plan, limit = self._plan.describe(epoch), self.steps_per_epoch
        return plan if limit == self._plan.steps_per_epoch else {**plan, "limit": limit}

    @property
    def sources(self) -> dict[str, int]:
        """Rows that each source of a mixture has given, the current step included."""
        return {}

    @property
    def steps(self) -> int:
        """The number of the last step."""
        return self._position.done + len(self)

    def __len__(self) -> int:
        at, end, ends = self._position, self._max_epochs, []
        if self._progress.finished:
            return 0
        if self._ends_with_epoch:
            end = at.epoch + (self._name not in self._progress.loops.resumed_open)
        if end is not None:
            ends.append((end - at.epoch) * self.steps_per_epoch - at.step)
        if self._max_steps is not None:
            ends.append(self._max_steps - at.done)
        return max(0, min(ends))

    def _positions(self) -> Iterator[tuple[int, int]]:
        # A copy, because batches are loaded ahead of the loop, in the order of these positions.
        at, left = Position(**asdict(self._position)), len(self)
        for _ in range(left):
            yield at.epoch, at.step
            at.advance(self.steps_per_epoch)

    def _complete(self) -> int:
        at = self._position
        if at.step == 0:
            # saved with the position, to compare after a resume
            at.plan = self._describe(at.epoch)
            self._progress.record_order(self._name, at.epoch, self._plan)
            self._progress.loops.resumed_orders.pop(self._name, None)
            if self._ends_with_epoch and (array := self._plan.array) is not None:
                self._progress.loops.orders[self._name] = array
        epoch = super()._complete()
        if at.step == 0:
            self._progress.loops.orders.pop(self._name, None)
        return epoch

    def __iter__(self) -> Iterator[Batch]:
        at, progress = self._position, self._progress
        if progress.place is None and (at.step if self._ends_with_epoch else at.done):
            index = counter_of(sys._getframe(1))  # noqa: SLF001
            if index and progress.is_main:
                logging.getLogger("samestep").warning(
                    COUNTS_ANEW, self._name, at.step, at.epoch, index
                )
        self._progress.complete_left_step()
        self._check_plan()  # now with its limit
        if at.step:
            at.plan = self._describe(at.epoch)  # with what is left out from here on
        progress.loops.excluded[self._name] = self._plan.excluded
        if self._ends_with_epoch:
            self._check_end()
        self._progress.begin_pass(self._name)
        planned = self._begin_plan()
        self._progress.begin_loop(
            self._name,
            self._plan,
            steps=self.steps,
            ends_with_epoch=self._ends_with_epoch,
            epochs=self._max_epochs,
            steps_per_epoch=self.steps_per_epoch,
            **planned,
            **({"excluded": count} if (count := len(self._plan.excluded)) else {}),
        )
        if at.step and len(self):  # within an epoch
            self._progress.record_order(self._name, at.epoch, self._plan)
        return self._run(self._batches(self._positions))

    def _begin_plan(self) -> dict[str, int | None]:
        """Prepare the plan for a pass; return the samples of an epoch and of a batch."""
        plan = self._plan
        samples = min(plan.samples, self.steps_per_epoch * plan.batch_size)  # with `limit`
        return {"samples": samples, "batch_size": plan.batch_size}


class MixtureLoop(PlannedLoop):
    """The batches of a mixture of data sets, or of one data set with batches that vary.

    Each batch is full, so an epoch is a number of steps: those that have as many rows as all
    sources at the loop's first batch size, or those of `limit`.
    """

    _plan: MixturePlan

    def __init__(
        self,
        progress: Progress,
        name: str,
        begin: BeginLanes,
        plan: MixturePlan,
        batches: Callable[[Callable[[], Iterator[tuple[int, int]]]], Iterator[Batch]],
        *,
        epochs: int | None,
        steps: int | None,
    ) -> None:
        plan.resume(progress.loops.positions.get(name, Position()).mixture)
        super().__init__(progress, name, begin, plan, batches, epochs=epochs, steps=steps)
        self._go_on()

    @property
    def sources(self) -> dict[str, int]:
        return {name: rows for name, (rows, _) in self._plan.used(self.step).items()}

    def limit(self, steps: int) -> MixtureLoop:
        """Make every epoch of this loop have some steps, and return the loop.

        Rows go on where the last epoch has ended. Raises what `PlannedLoop.limit` does.

        Example:
            >>> mixture = {"images": train_set}
            >>> len(run.batches(mixture, 32, weights={"images": 1}, epochs=3).limit(2))
            6
        """
        check_positive("limit", steps, "of an epoch")
        self.steps_per_epoch = steps
        return self

    def _begin_plan(self) -> dict[str, int | None]:
        self._go_on()
        self._progress.loops.mixtures[self._name] = self._plan
        size = self._plan.fixed_batch_size
        samples = None if size is None else size * self.steps_per_epoch
        return {"samples": samples, "batch_size": size}

    def _go_on(self) -> None:
        at, self.step = self._position, self._position.done
        number = at.epoch * self.steps_per_epoch + at.step
        self._plan.begin(at.mixture, at.done, number, self.steps_per_epoch)

    def _complete(self) -> int:
        self._progress.record_shares(self._name, self._position.done, self._plan)
        epoch = super()._complete()
        self._position.note(self._plan.state(self._position.done))
        return epoch


class StreamLoop(Loop):
    """The batches of one stream per lane; `run.streams` creates it.

    Attributes:
        steps (int | None): The number of the last step; None for an endless loop.
    """

    def __init__(
        self,
        progress: Progress,
        name: str,
        begin: BeginLanes,
        make_stream: Callable[[int], Any],
        lanes: range,
        seed: int,
        *,
        steps: int | None,
    ) -> None:
        if not callable(make_stream):
            raise DataError(
                "run.streams expected a function of the lane's number that returns an endless"
                f" iterable, got {type(make_stream).__name__}; for a map-style data set use"
                " run.batches"
            )
        super().__init__(progress, name, begin)
        progress.loops.exclusion.of(name, is_stream=True)  # refuses it
        left = steps_left(steps, self._position.done)
        self.steps = None if left is None else self._position.done + left
        self._lanes = lanes
        self._streams = {lane: LaneStream(make_stream, name, lane, seed) for lane in lanes}
        # The snapshot has all lanes. This worker continues those that it has now.
        resumed = progress.loops.resumed_streams.get(name, {})
        for lane, stream in self._streams.items():
            if lane in resumed:
                stream.load_state_dict(resumed[lane])
        progress.loops.streams[name] = self._streams  # snapshots save their states from here
        progress.begin_loop(name, steps=self.steps)

    def __iter__(self) -> Iterator[Batch]:
        self._progress.complete_left_step()
        self._progress.begin_pass(self._name)
        left = 0 if self._progress.finished else steps_left(self.steps, self._position.done)
        return self._run(stream_batches(self._streams, self._lanes, left))
