"""Hints about how a run trains, from its record: overfitting, and training without an effect.

Each hint has a rule below that noise rarely meets: a curve must leave what its own noise explains,
and a count must hold up to the newest step. A curve that keeps falling gets no hint.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from samestep.record.events import FILE_NAME
from samestep.record.source import STARTS, read_history

Array: TypeAlias = NDArray[np.float64]
Series: TypeAlias = tuple[Array, Array]  # steps and values [n] of a scalar, in order

# names of scalars
EVALUATED: Final = re.compile(
    r"(?<![a-z])(val|valid|validation|test|eval|evaluation|held[-_ ]?out)(?![a-z])", re.IGNORECASE
)
LOSS: Final = re.compile(r"(?<![a-z])loss(?![a-z])", re.IGNORECASE)
# of the only loss: those of players in a game, for example, need not fall
TRAINING_LOSSES: Final = ("loss", "train/loss", "train_loss", "training/loss", "training_loss")

FEWEST_EVALUATIONS: Final = 6
LEAST_RISE: Final = 0.05  # of a validation loss, relative to its lowest mean
LEAST_FALL: Final = 0.01  # of the training loss meanwhile
NOISES_OF_RISE: Final = 6.0  # standard errors of a mean: the lowest one of many is 2 or 3 below
NOISES: Final = 2.0  # standard errors of a difference
# The noise of a curve is that of its second differences, whose variance is this many times that of
# independent noise; those of a smooth curve are small.
NOISE_OF_SECOND: Final = 6
NORMAL_MEDIAN: Final = 0.6745  # of the absolute value of a normal variable of variance 1
FEWEST_POINTS: Final = 300  # of a loss that may have stopped to fall
CONVERGED: Final = 0.1  # of its first values: a loss below that has been learned
ZERO_STEPS: Final = 20  # with a learning rate of 0, or without gradients
CLIPPED_STEPS: Final = 100
RECENT: Final = 100  # norms of gradients
VANISHED: Final = 1e-7  # of the first norms
MOST_POINTS: Final = 20_000  # of a curve that are used, evenly thinned
MOST_OPTIMIZERS: Final = 1000
LARGEST: Final = 1e300
MOST_BYTES: Final = 4 << 20  # of a record that the run itself reads at its end: 0.2 s


@dataclass(frozen=True)
class Hint:
    """A `kind` of hint, and its text: what was seen since when, and what it means."""

    kind: str
    text: str


class Updates:
    """The learning rates, and the norms of gradients, of the steps since a start of the run.

    They are fields of the events `timing`: `rates` has the largest learning rate of each tracked
    optimizer whenever it changes, `norms` the norms before clipping, each with its limit.
    """

    def __init__(self) -> None:
        self.zero_since: dict[str, int] = {}  # the step, by the name of an optimizer
        self.step = 0
        self.clipped_steps = self.steps_without_gradient = 0  # up to the newest one
        self.limit = math.inf
        self.first_norms: list[float] = []
        self.norms: deque[float] = deque(maxlen=RECENT)

    def add(self, step: float, event: Mapping[str, Any]) -> None:
        """Add an event. Values that no run writes are ignored."""
        self.step = int(step)
        rates, norms = event.get("rates"), event.get("norms")
        for name, rate in rates.items() if isinstance(rates, dict) else ():
            if rate == 0 and len(self.zero_since) < MOST_OPTIMIZERS:
                self.zero_since.setdefault(str(name), self.step)
            else:
                self.zero_since.pop(str(name), None)
        pairs = [pair for pair in norms if _is_pair(pair)] if isinstance(norms, list) else []
        if not pairs:
            return
        # of several models, that with the least effect of clipping counts
        norm, limit = min(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else math.inf)
        self.clipped_steps = self.clipped_steps + 1 if norm > limit else 0
        largest = max(norm for norm, _ in pairs)
        self.steps_without_gradient = 0 if largest else self.steps_without_gradient + 1
        self.norms.append(largest)
        self.limit = limit
        if len(self.first_norms) < RECENT:
            self.first_norms.append(largest)


def _is_pair(pair: Any) -> bool:
    """Return whether this is a norm that is finite, and its limit, which may be infinite."""
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    is_number = (isinstance(number, (int, float)) for number in pair)
    return (
        all(is_number)
        and 0 <= pair[0] <= LARGEST
        and (0 <= pair[1] <= LARGEST or pair[1] == math.inf)
    )


def tells(name: str) -> bool:
    """Return whether hints are found in the scalar of this name."""
    return name in TRAINING_LOSSES or bool(EVALUATED.search(name) and LOSS.search(name))


@np.errstate(over="ignore", invalid="ignore")
def find_hints(scalars: Mapping[str, Series], updates: Updates) -> list[Hint]:
    """Return all hints about a run with these scalars and updates, the most important one first."""
    name = next((name for name in TRAINING_LOSSES if name in scalars), "")
    trained = _finite(scalars[name]) if name else None
    has_converged = trained is not None and is_converged(trained[1])
    hints = [*_useless_updates(updates, has_converged=has_converged)]
    for name, series in scalars.items():
        if trained is None or name in TRAINING_LOSSES or not tells(name):
            continue
        found = overfitting(trained, _finite(series))
        if found is not None:
            step, rise = found
            text = f"{name} has risen by {rise:.0%} since step {step:,} while the training"
            hints.append(Hint("overfitting", f"{text} loss falls: overfitting"))
            break
    if trained is not None and not hints and not has_converged:
        since = flat_since(trained)
        if since is not None:
            text = f"the training loss has not fallen since step {since:,}: it has converged, or"
            hints.append(Hint("flat", f"{text} the learning rate is too low or too high"))
    return hints


def _useless_updates(updates: Updates, *, has_converged: bool) -> Iterator[Hint]:
    for name, since in updates.zero_since.items():
        if updates.step - since >= ZERO_STEPS:
            text = f"the learning rate of {name} has been 0 since step {since:,}"
            yield Hint("rate", f"{text}: nothing is learned")
    without, clipped = updates.steps_without_gradient, updates.clipped_steps
    norms, first_norms = updates.norms, updates.first_norms
    if without >= ZERO_STEPS and not has_converged:
        text = f"all gradients have been 0 for {without:,} steps"
        yield Hint("gradients", f"{text}: nothing is learned")
    elif (
        len(norms) == len(first_norms) == RECENT
        and max(norms) < VANISHED * np.median(first_norms)
        and not has_converged
    ):
        text = f"the norm of gradients has fallen from {np.median(first_norms):.2g} to"
        yield Hint("gradients", f"{text} {np.median(norms):.2g}: they have vanished")
    elif clipped >= CLIPPED_STEPS:
        text = f"gradients were clipped in each of the last {clipped:,} steps, from a norm of about"
        yield Hint(
            "clipped",
            f"{text} {np.median(norms):.3g} to {updates.limit:.3g}: the limit sets the step size",
        )


def overfitting(trained: Series, evaluated: Series) -> tuple[int, float] | None:
    """Return the step and the relative rise since then of a validation loss that rises.

    Of the means over a sixth of the evaluations, the newest one is above the lowest one by more
    than noise explains, while the training loss has fallen.
    """
    steps, values = evaluated
    size = len(values)
    width = max(2, size // 6)
    if size < FEWEST_EVALUATIONS:
        return None
    means = np.convolve(values, np.full(width, 1 / width), mode="valid")  # [size - width + 1]
    lowest = int(np.argmin(means))
    best = float(means[lowest])
    newest = min(float(means[-1]), float(np.median(values[-width:])))  # not a single spike
    rise = newest - best
    is_later = len(means) - 1 - lowest >= max(width, size // 5)
    if not is_later or best <= 0 or not LEAST_RISE * best <= rise < math.inf:
        return None
    noise = float(np.sqrt(np.mean(np.square(np.diff(values, 2))) / NOISE_OF_SECOND))
    # more if only few differences tell the noise
    least = NOISES_OF_RISE * (1 + FEWEST_EVALUATIONS / size) * noise / math.sqrt(width)
    if not rise >= least:  # not for NaN either, of values that are too large for a sum
        return None
    since = float(steps[lowest + width - 1])
    return (int(since), rise / best) if _has_fallen(trained, since, float(steps[-1])) else None


def _has_fallen(trained: Series, since: float, until: float) -> bool:
    """Return whether a loss is lower before step `until` than it was before step `since`."""
    steps, values = trained
    span = (until - since) / 2
    before = values[(steps > since - span) & (steps <= since)]
    after = values[(steps > until - span) & (steps <= until)]
    if min(len(before), len(after)) < 3:
        return False
    fall, least = _fall(before, after)
    return fall > max(least, LEAST_FALL * abs(float(np.median(before))))


def flat_since(trained: Series) -> int | None:
    """Return the step since which a loss has not fallen, None if it falls or is too short.

    The median of the last quarter is not below those of the two quarters before it by more than
    noise explains.
    """
    steps, values = trained
    quarter = len(values) // 4
    if len(values) < FEWEST_POINTS:
        return None
    second, third, last = np.split(values[-3 * quarter :], 3)
    for earlier in (second, third):
        fall, least = _fall(earlier, last)
        if fall > least:
            return None
    return int(steps[-2 * quarter])


def is_converged(losses: Array) -> bool:
    """Return whether a loss is far below its first values, or has values that are no such loss."""
    if not len(losses):
        return False
    size = max(1, len(losses) // 50)
    first, last = float(np.median(losses[:size])), float(np.median(losses[-size:]))
    return last < CONVERGED * first or bool(losses.min() < 0)


def _fall(before: Array, after: Array) -> tuple[float, float]:
    """Return by how much the median falls, and the least fall that noise does not explain.

    Medians, also of the noise, are those of most values: a spike has no effect on them.
    """
    second = np.abs(np.concatenate([np.diff(before, 2), np.diff(after, 2)]))
    noise = float(np.median(second)) / (NORMAL_MEDIAN * math.sqrt(NOISE_OF_SECOND))
    error = noise * math.sqrt(math.pi / 2 * (1 / len(before) + 1 / len(after)))
    return float(np.median(before) - np.median(after)), NOISES * error


def _finite(series: Series) -> Series:
    steps, values = (column[:: max(1, len(column) // MOST_POINTS)] for column in series)
    rows = np.isfinite(values)
    return steps[rows], values[rows]


def hints_of(directory: Path) -> list[Hint]:
    """Return the hints about a run that ends, none if its record is large."""
    if (directory / FILE_NAME).stat().st_size > MOST_BYTES:
        return []
    steps: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    updates = Updates()
    for event in read_history(directory):
        if event["event"] in STARTS:
            updates = Updates()
        elif event["event"] == "timing":
            updates.add(event["step"], event)
        elif event["event"] == "scalars":
            for name, value in event["values"].items():
                if not tells(name):
                    continue
                steps.setdefault(name, []).append(event["step"])
                values.setdefault(name, []).append(value)
    return find_hints(
        {name: (np.array(steps[name]), np.array(values[name])) for name in values}, updates
    )
