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
    """Seconds of each step: 68 bytes per step, and 4 more per worker.

    A worker's own seconds exclude its waits for other workers. The record has quantiles of many
    workers instead. `flush` bounds the rows: one then has the means of several steps.
    """

    def __init__(self) -> None:
        # the first step, the number of steps, workers, parts, the rest of the time, and quantiles
        # of own seconds, NaN if there are none
        numbers = [np.float32] * len((*PARTS, OTHER, *QUANTILES))
        self._steps = Table(np.float64, np.int32, np.int32, *numbers)
        self._own = Table(np.float32)  # per worker of each step, in rank order
        self._last: tuple[float, float] | None = None  # step of this attempt, and its time
        self._newest = Newest.of_steps()
        self._trained = self._newest  # of the last attempt with a loop, for those that make no step

    def append(self, step: float, time: float, workers: Sequence[Sequence[float]]) -> None:
        """Append a step of at least one worker, with each worker's seconds by part and own ones."""
        *means, _ = [sum(column) / len(workers) for column in zip(*workers, strict=True)]
        self._append(step, time, len(workers), means, NO_QUANTILES)
        for *_, own_seconds in workers:
            self._own.append((own_seconds,))
        self._newest.workers.append((step, workers))

    def append_summary(self, step: float, time: float, event: Mapping[str, Any]) -> bool:
        """Append a step of many workers; return False for an event that no run writes."""
        means, quantiles = event.get("mean"), event.get("quantiles")
        values = quantiles.get(OWN) if isinstance(quantiles, dict) else None
        if not isinstance(means, dict) or not isinstance(values, list):
            return False
        if len(values) != len(QUANTILES):
            return False
        seconds = [*map(to_float, values)]
        self._append(step, time, 0, [to_float(means.get(part, 0.0)) for part in PARTS], seconds)
        if (rank := to_int(event.get("slowest"))) is not None:
            self._newest.slowest.append((step, (rank, seconds[-1], seconds[len(seconds) // 2])))
        return True

    def _append(
        self,
        step: float,
        time: float,
        workers: int,
        parts: Sequence[float],
        quantiles: Sequence[float],
    ) -> None:
        """Append a step with the rest of its time, NaN if the step before is unknown.

        A step's timing is recorded with the next exchange, so its time is the one since the timing
        of the step before. The rest is negative if its last part ended after its exchange, such as
        a snapshot: the time of the next step then has it. In means, this cancels.
        """
        rest = math.nan
        if self._last is not None and self._last[0] + 1 == step:
            rest = time - self._last[1] - sum(parts)
        self._last = step, time
        self._steps.append((step, 1, workers, *parts, rest, *quantiles))

    def discard_after(self, last: StepPosition, *, trained: bool = False) -> None:
        """Remove all steps after a position, because a new attempt starts there.

        `trained` says whether the attempt before had a loop.
        """
        step, count, workers, *_ = self._steps.columns()
        rows = step + (count - 1) < last[0]
        self._own.filter(np.repeat(rows, workers))
        self._steps.filter(rows)
        self._last = None
        self._trained = (self._newest if trained else self._trained).before(last[0])
        self._newest = Newest.of_steps()

    @property
    def nbytes(self) -> int:
        """The bytes of all steps."""
        return self._steps.nbytes + self._own.nbytes

    def flush(self, rows: int) -> None:
        """Put steps into arrays, of at most `rows` rows, and `OWN_PER_ROW` times as many workers.

        If there are more, all but the newest become the means of equal spans of steps.
        """
        self._steps.flush()
        self._own.flush()
        most = OWN_PER_ROW * rows
        if len(self._steps) <= max(rows, 4 * RECENT) and len(self._own) <= most:
            return
        steps = self.steps()
        newest = max(0, len(steps.step) - RECENT)
        if not newest:
            return
        old = steps.at(slice(0, newest))
        most_workers = max(1, int(old.workers.max()))
        for table in (self._steps, self._own):
            table.filter(slice(0))
        for part in (
            old.means(min(rows, most // most_workers) // 2),
            steps.at(slice(newest, None)),
        ):
            self._steps.extend(part.step, part.count, part.workers, *part.parts, *part.quantiles)
            self._own.extend(part.own_seconds)

    def restore(self) -> None:
        """Return to the last attempt with a loop, because the current one made no step."""
        self._newest = self._trained

    def steps(self) -> Steps:
        """Return all steps."""
        step, count, workers, *numbers = self._steps.columns()
        parts, quantiles = tuple(numbers[: -len(QUANTILES)]), tuple(numbers[-len(QUANTILES) :])
        return Steps(step, count, workers, parts, quantiles, self._own.columns()[0])

    def parts(self) -> dict[str, float | None]:
        """Return the mean seconds per step by part, over workers and the newest steps.

        A step lasts until the next one begins, so with `OTHER` they add up to all of the time.
        """
        parts = self._recent().parts
        rows = np.isfinite(parts[-1])
        rows |= not rows.any()
        means = [_mean(column[rows]) for column in parts]
        return {
            name: mean and max(0.0, mean) for name, mean in zip((*PARTS, OTHER), means, strict=True)
        }

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
        parts = np.array(self._recent().parts, np.float64)[:, -len(seconds) :]
        wall = _mean(parts[:, np.isfinite(parts).all(axis=0)].sum(axis=0))
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
        steps = self.steps()
        return steps.at(slice(max(0, len(steps.step) - RECENT), None))


@dataclass(frozen=True)
class Steps:
    """Steps [N]: `parts` are means over workers; `own_seconds` are those of `workers`, by step.

    The last part is the rest of the time. A row may have the means of `count` steps from `step` on.
    """

    step: NDArray[Any]
    count: NDArray[Any]
    workers: NDArray[Any]
    parts: tuple[NDArray[Any], ...]
    quantiles: tuple[NDArray[Any], ...]
    own_seconds: NDArray[Any]

    def at(self, rows: slice) -> Steps:
        first, count = int(self.workers[: rows.start].sum()), int(self.workers[rows].sum())
        return self._take(rows, slice(first, first + count))

    def to_json(self, start: float | None, end: float | None, points: int) -> dict[str, Any]:
        """Return x, parts, workers and quantiles (of many workers) from step `start` to `end`.

        Values are those of `means`. A worker that took no part in a span has None.
        """
        steps = self._sorted().at(row_range(np.sort(self.step), start, end))
        if not len(steps.step):
            parts: dict[str, list[float]] = {name: [] for name in (*PARTS, OTHER)}
            return {"x": [], "parts": parts, "workers": [], "quantiles": []}
        means = steps.means(max(1, points))
        workers = means.own_seconds.reshape(len(means.step), int(means.workers[0]))
        columns = [to_list(np.maximum(part, 0.0)) for part in means.parts]
        return {
            "x": means.step.tolist(),
            "parts": dict(zip((*PARTS, OTHER), columns, strict=True)),
            "workers": [to_list(column) for column in workers.T],
            "quantiles": [
                to_list(column) for column in means.quantiles if np.isfinite(column).any()
            ],
        }

    def means(self, spans: int) -> Steps:
        """Return the means of at most `spans` equal spans of steps, each with its first step.

        All spans have the same number of workers: the seconds of missing ones are NaN.
        """
        steps = self._sorted()
        starts, stops = np.array(equal_spans(steps.step, spans)).T
        span, count = np.repeat(np.arange(len(starts)), stops - starts), len(starts)
        most = int(steps.workers.max())
        ends = np.cumsum(steps.workers, dtype=np.int64)
        ranks = np.arange(len(steps.own_seconds)) - np.repeat(ends - steps.workers, steps.workers)
        cells = np.repeat(span * most, steps.workers) + ranks
        weights = np.repeat(steps.count, steps.workers)
        return Steps(
            steps.step[starts],
            np.add.reduceat(steps.count, starts),
            np.full(count, most),
            tuple(_means(span, part, count, steps.count) for part in steps.parts),
            tuple(_means(span, each, count, steps.count) for each in steps.quantiles),
            _means(cells, steps.own_seconds, count * most, weights),
        )

    def _sorted(self) -> Steps:
        if not (self.step[1:] < self.step[:-1]).any():
            return self
        order = np.argsort(self.step, kind="stable")  # no run wrote this record
        ranks = np.repeat(np.argsort(order, kind="stable"), self.workers)
        return self._take(order, np.argsort(ranks, kind="stable"))

    def _take(self, rows: Any, worker_rows: Any) -> Steps:
        step, count, workers = (part[rows] for part in (self.step, self.count, self.workers))
        parts, quantiles = (
            tuple(part[rows] for part in columns) for columns in (self.parts, self.quantiles)
        )
        return Steps(step, count, workers, parts, quantiles, self.own_seconds[worker_rows])


def seconds_of(worker: Mapping[str, Any]) -> list[float]:
    """Return a worker's seconds of a step by part, and its own.

    Records of earlier versions have no own ones: there, they are those of all parts but `exchange`.
    """
    parts = [to_float(worker.get(part, 0.0)) for part in PARTS]
    own_seconds = to_float(worker[OWN]) if OWN in worker else sum(parts) - parts[EXCHANGE]
    return [*parts, own_seconds]


def worker_rows(
    start: Mapping[str, Any], timings: Timings, *, is_strided: bool
) -> list[dict[str, Any]]:
    """Return the rank, host, devices, lanes and timings of each worker of a start event.

    The lanes are first, end and stride. They are strided if the run has a sharded model.
    """
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
            "lanes": lanes_of(rank, len(workers), lanes, is_strided=is_strided),
            **timed.get(rank, unknown),
        }
        for rank, worker in enumerate(workers)
    ]


def started_workers(start: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of each worker in a start event."""
    workers = start.get("workers")
    workers = workers[:MOST_WORKERS] if isinstance(workers, list) else []
    return [worker if isinstance(worker, dict) else {} for worker in workers]


def lanes_of(rank: int, workers: int, lanes: int, *, is_strided: bool) -> tuple[int, int, int]:
    """Return first, end and stride of a worker's lanes, as `samestep.step.layout.Assignment`."""
    if is_strided:
        return rank, lanes, workers
    return rank * lanes // workers, (rank + 1) * lanes // workers, 1


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
