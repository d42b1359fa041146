"""The time of a step: measured in trial runs of a script, and forecast for more workers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Final

from samestep.errors import LaunchError, RecordError
from samestep.host import counted
from samestep.record.record import PARTS as RECORDED_PARTS
from samestep.tools import first_failure, read_run, started

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


@dataclass(frozen=True)
class Workload:
    """The properties of a script that are the same in all runs.

    The global `batch_size` is None for streams. `threads` are per worker. `is_sharded` says whether
    an optimizer is sharded (`run.shard`).
    """

    lanes: int
    batch_size: int | None
    device: str
    threads: int
    is_sharded: bool = False


class TrialRunner:
    """Runs a script in new directories; `workload` is that of the newest run.

    The first run sets the lanes of all if `lanes` is None.
    """

    workload: Workload

    def __init__(self, command: Sequence[str], steps: int, lanes: int | None) -> None:
        self._command, self._steps, self._lanes = list(command), steps, lanes

    def run(self, workers: int) -> StepTiming:
        """Run the script.

        Raises `LaunchError` if the script fails, and `RecordError` if its record is incomplete.
        """
        flags = ["--resume=never", f"--stop-after={self._steps}"]
        flags += [] if self._lanes is None else [f"--lanes={self._lanes}"]
        size = counted(workers, "worker")
        sys.stderr.write(f"running {size} …\n")
        with TemporaryDirectory(prefix="samestep-scale-") as name:
            directory = Path(name)
            with started(self._command, workers, directory, flags) as process:
                status = process.wait()
            if status:
                failure = first_failure(directory)
                raise LaunchError(f"the script failed with {size}, status {status}:\n{failure}")
            events = read_run(directory)
        self.workload = read_workload(events)
        lanes, self._lanes = self.workload.lanes, self._lanes or self.workload.lanes
        if lanes != self._lanes:
            counts = f"{self._lanes} and {lanes}; set it in the script or with --lanes"
            raise LaunchError(f"all runs must have the same number of lanes, got {counts}")
        return read_timing(events)


def read_workload(events: Sequence[Mapping[str, Any]]) -> Workload:
    """Return the workload of a run from its events."""
    start = next(event for event in events if event["event"] in {"started", "resumed"})
    loops = [event for event in events if event["event"] == "loop" and event.get("batch_size")]
    return Workload(
        start["lanes"],
        loops[-1]["batch_size"] if loops else None,
        str(start["devices"][0]).partition(":")[0],
        start["config"]["threads"],
        any(event["event"] == "sharded" for event in events),
    )


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
