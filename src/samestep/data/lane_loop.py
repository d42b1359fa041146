"""Steps of a computation over lanes, and a loop whose body computes the losses of lanes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

from samestep.data.lane_body import Body, Variables, bodies_of, values_of
from samestep.errors import LossError

Value = TypeVar("Value")


class LaneBatch(NamedTuple):
    """The batch of one lane, as the body of a loop gets it; of the whole batch if that is None."""

    lane: int | None
    data: Any

    @property
    def where(self) -> str:
        """What the body computes the loss of, for messages."""
        return "the whole batch" if self.lane is None else f"lane {self.lane}"


# A computation that gives a `LaneBatch` to the body of a loop and gets (loss, metrics) from it, and
# yields None after each lane. It runs to its end at once if a function computes the losses.
LaneSteps = Generator[LaneBatch | None, Any, Value]


def in_turn(devices: Iterable[LaneSteps[None]]) -> LaneSteps[None]:
    """Let devices take turns, one lane each, so that all get work early."""
    waiting = deque(devices)
    while waiting:
        device, returned = waiting.popleft(), None
        with suppress(StopIteration):
            while (lane_batch := device.send(returned)) is not None:
                returned = yield lane_batch
            waiting.append(device)
            yield None


def finished(steps: LaneSteps[Value]) -> Value:
    """Return the result of steps whose losses a function computes."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(Value, end.value)


class LaneLoop(Iterable[Any]):
    """Iterates once over this worker's lane batches; the body calls `backward` for each.

    `steps` computes the gradient: it yields a `LaneBatch` and gets (loss, metrics) for it, and
    yields None when the lane is complete. After the last lane, it sums up those of all workers, and
    `report` gets its result. It is closed when nothing holds the iterator, as after a `break`.
    With `is_shared`, other workers run the body for other lanes, so that a lane must not hand
    anything to the next one that a loss depends on.
    """

    def __init__(
        self, steps: LaneSteps[Any], report: Callable[[Any], None], *, is_shared: bool = False
    ) -> None:
        self._steps, self._report = steps, report
        self._is_shared = is_shared
        self._has_begun = False
        self._lane_batch: LaneBatch | None = None  # not yet in the hands of the body
        self._waits_for = ""  # whose loss the body has not given yet

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            raise LossError(
                "a loop over batch.lanes cannot be iterated twice; call batch.lanes(...) again,"
                " whose gradients are then added"
            )
        self._has_begun = True
        return self._data()

    def _data(self) -> Iterator[Any]:
        bodies: list[Body] | None = None if self._is_shared else []
        try:
            while self._advance():
                # the body is in the frame that asks for the next lane, or in one of its callers
                if bodies is None:
                    bodies = self._find_bodies(sys._getframe(1))  # noqa: SLF001
                before = values_of(bodies, sys._getframe(1)) if bodies else []  # noqa: SLF001
                yield self._take()  # not held here, so that it is freed with the body's variable
                if bodies and not self._waits_for:
                    self._refuse_changes(bodies, before, sys._getframe(1))  # noqa: SLF001
        finally:
            self.close()

    def _advance(self) -> bool:
        """Compute up to the next lane with items; return whether there is one."""
        if self._waits_for:
            self._steps.throw(
                LossError(
                    f"the body of the loop over batch.lanes ended {self._waits_for} without"
                    " batch.backward(loss), without which the gradient would miss its samples;"
                    " call it once for each lane, instead of loss.backward(). A gradient that you"
                    " compute yourself is that of the loss (p * gradient).sum()"
                )
            )
        try:
            while (lane_batch := next(self._steps)) is None:
                pass  # a lane without items
        except StopIteration as end:
            if end.value is None:
                raise LossError(
                    "the loop over batch.lanes cannot go on after an error in an earlier lane, or"
                    " after its step"
                ) from None
            self._report(end.value)
            return False
        self._lane_batch, self._waits_for = lane_batch, lane_batch.where
        return True

    def _take(self) -> Any:
        lane_batch, self._lane_batch = cast(LaneBatch, self._lane_batch), None
        return lane_batch.data

    def _find_bodies(self, frame: FrameType) -> list[Body]:
        """Return the bodies whose variables lanes must not change.

        Raises `LossError` if a loss depends on how many lanes this worker has had.
        """
        bodies = bodies_of(frame, self)
        if counted := next((body.counted for body in bodies if body.counted), ""):
            self._steps.throw(
                LossError(
                    f"batch.backward in the loop over batch.lanes depends on {counted}, which has"
                    " another value for the same lane on another number of workers, because each"
                    " worker counts only its own lanes. Use it for output only, such as `if"
                    " number == 0: print(...)`, and let the data set return what belongs to a"
                    " sample"
                )
            )
        return bodies

    def _refuse_changes(
        self, bodies: list[Body], before: list[Variables], frame: FrameType
    ) -> None:
        """Raise `LossError` if a lane left something to the next one."""
        for body, variables in zip(bodies, before, strict=True):
            if name := body.changed(variables, frame):
                metric = name if name.isidentifier() else "value"
                self._steps.throw(
                    LossError(
                        f"the body of the loop over batch.lanes changed {name}, which the body of"
                        " the next lane reads: each worker runs it for its own lanes only, so the"
                        " value would depend on the number of workers. Pass it as a metric, such"
                        f" as batch.backward(loss, {metric}=...), and read batch.means after the"
                        " loop, set it anew in each lane, or change it in the body of the loop over"
                        " batches"
                    )
                )

    def close(self) -> None:
        """Leave the loop: contexts of a lane, such as autocast, end."""
        self._waits_for, self._lane_batch = "", None
        self._steps.close()

    def backward(self, loss: Any, metrics: dict[str, Any]) -> None:
        """Add the gradient of a lane's loss. Raises `LossError` the second time."""
        if not self._waits_for:
            raise LossError(
                "batch.backward was called twice for a lane, whose samples would count twice; add"
                " its losses up before, or write another loop over batch.lanes(...) for each"
            )
        self._waits_for = ""
        self._steps.send((loss, metrics))
