"""The time of a step: measured in runs, and forecast for more workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final

from samestep.errors import RecordError
from samestep.record.record import PARTS as RECORDED_PARTS

PARTS: Final = (*RECORDED_PARTS, "other")
WARM_UP: Final = 3  # steps to skip: the first ones allocate memory and start loader processes
FEWEST: Final = 3  # steps to take a median of
FEWEST_RECORDED: Final = WARM_UP + FEWEST + 2  # includes the step before the first, and the last


@dataclass(frozen=True)
class Range:
    """A number with its `lowest`, `middle` and `highest` plausible value."""

    lowest: float
    middle: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        """Return the minimum, median and maximum of at least one number."""
        ordered = sorted(values)
        return cls(ordered[0], median(ordered), ordered[-1])


@dataclass(frozen=True)
class StepTiming:
    """Medians over the steps of a run, in seconds.

    A `step` consists of `parts`, which are means over workers. `waiting` is the share of the
    exchange in which workers wait for slower ones.
    """

    step: float
    parts: Mapping[str, float]
    waiting: float


def read_timing(events: Iterable[Mapping[str, Any]]) -> StepTiming:
    """Return the timing of a run's steps after the warm-up, from its `timing` events.

    A step lasts from one event to the next; "other" is the time outside of its parts. The last
    worker to reach the exchange does not wait, so the shortest exchange of a step is the exchange
    itself, and the rest is waiting. Raises `RecordError` if there are too few steps.
    """
    steps = [event for event in events if event.get("event") == "timing"]
    seconds = [after["time"] - before["time"] for before, after in pairwise(steps)]
    # the event of the last step also includes the end of the run
    seconds, used = seconds[WARM_UP:-1], steps[WARM_UP + 1 : -1]
    if len(used) < FEWEST:
        raise RecordError(
            f"expected the timing of at least {FEWEST_RECORDED} steps (with {WARM_UP} of warm-up), "
            f"got {len(steps)}; increase --steps or use more data"
        )
    parts = {
        name: median(_mean_and_least(step, name)[0] for step in used) for name in RECORDED_PARTS
    }
    exchanges = [_mean_and_least(step, "exchange") for step in used]
    duration = median(seconds)
    parts["other"] = max(0.0, duration - sum(parts.values()))
    waiting = median(mean - least for mean, least in exchanges)
    return StepTiming(duration, parts, waiting)


def _mean_and_least(step: Mapping[str, Any], part: str) -> tuple[float, float]:
    """Return the mean and the least of all workers' seconds in a part of a step."""
    if "workers" not in step:  # of many workers, the record has quantiles
        return step["mean"][part], step["quantiles"][part][0]
    seconds = [worker.get(part, 0.0) for worker in step["workers"]]
    return fmean(seconds), min(seconds)


def max_lanes_per_worker(lanes: int, workers: int) -> int:
    """Return the lanes of the worker that has the most."""
    return -(-lanes // workers)


@dataclass(frozen=True)
class Forecast:
    """A step with `lanes` takes `per_lane` seconds for each lane of a worker, and `constant`.

    This is the law of Amdahl (1967) for work in whole lanes. Each of the `costs` has `per_lane` and
    `constant` from one run, so that results are ranges.
    """

    lanes: int
    costs: Sequence[tuple[float, float]]

    @property
    def per_lane(self) -> Range:
        """The seconds that a lane of the worker with the most lanes adds to a step."""
        return Range.of(per_lane for per_lane, _ in self.costs)

    @property
    def constant(self) -> Range:
        """The seconds of a step that do not depend on the number of workers."""
        return Range.of(constant for _, constant in self.costs)

    def step(self, workers: int) -> Range:
        """Return the seconds of a step."""
        share = max_lanes_per_worker(self.lanes, workers)
        return Range.of(per_lane * share + constant for per_lane, constant in self.costs)


def fit_forecast(timings: Mapping[int, Sequence[StepTiming]], lanes: int) -> Forecast | None:
    """Return the forecast from the runs with the most workers.

    Only loading and computing shrink with the lanes of a worker. Returns None after runs of one
    worker, which exchange nothing.
    """
    workers = max(timings)
    if workers == 1:
        return None
    share, costs = max_lanes_per_worker(lanes, workers), []
    for timing in timings[workers]:
        of_lanes = timing.parts["data"] + timing.parts["compute"]
        costs.append((of_lanes / share, max(0.0, timing.step - of_lanes)))
    return Forecast(lanes, costs)
