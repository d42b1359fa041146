"""Means that are not over the samples of a lane, such as those over labels that are not ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from samestep.step.guards import check_divisors
from samestep.step.lane_pass import LanePass, StepPlugin


class DivisorCheck(StepPlugin):
    """Compares what the cross-entropies of all lanes were divided by with the lanes' samples."""

    def __init__(self) -> None:
        self._pass: LanePass | None = None

    def begin(self, lane_pass: LanePass) -> None:
        """Note the pass, which notes the divisors."""
        self._pass = lane_pass

    def report(self) -> Callable[[], list[Any]]:
        """Return what returns (lane, items, divisors) of this worker's lanes."""
        lane_pass, self._pass = self._pass, None
        return lambda: [] if lane_pass is None else lane_pass.divisors()

    def compare(self, reports: Sequence[Any]) -> None:
        """Raise `LossError` if means, weighted by samples, would not give the mean of all."""
        check_divisors([*chain.from_iterable(reports)])
