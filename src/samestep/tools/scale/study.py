"""The results of `samestep scale`: a bottleneck, predictions and advice, computed from trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from samestep.tools.scale.model import (
    PARTS,
    ZERO,
    Costs,
    Prediction,
    Range,
    StepTiming,
    fit_costs,
    predict,
    serial_fraction,
)
from samestep.tools.scale.network import Network, count_traffic
from samestep.tools.scale.trials import MemoryModel, Workload

Parts = Mapping[str, float]  # seconds by the name of a part of a step

PREDICTED_WORKERS: Final = (8, 64, 1024)
GOOD_ENOUGH: Final = 0.95  # of the ideal speedup
WARM_UP_EPOCHS: Final = 5  # from Goyal et al. 2017
REMEDIES: Final = {
    "data": "load ahead with loader_workers=2 or more, return complete lane batches from "
    "__getitems__, or store decoded samples",
    "compute": "use a larger batch per lane, which keeps a device busier; if workers share cores "
    "or memory, run fewer per machine",
    "exchange": "use a larger lane batch or more lanes per worker, fewer bytes (a smaller or "
    "partly frozen model), or a faster link",
    "waiting": "use a worker count that divides the lanes, samples of similar cost in all lanes "
    "(group_by), and an idle machine",
    "optimizer": "use run.shard(optimizer), and fused=True if the optimizer supports it",
    "sharded optimizer": "use fused=True if the optimizer supports it; the rest is the gather of "
    "parameters, which has the same remedies as the exchange",
    "snapshot": "increase snapshot_every, and set hot_every=none if killed workers need not be "
    "replaced quickly",
    "other": "do less in the loop outside of the step: evaluate, log, clip and print less often, "
    "and read no tensor unnecessarily",
}


@dataclass(frozen=True)
class Bottleneck:
    """The `part` farthest from ideal scaling, its excess in seconds per step, and a remedy."""

    part: str
    seconds: float
    remedy: str


def find_bottleneck(
    before: Parts, after: Parts, waiting: float, factor: float, *, sharded: bool
) -> Bottleneck | None:
    """Return the part that most exceeds its ideal share of a step.

    `before` and `after` are the seconds of each part at the fewest workers and at `factor` times as
    many; `waiting` is a share of the exchange after. Returns None within 5 % of the ideal speedup.
    """
    if sum(before.values()) / factor >= GOOD_ENOUGH * sum(after.values()):
        return None
    excess = {name: after[name] - before[name] / factor for name in PARTS}
    excess["exchange"] -= waiting
    excess["waiting"] = waiting
    part = max(excess, key=lambda name: excess[name])
    remedy = "sharded optimizer" if part == "optimizer" and sharded else part
    return Bottleneck(part, excess[part], REMEDIES[remedy])


def recommend_lanes(
    batch_size: int, most_workers: int, compute: float, overhead: Callable[[int], float]
) -> int:
    """Return the most lanes, a power of two, for which computing takes longer than the overhead.

    Each lane has its own worker and an equal share of `compute`, the seconds for the complete
    batch; `overhead(lanes)` is the rest of a step. The result is at most the batch size, and at
    most `most_workers` rounded up to a power of two.
    """
    most = min(batch_size, 2 ** max(0, most_workers - 1).bit_length())
    powers = [2**exponent for exponent in range(most.bit_length())]
    return max((lanes for lanes in powers if compute / lanes >= overhead(lanes)), default=1)


@dataclass(frozen=True)
class LearningRate:
    """A peak learning rate, the rate that its warm-up starts from, and Adam's betas."""

    rate: float
    warm_up_from: float
    betas: tuple[float, float] | None = None


def learning_rates(
    rate: float, batch_size_now: int, batch_size_new: int, betas: tuple[float, float] = (0.9, 0.999)
) -> tuple[LearningRate, LearningRate]:
    """Return the learning rates that the linear and the square root rule give for a new batch size.

    Linear, for SGD: Goyal et al. (2017), "Accurate, Large Minibatch SGD", valid up to 8,192 images
    of ImageNet, after a warm-up of 5 epochs from the old rate. Square root: Krizhevsky (2014), "One
    weird trick for parallelizing convolutional neural networks", from the variance of the gradient;
    for Adam, Malladi et al. (2022), "On the SDEs and scaling rules for adaptive gradient
    algorithms", in which 1 - beta is proportional to the batch size: the betas are None if one
    would not be positive, and then the rule does not apply.
    """
    factor = batch_size_new / batch_size_now
    linear, root = rate * factor, rate * math.sqrt(factor)
    scaled = (1 - factor * (1 - betas[0]), 1 - factor * (1 - betas[1]))
    return (
        LearningRate(linear, min(rate, linear)),
        LearningRate(root, min(rate, root), scaled if min(scaled) > 0 else None),
    )


@dataclass(frozen=True)
class Machine:
    """A machine with a core or GPU for each of `capacity` workers.

    `load` is the number of running processes before the trials, and `available_bytes` the memory
    that workers may share.
    """

    capacity: int
    load: float
    available_bytes: int


