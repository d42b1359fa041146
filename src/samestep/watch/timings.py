"""Workers of a run, and the seconds of its steps by part and by worker."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from samestep.record.record import OWN, PARTS, QUANTILES
from samestep.record.source import StepPosition
from samestep.watch.curves import (
    Table,
    equal_spans,
    row_range,
    to_float,
    to_int,
    to_list,
    to_text,
    to_texts,
)

EXCHANGE: Final = PARTS.index("exchange")
OTHER: Final = "other"
RECENT: Final = 100  # steps
MOST_WORKERS: Final = 2**16  # of a start
MOST_TIMED: Final = 2**12  # workers with seconds of their own: earlier versions recorded all
NO_QUANTILES: Final = (math.nan,) * len(QUANTILES)
OWN_PER_ROW: Final = 8  # seconds of workers that are held: 4 bytes each
LAG: Final = 0.1  # of a step: a shorter wait for the slowest worker is not worth a report


class Newest(NamedTuple):
    """The newest steps of an attempt, each with its number."""

    # each worker's seconds by part, and its own
    workers: deque[tuple[float, Sequence[Sequence[float]]]]
    # the rank and own seconds of the slowest of many workers, and the median of all
    slowest: deque[tuple[float, tuple[int, float, float]]]

    @classmethod
    def of_steps(cls) -> Newest:
        return cls(deque(maxlen=RECENT), deque(maxlen=RECENT))

    def before(self, end: float) -> Newest:
        """Return those with smaller numbers than `end`."""
        workers = (step for step in self.workers if step[0] < end)
        slowest = (step for step in self.slowest if step[0] < end)
        return Newest(deque(workers, RECENT), deque(slowest, RECENT))


class Timings:
    """Seconds of each step: 76 bytes per step, and 4 more per worker.

    A worker's own seconds exclude its waits for other workers. The record has quantiles of many
    workers instead. `flush` bounds the rows: one then has the means of several steps.
    """

    def __init__(self) -> None:
        # the first step, the time of the last, attempt, workers, number of steps, parts, and
        # quantiles of own seconds, NaN if there are none
        numbers = [np.float32] * len((*PARTS, *QUANTILES))
        self._steps = Table(np.float64, np.float64, np.int32, np.int32, np.int32, *numbers)
        self._own = Table(np.float32)  # per worker of each step, in rank order
        self._newest = Newest.of_steps()
        self._trained = self._newest  # of the last attempt with a loop, for those that make no step

    def append(
        self, step: float, time: float, attempt: int, workers: Sequence[Sequence[float]]
    ) -> None:
        """Append a step of at least one worker, with each worker's seconds by part and own ones."""
        *means, _ = [sum(column) / len(workers) for column in zip(*workers, strict=True)]
        self._steps.append((step, time, attempt, len(workers), 1, *means, *NO_QUANTILES))
        for *_, own_seconds in workers:
            self._own.append((own_seconds,))
        self._newest.workers.append((step, workers))

    def append_summary(
        self, step: float, time: float, attempt: int, event: Mapping[str, Any]
    ) -> bool:
        """Append a step of many workers; return False for an event that no run writes."""
        means, quantiles = event.get("mean"), event.get("quantiles")
        values = quantiles.get(OWN) if isinstance(quantiles, dict) else None
        if not isinstance(means, dict) or not isinstance(values, list):
            return False
        if len(values) != len(QUANTILES):
            return False
        parts = [to_float(means.get(part, 0.0)) for part in PARTS]
        seconds = [*map(to_float, values)]
        self._steps.append((step, time, attempt, 0, 1, *parts, *seconds))
        if (rank := to_int(event.get("slowest"))) is not None:
            self._newest.slowest.append((step, (rank, seconds[-1], seconds[len(seconds) // 2])))
        return True

    def discard_after(self, last: StepPosition, *, trained: bool = False) -> None:
        """Remove all steps after a position, because a new attempt starts there.

        `trained` says whether the attempt before had a loop.
        """
        step, _, _, _, count, *_ = self._steps.columns()
        self._filter(step + (count - 1) < last[0])
        self._trained = (self._newest if trained else self._trained).before(last[0])
        self._newest = Newest.of_steps()

    def _filter(self, rows: NDArray[np.bool_]) -> None:
        self._own.filter(np.repeat(rows, self._steps.columns()[3]))
        self._steps.filter(rows)

    @property
    def nbytes(self) -> int:
        """The bytes of all steps."""
        return self._steps.nbytes + self._own.nbytes

    def flush(self, rows: int) -> None:
        """Put steps into arrays, of at most `rows` rows, and `OWN_PER_ROW` times as many workers.

        The newest rows stay, also if they are more.
        """
        self._steps.flush()
        self._own.flush()
        while len(self._steps) > 4 * RECENT and (
            len(self._steps) > rows or len(self._own) > OWN_PER_ROW * rows
        ):
            self._halve()

    def _halve(self) -> None:
        """Replace pairs of rows by their means, where steps and workers follow each other.

        If few do, each second row is left out. The newest rows stay.
        """
        columns = [column.copy() for column in self._steps.columns()]
        own = self._own.columns()[0].copy()
        step, time, attempt, workers, count, *means = columns
        pairs = (len(step) - RECENT - 1) // 2
        first = 2 * np.arange(pairs)
        second = first + 1
        follows = _follows(step, count, attempt)[first] & (workers[first] == workers[second])
        if 4 * follows.sum() >= pairs:
            first, second = first[follows], second[follows]
            is_first, is_second = np.zeros((2, len(step)), np.bool_)
            is_first[first] = is_second[second] = True
            share = (count[first] / (count[first] + count[second])).astype(np.float32)
            for values in means:
                values[first] = _weighted(share, values[first], values[second])
            earlier, later = np.repeat(is_first, workers), np.repeat(is_second, workers)
            own[earlier] = _weighted(np.repeat(share, workers[first]), own[earlier], own[later])
            time[first] = time[second]
            count[first] += count[second]
            self._steps.replace(*columns)
            self._own.replace(own)
        is_left = np.ones(len(step), np.bool_)
        is_left[second] = False
        self._filter(is_left)

    def restore(self) -> None:
        """Return to the last attempt with a loop, because the current one made no step."""
        self._newest = self._trained

    def steps(self) -> Steps:
        """Return all steps."""
        step, time, attempt, workers, count, *numbers = self._steps.columns()
        parts, quantiles = tuple(numbers[: len(PARTS)]), tuple(numbers[len(PARTS) :])
        return Steps(step, time, attempt, workers, count, parts, quantiles, self._own.columns()[0])

    def parts(self) -> dict[str, float | None]:
        """Return the mean seconds per step by part, over workers and the newest steps.

        A step lasts until the next one begins, so with `OTHER` they add up to all of the time.
        """
        recent = self._recent()
        rows = np.isfinite(recent.wall())
        rows |= not rows.any()
        means = {name: _mean(column[rows]) for name, column in recent.by_part().items()}
        return {name: mean and max(0.0, mean) for name, mean in means.items()}

    def seconds(self) -> float | None:
        """Return the mean seconds of a step, which `parts` add up to; None if unknown."""
        parts = self.parts()
        return None if parts[OTHER] is None else sum(filter(None, parts.values()))

    def workers(self) -> list[dict[str, Any]]:
        """Return each worker's mean own seconds and mean seconds by part, over the newest steps.

        At most one worker has a `lag`: the share of a step that the median worker waits for it, or
        the faster one of two. It compares medians, so a pause in one step is none.
        """
        newest = [workers for _, workers in self._newest.workers]
        if not newest:
            return []
        count = len(newest[-1])
        # [steps, workers, parts and own]
        seconds = np.asarray([step for step in newest if len(step) == count])
        medians = np.median(seconds[:, :, -1], axis=0).tolist()
        finite = [value if np.isfinite(value) else 0.0 for value in medians]
        wall = _mean(self._recent().wall()[-len(seconds) :])
        lag = _lag(max(finite), median_low(finite), wall)
        with np.errstate(invalid="ignore"):  # infinities that no run writes
            means = seconds.mean(axis=0)
        rest = (np.nan if wall is None else wall) - means[:, :-1].sum(axis=1)
        own, others = to_list(means[:, -1]), to_list(np.maximum(rest, 0.0))
        return [
            {
                "seconds": own[rank],
                "parts": {**dict(zip(PARTS, to_list(parts), strict=True)), OTHER: others[rank]},
                "lag": lag if rank == finite.index(max(finite)) else None,
            }
            for rank, parts in enumerate(means[:, :-1])
        ]

    def slowest(self) -> tuple[int, float, float] | None:
        """Return the rank, seconds and lag (as in `workers`) of one of many workers, if any.

        It is the one that was the slowest most often in the newest steps.
        """
        newest = [slowest for _, slowest in self._newest.slowest]
        ranks = [rank for rank, _, _ in newest]
        if not ranks:
            return None
        rank = max(set(ranks), key=ranks.count)
        seconds = median(seconds for slow, seconds, _ in newest if slow == rank)
        middle = median(middle for slow, _, middle in newest if slow == rank)
        is_often = 2 * ranks.count(rank) > len(ranks)
        lag = _lag(seconds, middle, self.seconds()) if is_often else None
        return None if lag is None else (rank, seconds, lag)

    def _recent(self) -> Steps:
        """Return the newest steps and the one before, whose time is the start of the first."""
        steps = self.steps()
        return steps.at(slice(max(0, len(steps.step) - RECENT - 1), len(steps.step)))


@dataclass(frozen=True)
class Steps:
    """Steps [N]: `parts` are means over workers; `own_seconds` are those of `workers`, by step.

    A row may have the means of `count` steps from `step` on, of which the last was at `time`.
    """

    step: NDArray[Any]
    time: NDArray[Any]
    attempt: NDArray[Any]
    workers: NDArray[Any]
    count: NDArray[Any]
    parts: tuple[NDArray[Any], ...]
    quantiles: tuple[NDArray[Any], ...]
    own_seconds: NDArray[Any]

    def at(self, rows: slice) -> Steps:
        first, count = int(self.workers[: rows.start].sum()), int(self.workers[rows].sum())
        return self._take(rows, slice(first, first + count))

    def to_json(self, start: float | None, end: float | None, points: int) -> dict[str, Any]:
        """Return x, parts, workers and quantiles (of many workers) from step `start` to `end`.

        Values are means over at most `points` equal spans of steps; each x is the first step of
        its span. A worker that took no part in a span has None.
        """
        if (self.step[1:] < self.step[:-1]).any():  # no run wrote this record
            return self._sorted().to_json(start, end, points)
        steps = self.at(row_range(self.step, start, end))
        if not len(steps.step):
            parts: dict[str, list[float]] = {name: [] for name in (*PARTS, OTHER)}
            return {"x": [], "parts": parts, "workers": [], "quantiles": []}
        bounds = equal_spans(steps.step, max(1, points))
        # of each step
        span = np.repeat(np.arange(len(bounds)), [stop - start for start, stop in bounds])
        return {
            "x": [float(steps.step[start]) for start, _ in bounds],
            "parts": {
                name: to_list(np.maximum(_means(span, column, len(bounds), steps.count), 0.0))
                for name, column in steps.by_part().items()
            },
            "workers": steps.by_worker(span, len(bounds)),
            "quantiles": [
                to_list(_means(span, column, len(bounds), steps.count))
                for column in steps.quantiles
                if np.isfinite(column).any()
            ],
        }

    def by_part(self) -> dict[str, NDArray[Any]]:
        """Return each step's mean seconds by part, and the rest of its time, NaN if unknown.

        The rest may be negative in a step whose last part ended after its exchange, such as a
        snapshot: the time of the next step then has it. In means, this cancels.
        """
        rest = self.wall() - sum(part.astype(np.float64) for part in self.parts)
        return {**dict(zip(PARTS, self.parts, strict=True)), OTHER: rest}

    def wall(self) -> NDArray[Any]:
        """Return the seconds since the timing of the step before, NaN if unknown.

        A step's timing is recorded with the next exchange.
        """
        follows = _follows(self.step, self.count, self.attempt)
        wall = np.full(len(self.step), np.nan)
        wall[1:] = np.where(follows, np.diff(self.time) / self.count[1:], np.nan)
        return wall

    def by_worker(self, span: NDArray[np.intp], count: int) -> list[list[float | None]]:
        """Return the mean own seconds of each worker in each of `count` spans."""
        largest = int(self.workers.max())
        ends = np.cumsum(self.workers, dtype=np.int64)
        ranks = np.arange(len(self.own_seconds)) - np.repeat(ends - self.workers, self.workers)
        cells = np.repeat(span * largest, self.workers) + ranks
        weights = np.repeat(self.count, self.workers)
        means = _means(cells, self.own_seconds, count * largest, weights).reshape(count, largest)
        return [to_list(column) for column in means.T]

    def _sorted(self) -> Steps:
        order = np.argsort(self.step, kind="stable")
        ranks = np.repeat(np.argsort(order, kind="stable"), self.workers)
        return self._take(order, np.argsort(ranks, kind="stable"))

    def _take(self, rows: Any, worker_rows: Any) -> Steps:
        parts = tuple(part[rows] for part in self.parts)
        quantiles = tuple(quantile[rows] for quantile in self.quantiles)
        columns = (self.step, self.time, self.attempt, self.workers, self.count)
        step, time, attempt, workers, count = (column[rows] for column in columns)
        own_seconds = self.own_seconds[worker_rows]
        return Steps(step, time, attempt, workers, count, parts, quantiles, own_seconds)


def seconds_of(worker: Mapping[str, Any]) -> list[float]:
    """Return a worker's seconds of a step by part, and its own.

    Records of earlier versions have no own ones: there, they are those of all parts but `exchange`.
    """
    parts = [to_float(worker.get(part, 0.0)) for part in PARTS]
    own_seconds = to_float(worker[OWN]) if OWN in worker else sum(parts) - parts[EXCHANGE]
    return [*parts, own_seconds]


def worker_rows(start: Mapping[str, Any], timings: Timings) -> list[dict[str, Any]]:
    """Return the rank, host, devices, lanes and timings of each worker of a start event."""
    workers, timed = started_workers(start), dict(enumerate(timings.workers()))
    lanes = to_int(start.get("lanes")) or 0
    unknown = {"seconds": None, "parts": dict.fromkeys((*PARTS, OTHER)), "lag": None}
    if (slowest := timings.slowest()) is not None:
        timed = {slowest[0]: {**unknown, "seconds": slowest[1], "lag": slowest[2]}}
    return [
        {
            "rank": rank,
            "host": to_text(worker.get("host")),
            "pid": to_int(worker.get("pid")),
            "devices": to_texts(worker.get("devices", start.get("devices"))),
            "lanes": list(lanes_of(rank, len(workers), lanes)),
            **timed.get(rank, unknown),
        }
        for rank, worker in enumerate(workers)
    ]


def started_workers(start: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of each worker in a start event."""
    workers = start.get("workers")
    workers = workers[:MOST_WORKERS] if isinstance(workers, list) else []
    return [worker if isinstance(worker, dict) else {} for worker in workers]


def lanes_of(rank: int, workers: int, lanes: int) -> tuple[int, int]:
    """Return a worker's lanes [first, end), as `samestep.step.layout.lanes_of` does."""
    return rank * lanes // workers, (rank + 1) * lanes // workers


def _lag(longest: float, usual: float, step: float | None) -> float | None:
    """Return the share of a step for which `longest` own seconds make a worker with `usual` wait.

    None if it is less than `LAG`.
    """
    step = max(step or 0.0, longest)
    lag = (longest - usual) / step if step > 0 else 0.0
    return lag if lag >= LAG else None


def _mean(values: NDArray[Any]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if len(finite) else None


def _means(
    groups: NDArray[Any], values: NDArray[Any], count: int, weights: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the mean of the finite values of each of `count` groups; NaN for an empty group."""
    is_finite = np.isfinite(values)
    if not is_finite.all():
        groups, values, weights = groups[is_finite], values[is_finite], weights[is_finite]
    total = np.bincount(groups, weights=weights, minlength=count)
    sums = np.bincount(groups, weights=weights * values, minlength=count)
    return np.where(total > 0, sums / np.maximum(total, 1), np.nan)


def _follows(step: NDArray[Any], count: NDArray[Any], attempt: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each row but the first begins with the step after those of the row before."""
    follows: NDArray[np.bool_] = step[:-1] + count[:-1] == step[1:]
    follows &= np.diff(attempt) == 0
    return follows


@np.errstate(invalid="ignore")  # infinities that no run writes
def _weighted(
    share: NDArray[np.float32], first: NDArray[Any], second: NDArray[Any]
) -> NDArray[Any]:
    mean: NDArray[Any] = share * first + (1 - share) * second
    return mean
