"""Curves of scalars: points, moving averages, and downsampling that preserves the picture."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from samestep.record.source import StepPosition

Item = TypeVar("Item")
AXES: Final = ("step", "time", "samples")
ROWS_AT_A_TIME: Final = 4096
LARGEST_NUMBER: Final = 2.0**53  # no run has larger steps or times


class Table:
    """Rows of numbers, stored as one array per column with up to 50 % of spare room.

    Arrays that `columns` returned are never written to again, so that a reader may use them while
    the table changes.
    """

    def __init__(self, *dtypes: DTypeLike) -> None:
        self._arrays: list[NDArray[Any]] = [np.empty(0, dtype) for dtype in dtypes]
        self._rows = 0
        self._pending: list[Sequence[Any]] = []

    def __len__(self) -> int:
        return self._rows + len(self._pending)

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays."""
        return sum(array.nbytes for array in self._arrays)

    def append(self, row: Sequence[Any]) -> None:
        """Append a row: one number per column."""
        self._pending.append(row)
        if len(self._pending) >= ROWS_AT_A_TIME:
            self.flush()

    def columns(self) -> tuple[NDArray[Any], ...]:
        """Return each column as an array of all rows."""
        self.flush()
        return tuple(array[: self._rows] for array in self._arrays)

    def filter(self, rows: NDArray[Any] | slice) -> None:
        """Keep only the rows that are marked true, have these numbers or are in the slice."""
        self._arrays = [column[rows] for column in self.columns()]
        self._rows = len(self._arrays[0])

    def flush(self) -> None:
        """Put appended rows into the arrays, where they take less memory."""
        if self._pending:
            pending, self._pending = self._pending, []
            self.extend(*zip(*pending, strict=True))

    def extend(self, *columns: Sequence[Any] | NDArray[Any]) -> None:
        """Append rows, given by their columns."""
        self.flush()
        start, stop = self._rows, self._rows + len(columns[0])
        if stop > len(self._arrays[0]):
            room = stop if start == 0 else max(stop, start * 3 // 2)
            larger = [np.empty(room, array.dtype) for array in self._arrays]
            for new, old in zip(larger, self._arrays, strict=True):
                new[:start] = old[:start]
            self._arrays = larger
        for column, values in zip(self._arrays, columns, strict=True):
            column[start:stop] = values
        self._rows = stop


class MovingAverage:
    """The exponential moving average of values that grow at the end, corrected for its start.

    m_t = weight * m_(t-1) + (1 - weight) * x_t from m_0 = 0, divided by 1 - weight**t: the
    correction of Adam (Kingma and Ba 2015, section 3), so that the first values are not pulled
    toward 0. The divisor is the same recurrence over ones. Values that are not finite are skipped,
    and their average is NaN. The result is the same bits however the values were appended.
    """

    def __init__(self, weight: float) -> None:
        """Average with `weight` on earlier values, from 0 to below 1."""
        self.weight = weight
        self._mean = self._divisor = 0.0
        self._averages = array("d")

    def over(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the average at each value, float64 [N]; earlier calls had a prefix of `values`."""
        weight, mean, divisor = self.weight, self._mean, self._divisor
        append = self._averages.append
        for value in values[len(self._averages) :].tolist():
            if math.isfinite(value):
                mean = weight * mean + (1 - weight) * value
                divisor = weight * divisor + (1 - weight)
                append(mean / divisor)
            else:
                append(math.nan)
        self._mean, self._divisor = mean, divisor
        return np.array(self._averages)


class Curve:
    """A scalar's points as float64: 25 bytes each, 16 more with a band, 8 more once smoothed."""

    def __init__(self) -> None:
        self._table = Table(np.float64, np.bool_, np.float64, np.float64)
        # step, between, time, value
        self._band: Table | None = None  # low, high
        self._average: MovingAverage | None = None
        self._summary: tuple[int, dict[str, float | None]] | None = None  # of that many points
        self._hash, self._hashed = blake2b(digest_size=8), 0  # of all points; that many rows
        self.is_thinned = False

    def __len__(self) -> int:
        return len(self._table)

    def append(
        self,
        position: StepPosition,
        time: float,
        value: float,
        low: float = math.nan,
        high: float = math.nan,
    ) -> None:
        """Append a point; `low` and `high` are NaN if it has no band."""
        if low == low or high == high:  # noqa: PLR0124  not NaN
            self._begin_band()
        self._table.append((position[0], not position[1], time, value))
        if self._band is not None:
            self._band.append((low, high))

    def extend(self, points: NDArray[Any], band: NDArray[Any] | None = None) -> None:
        """Append points [step, between, time and value; N], with their `band` [low and high; N]."""
        count = points.shape[1]
        if band is not None and not np.isnan(band).all():
            self._begin_band()
        self._table.extend(*points)
        if self._band is not None:
            self._band.extend(*(np.full((2, count), math.nan) if band is None else band))

    def _begin_band(self) -> None:
        if self._band is None:
            self._band = Table(np.float64, np.float64)
            self._band.extend(*np.full((2, len(self)), math.nan))

    @property
    def nbytes(self) -> int:
        """The bytes of all points."""
        return sum(table.nbytes for table in self._tables())

    def flush(self, rows: int) -> None:
        """Put appended points into arrays, and keep at most `rows` of them, with the extremes."""
        for table in self._tables():
            table.flush()
        if len(self) > rows:
            step, _, _, value = self._table.columns()
            edges = () if self._band is None else self._band.columns()
            kept = rows_to_keep(step, [value, *edges[:1]], [value, *edges[1:]], rows)
            self.digest()  # of what goes as well
            for table in self._tables():
                table.filter(kept)
            self._average, self._summary, self.is_thinned = None, None, True
            self._hashed = len(kept)

    def _tables(self) -> list[Table]:
        return [table for table in (self._table, self._band) if table is not None]

    def discard_after(self, last: StepPosition) -> None:
        """Remove all points after a position."""
        step, between, *_ = self._table.columns()
        kept = (step < last[0]) | ((step == last[0]) & between)
        for table in self._tables():
            table.filter(kept)
        self._average = self._summary = None
        self._hash, self._hashed = blake2b(digest_size=8), 0

    def summary(self) -> dict[str, float | None]:
        """Return the number of points, and the last, lowest and highest value or None.

        `lowest_step` and `highest_step` are the steps of the first of those, `lowest_done` and
        `highest_done` the numbers of steps that were complete after it, as in the names of
        snapshots. `trend` is the relative change from the mean of the fifth of the finite values
        before the newest fifth to its mean, None for a thinned curve.
        """
        if self._summary is None or self._summary[0] != len(self):
            step, between, _, value = self._table.columns()
            done = step + ~between
            rows = np.flatnonzero(np.isfinite(value))
            finite = value[rows]
            summary: dict[str, float | None] = {
                "points": len(self),
                "last": float(value[-1]) if len(value) and np.isfinite(value[-1]) else None,
                "trend": None if self.is_thinned else _trend(finite),  # extremes tell no mean
            }
            for name, find in (("lowest", np.argmin), ("highest", np.argmax)):
                row = rows[find(finite)] if len(rows) else None
                for key, column in ((name, value), (f"{name}_step", step), (f"{name}_done", done)):
                    summary[key] = None if row is None else float(column[row])
            self._summary = len(self), summary
        return self._summary[1]

    def digest(self) -> str:
        """Return a hash of the steps and values of all points, without their bands."""
        step, between, _, value = (column[self._hashed :] for column in self._table.columns())
        self._hash.update(np.column_stack((step, between, value)).tobytes())
        self._hashed += len(step)
        return self._hash.hexdigest()

    def has(self, done: float, value: float) -> bool:
        """Return whether a point had this value when `done` steps were complete."""
        step, between, _, values = self._table.columns()
        return bool((values[step + ~between == done] == value).any())

    def nonfinite_since(self) -> int | None:
        """Return the step since which no value was finite, None if the last one is."""
        step, _, _, value = self._table.columns()
        if not len(value) or np.isfinite(value[-1]):
            return None
        finite = np.flatnonzero(np.isfinite(value))
        return int(step[finite[-1] + 1 if len(finite) else 0])

    def points(self, smooth: float = 0.0) -> Points:
        """Return all points, with their moving average if `smooth` is above 0."""
        step, between, time, value = self._table.columns()
        done, average = step + ~between, None
        low, high = (None, None) if self._band is None else self._band.columns()
        if low is not None and np.isnan(low).all():
            low = high = None
        if smooth > 0:
            if self._average is None or self._average.weight != smooth:
                self._average = MovingAverage(smooth)
            average = self._average.over(value)
        return Points(step, done, time, value, low, high, average, is_thinned=self.is_thinned)


def _trend(values: NDArray[Any]) -> float | None:
    size = len(values) // 5
    if not size:
        return None
    with np.errstate(over="ignore"):
        before, now = float(values[-2 * size : -size].mean()), float(values[-size:].mean())
    change = (now - before) / abs(before) if before else math.nan
    return change if math.isfinite(change) else None


class HostUse:
    """Resource usage of hosts, as one series per host and measure: 12 bytes a value.

    Shares are in percent, throughput in bytes per second. A GPU's measures end with its number, as
    in "gpu 0" and "gpu_memory 0".
    """

    THROUGHPUTS: Final = ("disk_read", "disk_written", "network_received", "network_sent")
    MOST_GPUS: Final = 64  # of a host
    MOST_SERIES: Final = 30_000  # no run has as many, and each takes about 1 KB

    def __init__(self) -> None:
        self.count = 0  # samples
        self._series: dict[tuple[str, str], Table] = {}

    def append(self, time: float, event: Mapping[str, Any]) -> None:
        """Append an event `system`. Fields that no run writes are ignored."""
        self.count += 1
        host, gpus = to_text(event.get("host")) or "", event.get("gpus")
        values = {name: to_number(event.get(name)) for name in self.THROUGHPUTS}
        values |= {"cpu": _percent(event.get("cpu"), 1), "memory": _share_of_memory(event)}
        for number, gpu in enumerate(gpus[: self.MOST_GPUS] if isinstance(gpus, list) else ()):
            if isinstance(gpu, dict):
                values[f"gpu {number}"] = _percent(gpu.get("use"), 1)
                values[f"gpu_memory {number}"] = _share_of_memory(gpu)
        for name, value in values.items():
            if value is None:
                continue
            if (series := self._series.get((host, name))) is None:
                if len(self._series) == self.MOST_SERIES:
                    continue
                series = self._series[host, name] = Table(np.float64, np.float32)
            series.append((time, value))

    @property
    def nbytes(self) -> int:
        """The bytes of all series."""
        return sum(series.nbytes for series in self._series.values())

    def flush(self, rows: int) -> None:
        """Put samples into arrays, and keep at most `rows` of each series, with its extremes."""
        for series in self._series.values():
            series.flush()
            if len(series) > rows:
                time, value = series.columns()
                series.filter(rows_to_keep(time, [value], [value], rows))

    def columns(self) -> dict[tuple[str, str], tuple[NDArray[Any], ...]]:
        """Return times and values by host and measure."""
        return {key: table.columns() for key, table in self._series.items()}


def _share_of_memory(fields: Mapping[str, Any]) -> float | None:
    return _percent(fields.get("memory"), fields.get("memory_total"))


def _percent(part: object, total: object) -> float | None:
    dividend, divisor = to_number(part), to_number(total)
    return None if dividend is None or not divisor else 100 * dividend / divisor


@dataclass(frozen=True)
class Points:
    """Points in the order of the record, float64 [N] each; the last five may be None.

    `done` is the number of complete steps at a point, `samples` that of the samples used by them,
    and `runs` how many runs the value is the mean of.
    """

    step: NDArray[Any]
    done: NDArray[Any]
    time: NDArray[Any]
    value: NDArray[Any]
    low: NDArray[Any] | None
    high: NDArray[Any] | None
    smooth: NDArray[Any] | None
    samples: NDArray[Any] | None = None
    runs: NDArray[Any] | None = None
    is_thinned: bool = False

    def at(self, rows: NDArray[np.intp] | slice) -> Points:
        """Return some of the points."""
        columns = ((name, column) for name, column in vars(self).items() if column is not None)
        return replace(
            self, **{name: column[rows] for name, column in columns if name != "is_thinned"}
        )

    def to_json(
        self, start: float | None, end: float | None, points: int, axis: str
    ) -> dict[str, Any]:
        """Return the points to draw: x, value, low, high, smooth, runs, spans, points and exact."""
        x = getattr(self, axis)
        if (x[1:] < x[:-1]).any():  # a clock was set back, or no run wrote this record
            return self.at(np.argsort(x, kind="stable")).to_json(start, end, points, axis)
        inside = self.at(row_range(x, start, end))
        x = getattr(inside, axis)
        lows = [column for column in (inside.value, inside.low) if column is not None]
        highs = [column for column in (inside.value, inside.high) if column is not None]
        rows = select_points(x, lows, highs, points)
        drawn, spans = inside.at(rows), None
        if len(rows) < len(x):
            count = _span_count(points, len(lows) + len(highs))
            starts = [start for start, _ in equal_spans(x, count)]
            spans = np.searchsorted(starts, rows, side="right").tolist()
        return {
            "x": to_list(x[rows]),
            "value": to_list(drawn.value),
            "low": None if drawn.low is None else to_list(drawn.low),
            "high": None if drawn.high is None else to_list(drawn.high),
            "smooth": None if drawn.smooth is None else to_list(drawn.smooth),
            "runs": None if drawn.runs is None else to_list(drawn.runs),
            "spans": spans,  # points with the same number stand for all points between them
            "points": len(x),
            "exact": spans is None and not self.is_thinned,
        }


def select_points(
    x: NDArray[Any], lows: Sequence[NDArray[Any]], highs: Sequence[NDArray[Any]], points: int
) -> NDArray[np.intp]:
    """Return the indices of at most `points` points to draw, in order. `x` ascends.

    M4 (Jugel et al. 2014, "M4: A visualization-oriented time series data aggregation"): from each
    of equal spans of the x axis, the first and the last point, the lowest of each of `lows` and the
    highest of each of `highs`.
    """
    if len(x) <= points:
        return np.arange(len(x))
    lowest = [np.where(np.isfinite(column), column, np.inf) for column in lows]
    highest = [np.where(np.isfinite(column), column, -np.inf) for column in highs]
    starts, stops = np.array(equal_spans(x, _span_count(points, len(lowest) + len(highest)))).T
    chosen = [starts, stops - 1]
    for columns, extreme in ((lowest, np.minimum), (highest, np.maximum)):
        for column in columns:
            reached = np.repeat(extreme.reduceat(column, starts), stops - starts)
            hits = np.flatnonzero(column == reached)
            chosen.append(hits[np.searchsorted(hits, starts)])  # the first of each span
    return np.unique(np.concatenate(chosen))


def rows_to_keep(
    x: NDArray[Any], lows: Sequence[NDArray[Any]], highs: Sequence[NDArray[Any]], limit: int
) -> NDArray[np.intp]:
    """Return the rows that stay of more than `limit`: half as many, with the extremes."""
    ascends = not (x[1:] < x[:-1]).any()  # else a clock was set back, or no run wrote this
    return select_points(x if ascends else np.arange(len(x)), lows, highs, limit // 2)


def spread(items: Sequence[Item], steps: Sequence[float], count: int) -> list[Item]:
    """Return at most `count` items evenly over their ascending steps, and the last one."""
    rows = {start for start, _ in equal_spans(np.array(steps), count)}
    return [items[row] for row in sorted({*rows, len(items) - 1})]


def _span_count(points: int, extremes: int) -> int:
    return max(1, points // (2 + extremes))


def equal_spans(x: NDArray[Any], count: int) -> list[tuple[int, int]]:
    """Return the rows [start, stop) of `count` equal spans of ascending `x`, without empty ones."""
    edges = np.linspace(float(x[0]), float(x[-1]), count + 1)[1:-1]
    bounds = [0, *np.searchsorted(x, edges).tolist(), len(x)]
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]


def row_range(x: NDArray[Any], start: float | None, end: float | None) -> slice:
    """Return the rows of ascending `x` from `start` to `end` inclusive; None means no limit."""
    first = 0 if start is None else int(np.searchsorted(x, start, side="left"))
    stop = len(x) if end is None else int(np.searchsorted(x, end, side="right"))
    return slice(first, max(first, stop))


def to_list(values: NDArray[Any]) -> list[float | None]:
    """Return values for JSON: those that are not finite become None."""
    pairs = zip(values.tolist(), np.isfinite(values).tolist(), strict=True)
    return [value if finite else None for value, finite in pairs]


def to_number(value: object) -> float | None:
    """Return a number that can be a step or a time, else None."""
    if isinstance(value, (int, float)) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        return float(value)
    return None


def to_int(value: object) -> int | None:
    """Return a number that can be a count, else None."""
    number = to_number(value)
    return None if number is None else int(number)


def to_float(value: object) -> float:
    """Return a number of any size as float, even if it is not finite; NaN for anything else."""
    if type(value) is float:  # most values are
        return value
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return math.nan


def to_text(value: object) -> str | None:
    """Return a string, None for anything else."""
    return value if isinstance(value, str) else None


def to_texts(value: object) -> list[str]:
    """Return the strings of a list, none for anything else."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []
