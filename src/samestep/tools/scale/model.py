"""The time of a step: measured parts at a few worker counts, and predictions at any other.

A step is the sum of its parts: loading and computing the lanes of a worker, the optimizer's update,
a constant, and the exchange. Messages cost latency * messages + bytes / bandwidth, and a worker
sends one at a time, as in Thakur, Rabenseifner and Gropp (2005), "Optimization of collective
communication operations in MPICH".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final

from samestep.errors import RecordError
from samestep.record import PARTS as RECORDED_PARTS
from samestep.tools.scale.network import (
    ELEMENT_BYTES,
    MEASURED_WORKERS,
    Network,
    Traffic,
    count_traffic,
)

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
    def exactly(cls, value: float) -> Range:
        """Return the range of a known number."""
        return cls(value, value, value)

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        """Return the minimum, median and maximum of at least one measurement."""
        ordered = sorted(values)
        return cls(ordered[0], median(ordered), ordered[-1])

    def __add__(self, other: Range) -> Range:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Range(*(one + another for one, another in pairs))

    def times(self, factor: float) -> Range:
        """Return the range multiplied by a factor of at least 0."""
        return Range(*(value * factor for value in astuple(self)))

    def over(self, other: Range) -> Range:
        """Return the range divided by a range above 0."""
        pairs = zip(astuple(self), reversed(astuple(other)), strict=True)
        return Range(*(one / another for one, another in pairs))

    def __contains__(self, value: float) -> bool:
        return self.lowest <= value <= self.highest


ZERO: Final = Range.exactly(0.0)


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
class Costs:
    """Measured costs in seconds per step; `data` and `compute` are per lane.

    `waiting` is the wait for slower workers, `constant` does not depend on the worker count, and
    `nbytes` is the size of the parameters. Each worker updates a part of a `sharded` optimizer.
    Elements of exchanged gradients have `gradient_bytes`.
    """

    lanes: int
    nbytes: int
    sharded: bool
    data: Range
    compute: Range
    optimizer: Range
    constant: Range
    waiting: Range
    gradient_bytes: int = ELEMENT_BYTES


@dataclass(frozen=True)
class Prediction:
    """The expected seconds of each part of a step with `workers` and `lanes`."""

    workers: int
    lanes: int
    parts: Mapping[str, Range]

    @cached_property
    def step(self) -> Range:
        """The sum of all parts."""
        return sum(self.parts.values(), ZERO)

    @property
    def largest_part(self) -> str:
        """The name of the part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name].middle)


def fit_costs(
    timings: Mapping[int, Sequence[StepTiming]],
    lanes: int,
    nbytes: int,
    *,
    sharded: bool,
    gradient_bytes: int = ELEMENT_BYTES,
) -> Costs:
    """Return the costs that explain the timings measured at each worker count.

    The costs of a lane range over all measurements. Their middle is from the most workers, which
    share memory as even more would; the optimizer and the constant are from the fewest.
    """
    fewest, most = min(timings), max(timings)

    def of_lane(part: str) -> Range:
        costs = {
            workers: [timing.parts[part] / max_lanes_per_worker(lanes, workers) for timing in runs]
            for workers, runs in timings.items()
        }
        overall = Range.of(cost for runs in costs.values() for cost in runs)
        return Range(overall.lowest, median(costs[most]), overall.highest)

    def at_fewest(*parts: str) -> Range:
        return Range.of(sum(timing.parts[part] for part in parts) for timing in timings[fewest])

    waiting = Range.of(timing.waiting for timing in timings[most])
    return Costs(
        lanes,
        nbytes,
        sharded,
        data=of_lane("data"),
        compute=of_lane("compute"),
        optimizer=at_fewest("optimizer").times(fewest if sharded else 1),
        constant=at_fewest("snapshot", "other"),
        waiting=Range(0.0, waiting.middle, waiting.highest),
        gradient_bytes=gradient_bytes,
    )


def predict(
    costs: Costs, network: Network, workers: int, lanes: int | None = None
) -> Prediction | None:
    """Return the expected step with the measured lanes, or with `lanes` of the same lane batch.

    Returns None if there are more workers than lanes.
    """
    lanes = costs.lanes if lanes is None else lanes
    if workers > lanes:
        return None
    per_worker = max_lanes_per_worker(lanes, workers)
    compute = costs.compute.times(per_worker)
    on_hosts = workers > network.workers_per_host
    overlap = compute.middle / per_worker if on_hosts else 0.0  # of the last lane
    traffic = count_traffic(
        workers, network.workers_per_host, lanes, costs.nbytes, costs.gradient_bytes
    )
    exchange = exchange_seconds(traffic, network, min(workers, network.workers_per_host), overlap)
    parts = {
        "data": costs.data.times(per_worker),
        "compute": compute,
        "exchange": exchange + costs.waiting if workers > 1 else ZERO,
        "optimizer": costs.optimizer.times(1 / workers if costs.sharded else 1),
        "other": costs.constant,
    }
    return Prediction(workers, lanes, {name: parts[name] for name in PARTS if name in parts})


def exchange_seconds(
    traffic: Traffic, network: Network, on_host: int, overlap: float = 0.0
) -> Range:
    """Return the time of an exchange. `overlap` seconds of computing may hide a part of it.

    The middle is latency * messages + bytes / bandwidth. The lowest lets messages that leave
    together share one latency, and hides the exchange during backward. In the highest, the workers
    of a host share the memory bandwidth that was measured with two.
    """
    memory, between = network.memory, network.between
    sending = traffic.sent_bytes / between.bandwidth
    forwarding = between.latency * traffic.rounds + traffic.forwarded_bytes / between.bandwidth
    fixed = forwarding + memory.latency * traffic.host_messages
    moving = traffic.moved_bytes / memory.bandwidth
    contention = max(1.0, on_host / MEASURED_WORKERS)
    return Range(
        fixed + moving + max(0.0, between.latency * traffic.batches + sending - overlap),
        fixed + moving + between.latency * traffic.messages + sending,
        fixed + moving * contention + between.latency * traffic.messages + sending,
    )


def max_lanes_per_worker(lanes: int, workers: int) -> int:
    """Return the lanes of the worker that has the most."""
    return -(-lanes // workers)


def serial_fraction(speedup: float, workers: float) -> float:
    """Return the share of a step that did not get faster with more workers (Karp and Flatt 1990).

    If that share stays, no number of workers has a speedup above its inverse (Amdahl 1967).
    """
    return max(0.0, (1 / speedup - 1 / workers) / (1 - 1 / workers))
