"""What to change: the part that limits, the largest lane batch, how many lanes, the learning rate of another batch size. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from samestep.tools.scale.timing import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from samestep.tools.scale.trials import Trial

WARM_UP_EPOCHS: Final = 5  # of Goyal et al. 2017
NOTICED: Final = 0.02  # of a worker's memory: what grows by less is lost in what the allocator does
GOOD_ENOUGH: Final = 0.95  # of the ideal speed-up
TO_DO: Final = {
    "data": "load ahead with loader_workers=2 or more, return whole lane batches by __getitems__, or store samples decoded",
    "compute": "a larger batch a lane keeps a device busier; where workers share cores or memory, fewer of them a machine",
    "exchange": "a larger lane batch or more lanes a worker, fewer bytes (a smaller or partly frozen model), a faster link",
    "waiting": "a number of workers that divides the lanes, samples of like cost in all lanes (group_by), an idle machine",
    "optimizer": "run.shard(optimizer), and fused=True where the optimizer has it",
    "shared optimizer": "fused=True where the optimizer has it; what is left is the gather of parameters, for which see exchange",
    "snapshot": "a larger snapshot_every, and hot_every=none where killed workers need not be replaced quickly",
    "other": "less in the loop's body beside the step: evaluate, log, clip and print less often, and read no tensor that need not be read",
}


@dataclass(frozen=True)
class Limit:
    """The `part` that keeps workers from the ideal, the seconds a step that it takes beyond that, and what to do about it."""

    part: str
    seconds: float
    to_do: str


def limit_of(
    alone: Mapping[str, float],
    together: Mapping[str, float],
    waiting: float,
    speed_up: float,
    *,
    sharded: bool,
) -> Limit | None:
    """Return the part that exceeds its ideal share most, from the parts of a step at the fewest and at `speed_up` times as many workers.

    None where all parts together are within a twentieth of the ideal.
    """
    beyond = {name: together[name] - alone[name] / speed_up for name in PARTS}
    beyond["waiting"] = waiting
    beyond["exchange"] -= waiting
    ideal = sum(alone.values()) / speed_up
    if ideal >= GOOD_ENOUGH * sum(together.values()):
        return None
    part = max(beyond, key=lambda name: beyond[name])
    return Limit(
        part, beyond[part], TO_DO["shared optimizer" if part == "optimizer" and sharded else part]
    )


@dataclass(frozen=True)
class Memory:
    """A worker's highest memory, in bytes: `fixed`, and `a_sample` of a lane's batch more."""

    fixed: float
    a_sample: float

    def largest_lane_batch(self, available: float) -> int:
        """Return how many samples a lane may have in so much memory a worker; 0 where not even the fixed part fits."""
        return max(0, math.floor((available - self.fixed) / self.a_sample))


def memory_of(trial: Trial, with_more_lanes: Trial) -> Memory | None:
    """Return what explains the memory of two runs with one batch size and other lanes, as a line; None where the growth is lost in noise.

    With more lanes, a worker alone holds more sums of gradients while it computes the last lane:
    one a level of the tree.
    """
    batch_size = trial.job.batch_size
    if batch_size is None:
        return None
    samples, fewer = (-(-batch_size // some.job.lanes) for some in (trial, with_more_lanes))
    sums, more_sums = (some.job.nbytes * _levels(some) for some in (trial, with_more_lanes))
    grown = (trial.peak_bytes - sums) - (with_more_lanes.peak_bytes - more_sums)
    if samples == fewer or grown < NOTICED * trial.peak_bytes:
        return None
    a_sample = grown / (samples - fewer)
    return Memory(trial.peak_bytes - samples * a_sample, a_sample)


def _levels(trial: Trial) -> int:
    carried = -(-trial.job.lanes // trial.workers)
    return (carried - 1).bit_length()


def lanes_to_choose(
    batch_size: int, most_workers: int, compute: float, overhead: Callable[[int], float]
) -> int:
    """Return the largest power of two of lanes, a worker each, with which a lane computes longer than the rest of its step takes.

    `compute` is that of the whole batch in seconds, of which each lane has an equal share;
    `overhead(lanes)` the rest of a step then. There are never more lanes than samples or than the
    most workers there will ever be, rounded up to a power of two.
    """
    most = min(batch_size, 2 ** max(0, most_workers - 1).bit_length())
    powers = [2**exponent for exponent in range(most.bit_length())]
    return max((lanes for lanes in powers if compute / lanes >= overhead(lanes)), default=1)


@dataclass(frozen=True)
class LearningRate:
    """The peak learning rate of another batch size, `warm_up_from` which it rises over so many epochs, and Adam's betas."""

    rule: str
    rate: float
    warm_up_from: float
    warm_up_epochs: int
    betas: tuple[float, float] | None = None


def learning_rates(
    rate: float, batch_size_now: int, batch_size_new: int, betas: tuple[float, float] = (0.9, 0.999)
) -> list[LearningRate]:
    """Return the learning rates that two rules give for a new batch size.

    Linear, for SGD: Goyal et al. (2017), "Accurate, Large Minibatch SGD", who found it to hold up
    to 8,192 images of ImageNet, after a warm-up of 5 epochs from the old rate. Square root:
    Krizhevsky (2014), "One weird trick for parallelizing convolutional neural networks", from the
    variance of the gradient; for Adam, Malladi et al. (2022), "On the SDEs and scaling rules for
    adaptive gradient algorithms", where 1 - beta grows in proportion to the batch: None once that
    leaves no beta, and the rule with it.
    """
    factor = batch_size_new / batch_size_now
    scaled = (1 - factor * (1 - betas[0]), 1 - factor * (1 - betas[1]))
    return [
        LearningRate(
            "linear (SGD: Goyal et al. 2017)",
            rate * factor,
            min(rate, rate * factor),
            WARM_UP_EPOCHS,
        ),
        LearningRate(
            "square root (Adam: Malladi et al. 2022)",
            rate * math.sqrt(factor),
            min(rate, rate * math.sqrt(factor)),
            WARM_UP_EPOCHS,
            scaled if min(scaled) > 0 else None,
        ),
    ]
