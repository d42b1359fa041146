"""Steps of a computation over lanes, and a loop whose body computes the losses of lanes."""

from __future__ import annotations

import dis
import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from numbers import Number
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeVar, cast

from torch import Tensor

from samestep.errors import LossError

Value = TypeVar("Value")
# Python joins some of these instructions into one, with a tuple of names
ACCESS: Final = re.compile(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)(?!_AND_CLEAR)")
# what ends the search for a loop: the iterator is stored or dropped, or the code branches
ELSEWHERE: Final = ("STORE_", "POP_TOP", "POP_JUMP", "JUMP", "RETURN", "YIELD")
_carried: dict[tuple[int, int], tuple[CodeType, frozenset[str]]] = {}  # by code's id and place


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
    `report` gets its result. It is closed when nobody holds the iterator, as after a `break`.
    `code` is that of the loop, and `carried` its variables that a lane must not change for the
    next one.
    """

    def __init__(
        self,
        steps: LaneSteps[Any],
        report: Callable[[Any], None],
        code: CodeType | None = None,
        carried: frozenset[str] = frozenset(),
    ) -> None:
        self._steps, self._report = steps, report
        self._code, self._carried = code, carried
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
        try:
            while self._advance():
                # the body is in the frame that asks for the next lane
                before = self._values(sys._getframe(1)) if self._carried else {}  # noqa: SLF001
                yield self._take()  # not held here, so that it is freed with the body's variable
                if before and not self._waits_for:
                    self._refuse_changes(before, self._values(sys._getframe(1)))  # noqa: SLF001
        finally:
            self.close()

    def _advance(self) -> bool:
        """Compute up to the next lane with items; return whether there is one."""
        if self._waits_for:
            self._steps.throw(
                LossError(
                    f"the body of the loop over batch.lanes ended {self._waits_for} without"
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

    def _values(self, frame: FrameType) -> dict[str, Any]:
        """Return the variables that lanes must not change; none if another frame has the loop."""
        if frame.f_code is not self._code:  # such as that of a progress bar
            return {}
        names, others = frame.f_locals, frame.f_globals
        return {name: names.get(name, others.get(name)) for name in self._carried}

    def _refuse_changes(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Raise `LossError` if a lane left a number or tensor to the next one."""
        for name, value in after.items():
            former = before[name]
            if value is former or isinstance(value, bool) or not isinstance(value, Number | Tensor):
                continue
            if isinstance(value, Tensor) or value != former:
                self._steps.throw(
                    LossError(
                        f"the body of the loop over batch.lanes changed {name}, which the body of"
                        " the next lane reads: each worker runs it for its own lanes only, so the"
                        " value would depend on the number of workers. Pass it as a metric, such"
                        f" as batch.backward(loss, {name}=...), and read batch.means after the"
                        " loop, or change it in the body of the loop over batches"
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


def carried_names(frame: FrameType) -> frozenset[str]:
    """Return the variables that one pass of a loop leaves to the next, by the code of its body.

    The loop is the one for whose iterator this frame makes a call now. Its body reads these names
    before it sets them, as in `total += loss.item()`. There are none if no loop follows, as for an
    iterator that is stored.
    """
    code, place = frame.f_code, (id(frame.f_code), frame.f_lasti)
    cached_code, names = _carried.get(place, (None, frozenset()))
    if cached_code is not code:  # an id may be used again
        names = _names_of_loop(code, frame.f_lasti)
        _carried[place] = code, names
    return names


def _names_of_loop(code: CodeType, call: int) -> frozenset[str]:
    end: int | None = None  # of the loop's body
    read, carried, was_set = set[str](), set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.offset <= call:
            continue
        if end is None:
            if instruction.opname.startswith(ELSEWHERE):
                break
            if instruction.opname == "FOR_ITER":
                end = instruction.argval
            continue
        if instruction.offset >= end:
            break
        argument = instruction.argval
        accessed = argument if isinstance(argument, tuple) else (argument,)
        for how, name in zip(ACCESS.findall(instruction.opname), accessed, strict=False):
            if how == "STORE":
                was_set.add(name)
                carried |= {name} & read
            elif name not in was_set:
                read.add(name)
    return frozenset(carried)
