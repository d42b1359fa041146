"""The mean of a scalar over several runs, such as seeds, with a band of their range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from samestep.watch.curves import Points, row_range
from samestep.watch.view import View

MOST_PLACES: Final = 20_000  # at which the mean is computed exactly
SPANS: Final = 4_000  # of the axis otherwise: the mean of each run within each span


def mean_curve(
    views: Sequence[View],
    name: str,
    start: float | None,
    end: float | None,
    points: int,
    smooth: float,
    axis: str,
) -> dict[str, Any]:
    """Return the mean of a scalar over runs to draw, as `View.curve` does, with the number of runs.

    Each run counts where it has values: at its own points and, on straight lines, between them.
    With `smooth`, the moving averages of the runs are averaged. On the time axis, x is the seconds
    since the start of each run. Raises `KeyError` if a run has no such scalar or no samples.
    """
    curves = []  # of each run: x and y, float64 [N]
    for view in views:
        run = view.points(name, smooth, axis)
        x = getattr(run, axis) - (view.started if axis == "time" else 0.0)
        order = np.argsort(x, kind="stable")
        y = run.value if run.smooth is None else run.smooth
        curves.append((x[order], np.where(np.isfinite(y), y, np.nan)[order]))
    places = np.unique(np.concatenate([x for x, _ in curves]))
    places = places[row_range(places, start, end)]
    is_exact = len(places) <= MOST_PLACES
    if not is_exact:
        edges = np.linspace(places[0], places[-1], SPANS + 1)
        curves = [_means_of_spans(x, y, edges) for x, y in curves]
        places = (edges[1:] + edges[:-1]) / 2
    values = np.array([np.interp(places, x, y, np.nan, np.nan) for x, y in curves])  # [runs, N]
    has_value = np.isfinite(values)
    count = has_value.sum(axis=0, dtype=np.float64)
    total = np.where(has_value, values, 0.0).sum(axis=0)
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    low = np.where(has_value, values, np.inf).min(axis=0)
    high = np.where(has_value, values, -np.inf).max(axis=0)
    line = Points(places, places, places, mean, low, high, None, runs=count)
    drawn = line.to_json(None, None, points, "step")
    return {**drawn, "exact": drawn["exact"] and is_exact}


def _means_of_spans(
    x: NDArray[Any], y: NDArray[Any], edges: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the centers of the spans that have points [S], and the means of y there [S]."""
    if not len(inside := np.flatnonzero((x >= edges[0]) & (x <= edges[-1]))):
        return x, y
    span = np.searchsorted(edges[1:-1], x[inside], side="right")
    count = np.bincount(span, minlength=len(edges) - 1)
    total = np.bincount(span, weights=y[inside], minlength=len(edges) - 1)
    filled = np.flatnonzero(count)
    return ((edges[1:] + edges[:-1]) / 2)[filled], total[filled] / count[filled]
