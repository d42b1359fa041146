"""All that `samestep scale` finds out about a job, put together from what was measured. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from samestep.tools.scale import advice
from samestep.tools.scale.model import NOTHING, costs_of, predict, serial_fraction, share_of_latency
from samestep.tools.scale.ranges import Range
from samestep.tools.scale.timing import PARTS
from samestep.tools.scale.traffic import traffic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samestep.tools.scale.model import Costs, Network, Prediction
    from samestep.tools.scale.timing import Timing
    from samestep.tools.scale.trials import Job

EXPECTED_AT: Final = (8, 64, 1024)  # workers


@dataclass(frozen=True)
class Setting:
    """What is given beside the measurements: `room` is how many workers this machine has a core or a GPU for.

    `load` is how many processes ran here before. `available` is the memory in bytes that workers
    may share. The batch size and learning rate now are None where nobody told.
    """

    room: int
    load: float
    available: int
    learning_rate: float | None = None
    batch_size_now: int | None = None


@dataclass(frozen=True)
class Study:
    """Measurements of a job at several numbers of workers, and what follows from them."""

    job: Job
    timings: Mapping[int, Sequence[Timing]]
    network: Network
    network_is_given: bool
    memory: advice.Memory | None
    setting: Setting

    @property
    def fewest(self) -> int:
        """The fewest workers that were measured."""
        return min(self.timings)

    @property
    def most(self) -> int:
        """The most workers that were measured."""
        return max(self.timings)

    @property
    def crowded(self) -> list[int]:
        """The numbers of workers for which this machine has no core or GPU each."""
        return [workers for workers in self.timings if workers > self.setting.room]

    @cached_property
    def fair(self) -> dict[int, Sequence[Timing]]:
        """The timings that the model is made of: those of workers with a core or a GPU each, or of the fewest where there are none."""
        return {n: some for n, some in self.timings.items() if n <= self.setting.room} or {
            self.fewest: self.timings[self.fewest]
        }

    @cached_property
    def costs(self) -> Costs:
        """What the model takes for granted."""
        return costs_of(self.fair, self.job.lanes, self.job.nbytes, sharded=bool(self.job.sharded))

    def part(self, workers: int, name: str) -> Range:
        """Return what one part of a measured step took."""
        return Range.of(timing.parts[name] for timing in self.timings[workers])

    def step(self, workers: int) -> Range:
        """Return what a measured step took."""
        return Range.of(timing.step for timing in self.timings[workers])

    def waiting(self, workers: int) -> Range:
        """Return how much of a measured exchange was waiting for slower workers."""
        return Range.of(timing.waiting for timing in self.timings[workers])

    def speed_up(self, workers: int) -> Range:
        """Return how many times as fast the most workers are as one; where one was not measured, the fewest count as if they were ideal."""
        if workers == self.fewest:
            return Range.exactly(self.fewest)
        return self.step(self.fewest).over(self.step(workers)).times(self.fewest)

    def serial(self) -> float | None:
        """Return the share of a step that workers did not shorten; None where only one number of workers was measured."""
        if self.most == self.fewest:
            return None
        return serial_fraction(
            self.speed_up(self.most).middle / self.fewest, self.most / self.fewest
        )

    def limit(self) -> advice.Limit | None:
        """Return what keeps the most workers from the ideal."""
        alone, together = (
            {name: self.part(n, name).middle for name in PARTS} for n in (self.fewest, self.most)
        )
        times = self.most / self.fewest
        return advice.limit_of(
            alone, together, self.waiting(self.most).middle, times, sharded=bool(self.job.sharded)
        )

    def check(self) -> tuple[int, Range] | None:
        """Return what the model that knows only fewer workers expects of the most that had a core each; None where there are none fewer."""
        most = max(self.fair)
        fewer = {workers: some for workers, some in self.fair.items() if workers < most}
        if not fewer:
            return None
        costs = costs_of(fewer, self.job.lanes, self.job.nbytes, sharded=bool(self.job.sharded))
        expected = predict(costs, self.network, most)
        return None if expected is None else (most, expected.step)

    def same_batch(self, workers: int) -> Prediction | None:
        """Return what to expect with the same global batch (strong scaling); None of more workers than lanes."""
        return predict(self.costs, self.network, workers)

    def same_lane_batch(self, workers: int) -> Prediction:
        """Return what to expect with a lane a worker of the same batch each, a larger global batch (weak scaling, Gustafson 1988)."""
        prediction = predict(self.costs, self.network, workers, lanes=workers)
        assert prediction is not None  # noqa: S101  there are as many lanes as workers
        return prediction

    def expected_speed_up(self, prediction: Prediction) -> Range:
        """Return how many times as many samples a second that is as one worker with the same lanes does, whom the model tells of, too."""
        if prediction.workers == 1:
            return Range.exactly(1.0)
        alone = predict(self.costs, self.network, 1, prediction.lanes)
        assert alone is not None  # noqa: S101  nobody has fewer lanes than one worker
        return Range.exactly(alone.step.middle).over(prediction.step)

    def share_of_latency(self, workers: int) -> float:
        """Return which share of the exchange between hosts is messages and not bytes, with a lane a worker."""
        return share_of_latency(
            traffic(workers, self.network.workers_per_host, workers, self.job.nbytes), self.network
        )

    def lanes_to_choose(self, most_workers: int) -> int | None:
        """Return how many lanes to choose for so many workers; None where the batch size is unknown."""
        if self.job.batch_size is None:
            return None
        return advice.lanes_to_choose(
            self.job.batch_size,
            most_workers,
            self.costs.compute.middle * self.job.lanes,
            self._overhead,
        )

    def _overhead(self, lanes: int) -> float:
        prediction = predict(self.costs, self.network, lanes, lanes)
        parts = {} if prediction is None else prediction.parts
        return sum(
            (part for name, part in parts.items() if name not in {"data", "compute"}), NOTHING
        ).middle

    def largest_lane_batch(self, workers: int) -> int | None:
        """Return how many samples a lane may have where so many workers share the memory of this machine; None where nobody can tell."""
        return (
            None
            if self.memory is None
            else self.memory.largest_lane_batch(self.setting.available / workers)
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON."""
        check, limit = self.check(), self.limit()
        return {
            "job": asdict(self.job),
            "measured": {
                str(n): [asdict(timing) for timing in some] for n, some in self.timings.items()
            },
            "speed_up": {str(n): asdict(self.speed_up(n)) for n in self.timings},
            "serial_fraction": self.serial(),
            "limit": None if limit is None else asdict(limit),
            "network": {**asdict(self.network), "given": self.network_is_given},
            "costs": asdict(self.costs),
            "check": None
            if check is None
            else {
                "workers": check[0],
                "step": asdict(check[1]),
                "measured": asdict(self.step(check[0])),
            },
            "same_global_batch": [_plain(self.same_batch(n)) for n in EXPECTED_AT],
            "same_lane_batch": [_plain(self.same_lane_batch(n)) for n in EXPECTED_AT],
            "memory": None if self.memory is None else asdict(self.memory),
        }


def _plain(prediction: Prediction | None) -> dict[str, Any] | None:
    return None if prediction is None else {**asdict(prediction), "step": asdict(prediction.step)}
