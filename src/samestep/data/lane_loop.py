"""Steps of a computation over lanes, and a loop whose body computes the losses of lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

from samestep.errors import LossError

Value = TypeVar("Value")


class LaneBatch(NamedTuple):
    """The batch of one lane, as the body of a loop gets it."""

    lane: int
    data: Any


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


class LaneLoop(Iterator[Any]):
    """Iterates over the batches of this worker's lanes; the body calls `backward` for each.

    `steps` computes the gradient: it yields a `LaneBatch` and gets (loss, metrics) for it, and
    yields None when the lane is complete. After the last lane, it sums up those of all workers, and
    `report` gets its result. It is closed when nobody refers to this loop, as after a `break`.
    """

    def __init__(
        self,
        steps: LaneSteps[Any],
        report: Callable[[Any], None],
    ) -> None:
        self._steps, self._report = steps, report
        self._lane: int | None = None  # whose loss the body has not given yet

    def __next__(self) -> Any:
        if self._lane is not None:
            self._steps.throw(
                LossError(
                    f"the body of the loop over batch.lanes ended lane {self._lane} without"
                    " batch.backward(loss), without which the gradient would miss its samples;"
                    " call it once for each lane, instead of loss.backward()"
                )
            )
        try:
            while (lane_batch := next(self._steps)) is None:
                pass  # a lane without items
        except StopIteration as end:
            if end.value is None:
                raise LossError(
                    "the loop over batch.lanes cannot go on after an error in an earlier lane"
                ) from None
            self._report(end.value)
            raise StopIteration from None
        self._lane = lane_batch.lane
        return lane_batch.data

    def backward(self, loss: Any, metrics: dict[str, Any]) -> None:
        """Add the gradient of a lane's loss. Raises `LossError` the second time."""
        if self._lane is None:
            raise LossError(
                "batch.backward was called twice for a lane, whose samples would count twice; add"
                " its losses up before, or write another loop over batch.lanes(...) for each"
            )
        self._lane = None
        self._steps.send((loss, metrics))
