from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samestep.watch.downsample import drawn, spans

NUMBERS = st.floats(-100, 100) | st.just(math.nan)
CURVES = st.lists(
    st.tuples(st.integers(0, 1000), NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=200
)


def columns(rows):
    x, value, low, high = (
        np.asarray(column, dtype=float)
        for column in zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    )
    return x, value, low, high


def extremes(values):
    finite = values[np.isfinite(values)]
    return (finite.min(), finite.max()) if len(finite) else None


@given(CURVES, st.integers(4, 100))
def test_at_most_as_many_points_as_asked_for_with_the_extremes_and_both_ends(rows, points):
    x, value, _, _ = columns(rows)
    chosen = drawn(x, value, None, None, points)
    assert len(chosen) <= points
    assert list(chosen) == sorted(set(chosen))
    assert {0, len(x) - 1} <= set(chosen)
    assert extremes(value[chosen]) == extremes(value)


@given(CURVES, st.integers(6, 100))
def test_a_band_keeps_its_outer_edges(rows, points):
    x, value, low, high = columns(rows)
    chosen = drawn(x, value, low, high, points)
    assert len(chosen) <= points
    assert extremes(value[chosen]) == extremes(value)
    for edge, end in ((low, 0), (high, 1)):
        if extremes(edge) is not None:
            assert extremes(edge[chosen])[end] == extremes(edge)[end]


@given(CURVES, st.integers(4, 60))
def test_every_span_keeps_its_own_extremes(rows, points):
    """M4's law: drawn in as many columns of pixels as there are spans, it looks like all points."""
    x, value, _, _ = columns(rows)
    chosen = drawn(x, value, None, None, points)
    for start, stop in spans(x, points // 4):
        inside = chosen[(chosen >= start) & (chosen < stop)]
        assert {start, stop - 1} <= set(inside)
        assert extremes(value[inside]) == extremes(value[start:stop])


@given(CURVES)
def test_few_points_are_all_drawn(rows):
    x, value, low, high = columns(rows)
    assert list(drawn(x, value, low, high, len(x))) == list(range(len(x)))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1).map(sorted), st.integers(1, 20))
def test_spans_hold_each_row_once(x, count):
    found = spans(np.asarray(x), count)
    assert len(found) <= count
    assert [row for start, stop in found for row in range(start, stop)] == list(range(len(x)))