@dataclass(frozen=True)
class Study:
    """The timings of a workload at several worker counts, and the results that follow from them.

    `part`, `step` and `waiting` are measured seconds. `learning_rate` and `batch_size_now` are None
    if not given.
    """

    workload: Workload
    timings: Mapping[int, Sequence[StepTiming]]
    network: Network
    network_is_given: bool
    memory: MemoryModel | None
    machine: Machine
    learning_rate: float | None = None
    batch_size_now: int | None = None

    @property
    def fewest(self) -> int:
        return min(self.timings)

    @property
    def most(self) -> int:
        return max(self.timings)

    @cached_property
    def modeled(self) -> dict[int, Sequence[StepTiming]]:
        """The timings to fit the model to: within the capacity, or else those of the fewest."""
        within = {n: runs for n, runs in self.timings.items() if n <= self.machine.capacity}
        return within or {self.fewest: self.timings[self.fewest]}

    @cached_property
    def costs(self) -> Costs:
        """The costs in the model."""
        return self._fit(self.modeled)

    def _fit(self, timings: Mapping[int, Sequence[StepTiming]]) -> Costs:
        workload = self.workload
        return fit_costs(
            timings,
            workload.lanes,
            workload.nbytes,
            sharded=bool(workload.sharded),
            gradient_bytes=workload.gradient_bytes,
        )

    def part(self, workers: int, name: str) -> Range:
        return Range.of(timing.parts[name] for timing in self.timings[workers])

    def step(self, workers: int) -> Range:
        return Range.of(timing.step for timing in self.timings[workers])

    def waiting(self, workers: int) -> Range:
        return Range.of(timing.waiting for timing in self.timings[workers])

    def speedup(self, workers: int) -> Range:
        """Return the measured speedup over one worker, or over the fewest as if they were ideal."""
        if workers == self.fewest:
            return Range.exactly(self.fewest)
        return self.step(self.fewest).over(self.step(workers)).times(self.fewest)

    def serial_fraction(self) -> float | None:
        """Return the share of a step that did not get faster, None with one worker count."""
        if self.most == self.fewest:
            return None
        speedup = self.speedup(self.most).middle / self.fewest
        return serial_fraction(speedup, self.most / self.fewest)

    def bottleneck(self) -> Bottleneck | None:
        """Return what limits the most workers."""
        ends = (self.fewest, self.most)
        before, after = ({name: self.part(n, name).middle for name in PARTS} for n in ends)
        waiting, sharded = self.waiting(self.most).middle, bool(self.workload.sharded)
        return find_bottleneck(before, after, waiting, self.most / self.fewest, sharded=sharded)

    def check(self) -> tuple[int, Range] | None:
        """Return the most modeled workers, and their step as predicted from fewer, else None."""
        most = max(self.modeled)
        fewer = {workers: runs for workers, runs in self.modeled.items() if workers < most}
        prediction = predict(self._fit(fewer), self.network, most) if fewer else None
        return (most, prediction.step) if prediction else None

    def same_batch(self, workers: int) -> Prediction | None:
        """Predict a step with the same global batch (strong scaling); None beyond the lanes."""
        return predict(self.costs, self.network, workers)

    def same_lane_batch(self, workers: int) -> Prediction:
        """Predict a step with one lane per worker (weak scaling, Gustafson 1988)."""
        prediction = predict(self.costs, self.network, workers, lanes=workers)
        assert prediction is not None  # noqa: S101  there are as many lanes as workers
        return prediction

    def predicted_speedup(self, prediction: Prediction) -> Range:
        """Return the speedup over the prediction for one worker with the same lanes."""
        if prediction.workers == 1:
            return Range.exactly(1.0)
        alone = predict(self.costs, self.network, 1, prediction.lanes)
        assert alone is not None  # noqa: S101  there is at least one lane
        return Range.exactly(alone.step.middle).over(prediction.step)

    def latency_share(self, workers: int) -> float:
        """Return the share of latency in the exchange between hosts with one lane per worker."""
        per_host = self.network.workers_per_host
        traffic = count_traffic(
            workers, per_host, workers, self.workload.nbytes, self.workload.gradient_bytes
        )
        return self.network.latency_share(traffic)

    def recommended_lanes(self, most_workers: int) -> int | None:
        """Return the lanes to use with up to `most_workers`, None for an unknown batch size."""
        if self.workload.batch_size is None:
            return None
        compute = self.costs.compute.middle * self.workload.lanes
        return recommend_lanes(self.workload.batch_size, most_workers, compute, self._overhead)

    def _overhead(self, lanes: int) -> float:
        parts = self.same_lane_batch(lanes).parts
        return sum((parts[name] for name in parts if name not in {"data", "compute"}), ZERO).middle

    def largest_lane_batch(self, workers: int) -> int | None:
        """Return the samples per lane that fit this machine's memory; None if unknown."""
        share = self.machine.available_bytes / workers
        return None if self.memory is None else self.memory.largest_lane_batch(share)

    def to_json(self) -> dict[str, Any]:
        """Return all measurements and results as JSON values."""
        bottleneck, checked = self.bottleneck(), None
        if check := self.check():
            measured = self.step(check[0])
            checked = {"workers": check[0], "step": asdict(check[1]), "measured": asdict(measured)}
        return {
            "job": asdict(self.workload),
            "measured": {
                str(n): [asdict(timing) for timing in runs] for n, runs in self.timings.items()
            },
            "speedup": {str(n): asdict(self.speedup(n)) for n in self.timings},
            "serial_fraction": self.serial_fraction(),
            "limit": bottleneck and asdict(bottleneck),
            "network": {**asdict(self.network), "given": self.network_is_given},
            "costs": asdict(self.costs),
            "check": checked,
            "same_global_batch": [_to_json(self.same_batch(n)) for n in PREDICTED_WORKERS],
            "same_lane_batch": [_to_json(self.same_lane_batch(n)) for n in PREDICTED_WORKERS],
            "memory": self.memory and asdict(self.memory),
        }


def _to_json(prediction: Prediction | None) -> dict[str, Any] | None:
    return {**asdict(prediction), "step": asdict(prediction.step)} if prediction else None
