"""The points of a scalar, and what is drawn of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from samestep.watch.downsample import drawn
from samestep.watch.numbers import to_json
from samestep.watch.smoothing import Average
from samestep.watch.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from samestep.record.source import StepPosition

AXES: Final = ("step", "time")


@dataclass(frozen=True)
class Request:
    """What to draw of a curve: from `start` to `end` of an axis (both included, None: all there is), at most `points` points.

    `smooth` is the weight of what came before in a moving average; 0 for none.
    """

    start: float | None = None
    end: float | None = None
    points: int = 1000
    smooth: float = 0.0
    axis: str = "step"


class Curve:
    """A scalar's points, 41 bytes each (and 8 more while it is drawn smooth), as float64."""

    def __init__(self) -> None:
        # step, between, time, value, low, high
        self._table = Table(np.float64, np.bool_, *[np.float64] * 4)
        self._average: Average | None = None

    def __len__(self) -> int:
        return len(self._table)

    def append(
        self, place: StepPosition, time: float, value: float, low: float, high: float
    ) -> None:
        """Add a point; `low` and `high` are NaN where there is no band."""
        self._table.append((place[0], not place[1], time, value, low, high))

    def strike(self, last: StepPosition) -> None:
        """Strike out all points after a place."""
        step, between, *_ = self._table.columns()
        self._table.keep((step < last[0]) | ((step == last[0]) & between))
        self._average = None

    def extremes(self) -> dict[str, float | None]:
        """Return the last, the lowest and the highest value, of those that are finite numbers."""
        value = self._table.columns()[3]
        finite = value[np.isfinite(value)]
        last = float(value[-1]) if len(value) and np.isfinite(value[-1]) else None
        if not len(finite):
            return {"last": last, "lowest": None, "highest": None}
        return {"last": last, "lowest": float(finite.min()), "highest": float(finite.max())}

    def points(self, smooth: float = 0.0) -> Points:
        """Return all points, with their moving average where `smooth` is above 0."""
        step, _, time, value, low, high = self._table.columns()
        has_band = not np.isnan(low).all()
        average = None
        if smooth > 0:
            if self._average is None or self._average.weight != smooth:
                self._average = Average(smooth)
            average = self._average.over(value)
        return Points(
            step, time, value, low if has_band else None, high if has_band else None, average
        )


@dataclass(frozen=True)
class Points:
    """Points in the order of the record, float64 [N] each; there may be no band and no moving average."""

    step: NDArray[Any]
    time: NDArray[Any]
    value: NDArray[Any]
    low: NDArray[Any] | None
    high: NDArray[Any] | None
    smooth: NDArray[Any] | None

    def at(self, rows: NDArray[np.intp] | slice) -> Points:
        """Return some of the points."""
        columns = (self.step, self.time, self.value, self.low, self.high, self.smooth)
        return Points(*(None if column is None else column[rows] for column in columns))  # type: ignore[arg-type]

    def answer(self, request: Request) -> dict[str, Any]:
        """Return what is drawn of the points: x, value, low, high, smooth, points and exact."""
        axis = getattr(self, request.axis)
        if (axis[1:] < axis[:-1]).any():  # a clock that was set back, or a record that no run wrote
            return self.at(np.argsort(axis, kind="stable")).answer(request)
        first = (
            0 if request.start is None else int(np.searchsorted(axis, request.start, side="left"))
        )
        end = (
            len(axis)
            if request.end is None
            else int(np.searchsorted(axis, request.end, side="right"))
        )
        inside = self.at(slice(first, max(first, end)))
        rows = drawn(
            getattr(inside, request.axis), inside.value, inside.low, inside.high, request.points
        )
        some = inside.at(rows)
        columns = {
            "x": getattr(some, request.axis),
            "value": some.value,
            "low": some.low,
            "high": some.high,
            "smooth": some.smooth,
        }
        lists = {
            name: None if column is None else to_json(column) for name, column in columns.items()
        }
        return {**lists, "points": len(inside.value), "exact": len(rows) == len(inside.value)}
