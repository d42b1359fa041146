"""What a step costs at any number of workers, from what it was measured to cost at a few. Pure.

The parts of a step are added up: loading and computing the lanes that a worker carries, the
optimizer's update, what stays the same, and the exchange. For that messages cost as in Thakur,
Rabenseifner and Gropp (2005), "Optimization of collective communication operations in MPICH":
latency · messages + bytes / bandwidth, a worker sending one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from samestep.tools.scale.ranges import Range
from samestep.tools.scale.timing import PARTS
from samestep.tools.scale.traffic import traffic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samestep.tools.scale.timing import Timing
    from samestep.tools.scale.traffic import Traffic

NOTHING: Final = Range.exactly(0.0)
MEASURED_WORKERS: Final = 2  # that use the memory while its bandwidth is measured


@dataclass(frozen=True)
class Link:
    """A message takes `latency` seconds, and its bytes go at `bandwidth` bytes a second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """The link of a worker to the `memory` of its host, that of a host `between` hosts, and how many workers a host has."""

    memory: Link
    between: Link
    workers_per_host: int


@dataclass(frozen=True)
class Costs:
    """What a job was measured to cost, in seconds a step; `data` and `compute` are a lane's, `waiting` is for slower workers.

    Parameters have `nbytes`. Of a `sharded` optimizer each worker updates a part.
    """

    lanes: int
    nbytes: int
    sharded: bool
    data: Range
    compute: Range
    optimizer: Range
    constant: Range
    waiting: Range


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to cost at `workers` workers and `lanes` lanes, in seconds, part by part."""

    workers: int
    lanes: int
    parts: Mapping[str, Range]

    @cached_property
    def step(self) -> Range:
        """The whole step."""
        return sum(self.parts.values(), NOTHING)

    @property
    def largest_part(self) -> str:
        """The name of the part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name].middle)


def costs_of(
    timings: Mapping[int, Sequence[Timing]], lanes: int, nbytes: int, *, sharded: bool
) -> Costs:
    """Return the costs that explain the timings measured at each number of workers, of which there must be one.

    A lane's loading and computing lies between the lowest and the highest that it took anywhere,
    with the middle of the most workers, since those share memory as more would. The optimizer and
    what stays the same are those of the fewest workers.
    """
    fewest, most = min(timings), max(timings)

    def of_a_lane(part: str) -> Range:
        everywhere = {
            n: [timing.parts[part] / carried_at_most(lanes, n) for timing in some]
            for n, some in timings.items()
        }
        whole = Range.of(value for some in everywhere.values() for value in some)
        return Range(whole.lowest, Range.of(everywhere[most]).middle, whole.highest)

    def at_fewest(*parts: str) -> Range:
        return Range.of(sum(timing.parts[part] for part in parts) for timing in timings[fewest])

    waiting = Range.of(timing.waiting for timing in timings[most])
    return Costs(
        lanes,
        nbytes,
        sharded,
        data=of_a_lane("data"),
        compute=of_a_lane("compute"),
        optimizer=at_fewest("optimizer").times(fewest if sharded else 1),
        constant=at_fewest("snapshot", "other"),
        waiting=Range(0.0, waiting.middle, waiting.highest),
    )


def predict(
    costs: Costs, network: Network, workers: int, lanes: int | None = None
) -> Prediction | None:
    """Return what a step is expected to cost with the job's lanes, or with others of the same batch a lane; None with too few lanes."""
    lanes = costs.lanes if lanes is None else lanes
    if workers > lanes:
        return None
    carried = carried_at_most(lanes, workers)
    compute = costs.compute.times(carried)
    overlap = compute.middle if lanes == workers > 1 and network.workers_per_host == 1 else 0.0
    sent = traffic(workers, network.workers_per_host, lanes, costs.nbytes)
    exchange = exchange_seconds(sent, network, min(workers, network.workers_per_host), overlap)
    parts = {
        "data": costs.data.times(carried),
        "compute": compute,
        "exchange": exchange + costs.waiting if workers > 1 else NOTHING,
        "optimizer": costs.optimizer.times(1 / workers if costs.sharded else 1),
        "other": costs.constant,
    }
    return Prediction(workers, lanes, {name: parts[name] for name in PARTS if name in parts})


def exchange_seconds(sent: Traffic, network: Network, on_host: int, overlap: float = 0.0) -> Range:
    """Return how long an exchange takes that may be hidden behind `overlap` seconds of computing.

    In the middle stands latency · messages + bytes / bandwidth. It is less where messages that
    leave together share one latency, and where what is exchanged during backward costs no time;
    more where the workers of a host get no more of its memory than two of them did.
    """
    memory, between = network.memory, network.between
    latency, sending = between.latency, sent.sent_bytes / between.bandwidth
    passing = latency * sent.rounds + sent.passed_bytes / between.bandwidth
    meeting, moving = memory.latency * sent.meetings, sent.moved_bytes / memory.bandwidth
    fixed = passing + meeting
    crowd = max(1.0, on_host / MEASURED_WORKERS)
    return Range(
        fixed + moving + max(0.0, latency * sent.batches + sending - overlap),
        fixed + moving + latency * sent.messages + sending,
        fixed + moving * crowd + latency * sent.messages + sending,
    )


def share_of_latency(sent: Traffic, network: Network) -> float:
    """Return which share of the time between hosts passes with messages and not with their bytes; 0 where there are none."""
    waiting = network.between.latency * (sent.rounds + sent.messages)
    sending = (sent.sent_bytes + sent.passed_bytes) / network.between.bandwidth
    return waiting / (waiting + sending) if waiting else 0.0


def carried_at_most(lanes: int, workers: int) -> int:
    """Return how many lanes the worker with most of them carries."""
    return -(-lanes // workers)


def serial_fraction(speed_up: float, workers: float) -> float:
    """Return the share of a step that more workers did not shorten (Karp and Flatt 1990), of more than one worker.

    By Amdahl (1967) no number of workers is faster than its inverse, if the share stays.
    """
    return max(0.0, (1 / speed_up - 1 / workers) / (1 - 1 / workers))
