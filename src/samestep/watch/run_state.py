"""What the events of a record add up to, taken one by one as they come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from samestep.record.record import PARTS
from samestep.record.source import STARTS, valid_until, step_position
from samestep.watch.curves import Curve
from samestep.watch.numbers import number, real, whole
from samestep.watch.timeline import told
from samestep.watch.timings import RECENT, Timings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from samestep.record.source import StepPosition

ENDS: Final = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "restarting": "running",
}


@dataclass(frozen=True)
class Image:
    """An image event; `number` counts those of the record, also those that a later start made void."""

    number: int
    name: str
    place: StepPosition
    path: str
    width: int
    height: int
    size: int | None

    @property
    def step(self) -> int:
        """The step that it was logged in."""
        return int(self.place[0])


@dataclass(frozen=True)
class Line:
    """An event of the time line; `detail` is what tells more, such as a traceback."""

    time: float
    kind: str
    step: int | None
    text: str
    tone: str
    detail: str | None


class RunState:
    """Where a run stands, and all that is drawn of it.

    What a later start made void is struck out when that start comes, so that after any number of
    events it is what `samestep.record.read_history` would give.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.timings = Timings()
        self.images: dict[int, Image] = {}
        self.lines: list[Line] = []
        self.sinks: dict[str, Mapping[str, Any]] = {}
        self.dropped_images = 0
        self.state = "running"
        self.started: float | None = None
        self.updated: float | None = None
        self.start: Mapping[str, Any] = {}
        self.attempts = 0
        self.step = 0.0
        self.epoch: int | None = None
        self.loop: Mapping[str, Any] | None = None
        # the last start that began a loop, and the loop
        self._trained: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        # steps that were done, and when
        self.paces: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)
        self._images_seen = 0
        self._takers = {"scalars": self._scalars, "timing": self._timing, "image": self._image}

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event; one that no run writes does no harm."""
        kind, time = event.get("event"), number(event.get("time"))
        if not isinstance(kind, str) or time is None:
            return
        self.updated = time
        taker = self._takers.get(kind)
        if taker is not None:
            taker(event, time)
        elif kind in STARTS:
            self._begin(event, kind, time)
        elif self._is_told(event, kind):
            self._tell(event, kind, time)

    def _is_told(self, event: dict[str, Any], kind: str) -> bool:
        """Take an event of the run itself, and tell whether it belongs in the time line."""
        self.state = ENDS.get(kind, self.state)
        if kind == "finished" and self.loop is None and self._trained is not None:
            self.start, self.loop = self._trained  # this start evaluated what that one trained
        if kind != "restarting":
            self._reached(number(event.get("step")), None)
        if kind == "images_dropped":
            self.dropped_images += whole(event.get("count")) or 0
        if kind == "sink":
            name = str(event.get("name"))
            before, self.sinks[name] = self.sinks.get(name, {}), event
            # not how far behind it is
            return any(before.get(field) != event.get(field) for field in ("error", "dropped"))
        if kind == "loop":
            before, self.loop = self.loop or {}, event
            self.epoch = whole(event.get("epoch"))
            return before.get("name") != event.get("name")  # many begin anew each epoch
        return True

    def _begin(self, event: dict[str, Any], kind: str, time: float) -> None:
        step, between = valid_until(event)
        last = real(step), between
        for curve in self.curves.values():
            curve.strike(last)
        self.curves = {name: curve for name, curve in self.curves.items() if len(curve)}
        self.timings.strike(last)
        self.images = {
            number: image for number, image in self.images.items() if image.place <= last
        }
        self.started = time if self.started is None else self.started
        self._tell(event, kind, time)
        if self.loop is not None:
            self._trained = self.start, self.loop
        self.state, self.start, self.loop, self.epoch = (
            "running",
            event,
            None,
            whole(event.get("epoch")),
        )
        self.step = number(event.get("step")) or 0.0
        self.attempts += 1
        self.paces.clear()

    def _scalars(self, event: dict[str, Any], time: float) -> None:
        place, values = _place(event), event.get("values")
        if place is None or not isinstance(values, dict):
            return
        low, high = (
            some if isinstance(some, dict) else {} for some in (event.get("low"), event.get("high"))
        )
        for name, value in values.items():
            if not isinstance(value, (int, float)):
                continue
            if (curve := self.curves.get(name)) is None:
                curve = self.curves[name] = Curve()
            curve.append(place, time, real(value), real(low.get(name)), real(high.get(name)))
        self.epoch = whole(event.get("epoch"))
        self._reached(place[0], time)

    def _timing(self, event: dict[str, Any], time: float) -> None:
        place, workers = _place(event), event.get("workers")
        if (
            place is None
            or not isinstance(workers, list)
            or not workers
            or not all(isinstance(worker, dict) for worker in workers)
        ):
            return
        seconds = [[real(worker.get(part)) for part in PARTS] for worker in workers]
        self.timings.append(place[0], time, self.attempts, seconds)
        self._reached(place[0] + 1, time)

    def _image(self, event: dict[str, Any], _: float) -> None:
        place, path = _place(event), event.get("path")
        if place is None or not isinstance(path, str):
            return
        width, height = whole(event.get("width")) or 0, whole(event.get("height")) or 0
        image = Image(
            self._images_seen,
            str(event.get("name")),
            place,
            path,
            width,
            height,
            whole(event.get("bytes")),
        )
        self.images[image.number] = image
        self._images_seen += 1

    def _reached(self, step: float | None, time: float | None) -> None:
        """Note that a step was done, and when it was, where the event came with it."""
        if step is None or step <= self.step:
            return
        self.step = step
        if time is not None:
            self.paces.append((step, time))

    def _tell(self, event: dict[str, Any], kind: str, time: float) -> None:
        text, tone = told(event, kind, self.start or None)
        detail = event.get("traceback")
        self.lines.append(
            Line(
                time,
                kind,
                whole(event.get("step")),
                text,
                tone,
                detail if isinstance(detail, str) else None,
            )
        )

    @property
    def step_seconds(self) -> float | None:
        """The seconds that one of the newest steps took on average, with all that came between them."""
        if len(self.paces) < 2:
            return None
        (first, begun), (last, ended) = self.paces[0], self.paces[-1]
        return max(0.0, ended - begun) / (last - first)

    @property
    def usual_seconds(self) -> float:
        """The median of the times between the newest steps; 0 where nobody knows it."""
        times = [time for _, time in self.paces]
        gaps = sorted(
            later - earlier for earlier, later in zip(times, islice(times, 1, None), strict=False)
        )
        return gaps[len(gaps) // 2] if gaps else 0.0


def _place(event: dict[str, Any]) -> StepPosition | None:
    return None if number(event.get("step")) is None else step_position(event)
