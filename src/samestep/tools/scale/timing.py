"""Where the time of a run's steps went, from its record."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import RecordError
from samestep.record.record import PARTS as RECORDED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PARTS: Final = (*RECORDED, "other")
# steps that are left out: the first ones set memory aside and start loader processes
WARM_UP: Final = 3
FEWEST: Final = 3  # steps that are left to take a median of
FEWEST_RECORDED: Final = WARM_UP + FEWEST + 2  # with those at both ends


@dataclass(frozen=True)
class Timing:
    """Medians over a run's steps, in seconds: a whole `step`, its `parts` (means over workers), and what of the exchange is `waiting`."""

    step: float
    parts: Mapping[str, float]
    waiting: float


def read_timing(events: Iterable[Mapping[str, Any]]) -> Timing:
    """Return where the time of the steps went that `timing` events tell of, the first few left out.

    A step takes from one event to the next; what no part of it accounts for is "other". The worker
    that comes last to the exchange waits for nobody, so the shortest exchange of a step is the
    exchange itself, and the rest of the others' is waiting. Raises `RecordError` where there are
    too few steps.
    """
    steps = [event for event in events if event.get("event") == "timing"]
    seconds = [after["time"] - before["time"] for before, after in pairwise(steps)]
    # the last one is written when the run's end is in it
    seconds, kept = seconds[WARM_UP:-1], steps[WARM_UP + 1 : -1]
    if len(kept) < FEWEST:
        raise RecordError(
            f"the record has the timing of {len(steps)} steps; expected at least {FEWEST_RECORDED}: {WARM_UP} to warm up, {FEWEST} to "
            "take a median of, and those at both ends: give more --steps, or more data"
        )
    parts = {
        name: median(fmean(worker.get(name, 0.0) for worker in step["workers"]) for step in kept)
        for name in RECORDED
    }
    step = median(seconds)
    parts["other"] = max(0.0, step - sum(parts.values()))
    return Timing(step, parts, median(_waiting(step["workers"]) for step in kept))


def _waiting(workers: Sequence[Mapping[str, float]]) -> float:
    exchanges = [worker.get("exchange", 0.0) for worker in workers]
    return fmean(exchanges) - min(exchanges)
