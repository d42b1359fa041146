"""A step: lanes and their tree, gradients and their exchange. Here: the means that it returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from samestep.errors import EvaluationError


@dataclass(frozen=True)
class Mean:
    """A float64 sum over a number of items."""

    total: float
    count: int

    @classmethod
    def of(cls, means: Sequence[tuple[float, int]]) -> Mean:
        """Merge (mean, count) pairs, in any order, because the sum is rounded once."""
        total = _exact_sum([mean * count for mean, count in means])
        return cls(total, sum(count for _, count in means))

    @property
    def value(self) -> float:
        """The mean. Raises `EvaluationError` if there are no items."""
        if self.count == 0:
            raise EvaluationError("a mean needs at least one item, got 0")
        return self.total / self.count


@dataclass(frozen=True)
class LaneResult:
    """The items of one lane (or block of an evaluation) and the mean, or sum, of each metric."""

    lane: int
    rank: int
    count: int
    metrics: dict[str, float]


class Means(Mapping[str, float]):
    """Means by name over all items of a global batch, `"loss"` first; a read-only mapping.

    They have the same bits at any number of workers. They are computed when read: each sum is exact
    and rounded once to float64.

    Example:
        >>> for batch in run.batches(train_set, 32, steps=1):
        ...     means = run.backward(loss_fn, model, batch)
        >>> means["loss"] > 0
        True
    """

    def __init__(
        self, results: Sequence[LaneResult], reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        self._results, self._sums = results, reduction == "sum"

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for result in self._results for name in result.metrics))

    def __getitem__(self, name: str) -> float:
        if name not in self._names:
            available = ", ".join(self._names) or "none, because no lane had items"
            raise KeyError(f"no metric {name!r}; available: {available}")
        return self._mean(name, self._results).value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Means({', '.join(f'{name}={self[name]:.6g}' for name in self)})"

    def by_worker(self, name: str) -> list[float]:
        """Return the mean over the items of each worker that had any, by rank.

        Example:
            >>> for batch in run.batches(train_set, 32, steps=1):
            ...     means = run.backward(loss_fn, model, batch)
            >>> len(means.by_worker("loss")) == run.world_size
            True
        """
        ranks = sorted({result.rank for result in self._results if name in result.metrics})
        return [
            self._mean(name, [result for result in self._results if result.rank == rank]).value
            for rank in ranks
        ]

    def _mean(self, name: str, results: Sequence[LaneResult]) -> Mean:
        pairs = [
            (result.metrics[name], result.count) for result in results if name in result.metrics
        ]
        if not self._sums:
            return Mean.of(pairs)
        # without items, the sum itself: an image without boxes also has a loss
        count = max(1, sum(count for _, count in pairs))
        return Mean(_exact_sum([value for value, _ in pairs]), count)


def _exact_sum(values: Sequence[float]) -> float:
    """Return the sum of values, rounded once."""
    infinite = [value for value in values if not math.isfinite(value)]
    if infinite:
        return sum(infinite)
    try:
        return math.fsum(values)
    except OverflowError:  # of an intermediate sum, and perhaps of the total
        return math.fsum(value * 2.0**-64 for value in values) * 2.0**64
