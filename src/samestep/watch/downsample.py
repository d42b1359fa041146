"""Few points that draw like many."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def drawn(
    x: NDArray[Any],
    value: NDArray[Any],
    low: NDArray[Any] | None,
    high: NDArray[Any] | None,
    points: int,
) -> NDArray[np.intp]:
    """Return which points to draw, in order, at most `points`: all, where there are no more. `x` ascends.

    M4 (Jugel et al. 2014, "M4: A visualization-oriented time series data aggregation"): of each of
    equal spans of the x axis the first, the last, the lowest and the highest value, and of a band
    its lowest and its highest.
    """
    if len(x) <= points:
        return np.arange(len(x))
    falling, rising = (
        [value] + ([] if low is None else [low]),
        [value] + ([] if high is None else [high]),
    )
    lowest = [np.where(np.isfinite(some), some, np.inf) for some in falling]
    highest = [np.where(np.isfinite(some), some, -np.inf) for some in rising]
    chosen: set[int] = set()
    for start, stop in spans(x, max(1, points // (2 + len(lowest) + len(highest)))):
        chosen.update((start, stop - 1))
        chosen.update(start + int(np.argmin(some[start:stop])) for some in lowest)
        chosen.update(start + int(np.argmax(some[start:stop])) for some in highest)
    return np.asarray(sorted(chosen))


def spans(x: NDArray[Any], count: int) -> Sequence[tuple[int, int]]:
    """Return the rows [start, stop) of `count` equal spans of ascending `x`, without those that hold none."""
    edges = np.linspace(float(x[0]), float(x[-1]), count + 1)[1:-1]
    bounds = [0, *np.searchsorted(x, edges).tolist(), len(x)]
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]
