"""The results of `samestep scale`: speedups, a bottleneck and a forecast, computed from trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from typing import Any, Final

from samestep.tools.scale.timing import PARTS, Forecast, Range, StepTiming, Workload, fit_forecast

Parts = Mapping[str, float]  # seconds by the name of a part of a step

GOOD_ENOUGH: Final = 0.95  # of the ideal speedup
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
    "snapshot": "increase snapshot_every, and set hot_every=none if killed workers need not be "
    "replaced quickly",
    "evaluation": "evaluate less often, or with larger blocks (batch_size of run.evaluate)",
    "logging": "log scalars, images and histograms less often",
    "other": "do less in the loop outside of the step: plot, clip and print less often, and read "
    "no tensor unnecessarily",
}
OF_SHARDED: Final = (
    "use fused=True if the optimizer supports it; the rest is the gather of parameters, which has "
    "the same remedies as the exchange"
)


@dataclass(frozen=True)
class Bottleneck:
    """The `part` farthest from ideal scaling, its excess in seconds per step, and a remedy."""

    part: str
    seconds: float
    remedy: str


def find_bottleneck(
    before: Parts, after: Parts, waiting: float, factor: float, *, is_sharded: bool = False
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
    remedy = OF_SHARDED if is_sharded and part == "optimizer" else REMEDIES[part]
    return Bottleneck(part, excess[part], remedy)


@dataclass(frozen=True)
class Study:
    """The timings of a workload at several worker counts, and the results that follow from them.

    The machine has a core or GPU for each of `capacity` workers; `load` is the number of running
    processes before the trials. `part`, `step` and `waiting` are measured seconds.
    """

    workload: Workload
    timings: Mapping[int, Sequence[StepTiming]]
    capacity: int
    load: float

    @property
    def fewest_workers(self) -> int:
        return min(self.timings)

    @property
    def most_workers(self) -> int:
        return max(self.timings)

    @cached_property
    def within_capacity(self) -> dict[int, Sequence[StepTiming]]:
        """The timings of workers that do not share cores or GPUs, or else of the fewest workers."""
        within = {n: runs for n, runs in self.timings.items() if n <= self.capacity}
        return within or {self.fewest_workers: self.timings[self.fewest_workers]}

    def part(self, workers: int, name: str) -> Range:
        return Range.of(timing.parts[name] for timing in self.timings[workers])

    def step(self, workers: int) -> Range:
        return Range.of(timing.step for timing in self.timings[workers])

    def waiting(self, workers: int) -> Range:
        return Range.of(timing.waiting for timing in self.timings[workers])

    def speedup(self, workers: int) -> Range:
        """Return the measured speedup over one worker, or over the fewest as if they were ideal."""
        if workers == self.fewest_workers:
            return Range.of([workers])
        return self.speedup_of(self.step(workers))

    def speedup_of(self, step: Range) -> Range:
        """Return the speedup of a step of these seconds, compared as in `speedup`."""
        fewest = self.fewest_workers
        pairs = zip(astuple(self.step(fewest)), reversed(astuple(step)), strict=True)
        return Range(*(fewest * seconds / after for seconds, after in pairs))

    def bottleneck(self) -> Bottleneck | None:
        """Return what limits the most workers."""
        ends = (self.fewest_workers, self.most_workers)
        before, after = ({name: self.part(n, name).middle for name in PARTS} for n in ends)
        waiting, factor = self.waiting(ends[1]).middle, ends[1] / ends[0]
        is_sharded = self.workload.is_sharded
        return find_bottleneck(before, after, waiting, factor, is_sharded=is_sharded)

    @cached_property
    def forecast(self) -> Forecast | None:
        """The forecast for the measured lanes; None without two workers within the capacity."""
        return fit_forecast(self.within_capacity, self.workload.lanes)

    def forecast_workers(self) -> list[int]:
        """Return the worker counts to forecast: doubled until each worker has one lane."""
        lanes, workers = self.workload.lanes, max(self.within_capacity)
        counts = []
        while workers < lanes:
            workers = min(2 * workers, lanes)
            counts.append(workers)
        return counts

    def to_json(self) -> dict[str, Any]:
        """Return all measurements and results as JSON values."""
        bottleneck, forecast = self.bottleneck(), self.forecast
        return {
            "job": asdict(self.workload),
            "measured": {n: [*map(asdict, runs)] for n, runs in self.timings.items()},
            "speedup": {n: asdict(self.speedup(n)) for n in self.timings},
            "limit": bottleneck and asdict(bottleneck),
            "forecast": forecast
            and {
                "per_lane": asdict(forecast.per_lane),
                "constant": asdict(forecast.constant),
                "steps": {n: asdict(forecast.step(n)) for n in self.forecast_workers()},
            },
        }
