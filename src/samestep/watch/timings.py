"""Where the time of steps goes: seconds by part and by worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from samestep.record.record import PARTS
from samestep.watch.downsample import spans
from samestep.watch.numbers import to_json
from samestep.watch.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from samestep.record.source import StepPosition

EXCHANGE: Final = PARTS.index("exchange")
OTHER: Final = "other"
RECENT: Final = 100  # steps


class Timings:
    """Seconds of each step: 44 bytes a step, and 4 more a worker.

    A worker's own seconds are those of its parts without `exchange`, in which it waits for the
    slowest: with it, all would take the same.
    """

    def __init__(self) -> None:
        # step, time, attempt, workers, parts
        self._steps = Table(np.float64, np.float64, np.int32, np.int32, *[np.float32] * len(PARTS))
        self._own = Table(np.float32)  # of each step's workers, in rank order
        # of the attempt: seconds by worker and part
        self._newest: deque[Sequence[Sequence[float]]] = deque(maxlen=RECENT)

    def append(
        self, step: float, time: float, attempt: int, workers: Sequence[Sequence[float]]
    ) -> None:
        """Add a step of at least one worker, which took seconds by part."""
        self._steps.append(
            (
                step,
                time,
                attempt,
                len(workers),
                *[sum(part) / len(workers) for part in zip(*workers, strict=True)],
            )
        )
        for parts in workers:
            self._own.append((sum(parts) - parts[EXCHANGE],))
        self._newest.append(workers)

    def strike(self, last: StepPosition) -> None:
        """Strike out all steps after a place: a new attempt begins there."""
        step, _, _, workers, *_ = self._steps.columns()
        stay = step < last[0]
        self._own.keep(np.repeat(stay, workers))
        self._steps.keep(stay)
        self._newest.clear()

    def steps(self) -> Steps:
        """Return all steps."""
        step, time, attempt, workers, *parts = self._steps.columns()
        return Steps(step, time, attempt, workers, tuple(parts), self._own.columns()[0])

    def parts(self) -> dict[str, float | None]:
        """Return the mean seconds a step by part, over workers and the newest steps."""
        return {name: _mean(column[-RECENT:]) for name, column in self._recent().by_part().items()}

    def workers(self) -> list[dict[str, Any]]:
        """Return of each worker, in rank order, the median of its own seconds and the mean by part, over the attempt's newest steps."""
        if not self._newest:
            return []
        count = len(self._newest[-1])
        # [steps, workers, parts]
        seconds = np.asarray([step for step in self._newest if len(step) == count])
        own = seconds.sum(axis=2) - seconds[:, :, EXCHANGE]
        means = seconds.mean(axis=0)
        wall = _mean(self._recent().wall()[-len(seconds) :])
        rests = [
            None if wall is None else max(0.0, wall - total) for total in means.sum(axis=1).tolist()
        ]
        return [
            {
                "seconds": _finite(median),
                "parts": {**dict(zip(PARTS, map(_finite, parts), strict=True)), OTHER: rest},
            }
            for median, parts, rest in zip(
                np.median(own, axis=0).tolist(), means.tolist(), rests, strict=True
            )
        ]

    def _recent(self) -> Steps:
        """Return the newest steps and one before, which tells when the first of them began."""
        steps = self.steps()
        return steps.at(slice(max(0, len(steps.step) - RECENT - 1), len(steps.step)))


@dataclass(frozen=True)
class Steps:
    """Some steps, [N] each: `parts` are means over a step's `workers`; `own` has all workers' own seconds, step by step."""

    step: NDArray[Any]
    time: NDArray[Any]
    attempt: NDArray[Any]
    workers: NDArray[Any]
    parts: tuple[NDArray[Any], ...]
    own: NDArray[Any]

    def at(self, rows: slice) -> Steps:
        """Return steps that follow each other."""
        first, count = int(self.workers[: rows.start].sum()), int(self.workers[rows].sum())
        parts = tuple(part[rows] for part in self.parts)
        return Steps(
            self.step[rows],
            self.time[rows],
            self.attempt[rows],
            self.workers[rows],
            parts,
            self.own[first : first + count],
        )

    def answer(self, start: float | None, end: float | None, points: int) -> dict[str, Any]:
        """Return x, parts and workers, from step `start` to `end`: means over at most `points` equal spans of steps.

        Each x is the first step of its span. A worker that was not there has null.
        """
        if (self.step[1:] < self.step[:-1]).any():  # a record that no run wrote
            return self._in_order().answer(start, end, points)
        first = 0 if start is None else int(np.searchsorted(self.step, start, side="left"))
        stop = len(self.step) if end is None else int(np.searchsorted(self.step, end, side="right"))
        if stop <= first:
            return {"x": [], "parts": {name: [] for name in (*PARTS, OTHER)}, "workers": []}
        asked = self.at(slice(first, stop))
        bounds = spans(asked.step, max(1, points))
        # of each step
        span = np.repeat(np.arange(len(bounds)), [stop - start for start, stop in bounds])
        return {
            "x": [float(asked.step[start]) for start, _ in bounds],
            "parts": {
                name: to_json(_means(span, column, len(bounds)))
                for name, column in asked.by_part().items()
            },
            "workers": asked.by_worker(span, len(bounds)),
        }

    def by_part(self) -> dict[str, NDArray[Any]]:
        """Return each step's mean seconds by part, and the rest of its wall time, NaN where nobody knows it."""
        rest = np.maximum(self.wall() - sum(part.astype(np.float64) for part in self.parts), 0)
        return {**dict(zip(PARTS, self.parts, strict=True)), OTHER: rest}

    def wall(self) -> NDArray[Any]:
        """Return the seconds between each step's timing and the one before, NaN where nobody knows; it comes with the next exchange."""
        follows = (np.diff(self.step) == 1) & (np.diff(self.attempt) == 0)
        wall = np.full(len(self.step), np.nan)
        wall[1:] = np.where(follows, np.diff(self.time), np.nan)
        return wall

    def by_worker(self, span: NDArray[np.intp], count: int) -> list[list[float | None]]:
        """Return the mean own seconds of each worker in each of `count` spans."""
        most = int(self.workers.max())
        cells = np.repeat(span * most, self.workers) + self._ranks()
        return [
            to_json(column)
            for column in _means(cells, self.own, count * most).reshape(count, most).T
        ]

    def _ranks(self) -> NDArray[Any]:
        """Return whose each of the own seconds is."""
        ends = np.cumsum(self.workers, dtype=np.int64)
        ranks: NDArray[Any] = np.arange(len(self.own)) - np.repeat(
            ends - self.workers, self.workers
        )
        return ranks

    def _in_order(self) -> Steps:
        order = np.argsort(self.step, kind="stable")
        own = np.argsort(np.repeat(np.argsort(order, kind="stable"), self.workers), kind="stable")
        parts = tuple(part[order] for part in self.parts)
        return Steps(
            self.step[order],
            self.time[order],
            self.attempt[order],
            self.workers[order],
            parts,
            self.own[own],
        )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _mean(values: NDArray[Any]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean(dtype=np.float64)) if len(known) else None


def _means(groups: NDArray[Any], values: NDArray[Any], count: int) -> NDArray[np.float64]:
    """Return the mean of the finite values of each of `count` groups; NaN where there are none."""
    known = np.isfinite(values)
    if not known.all():
        groups, values = groups[known], values[known]
    counts = np.bincount(groups, minlength=count)
    return np.where(
        counts > 0,
        np.bincount(groups, weights=values, minlength=count) / np.maximum(counts, 1),
        np.nan,
    )
