from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.watch import scalars as scalars_module
from samestep.watch.scalars import FEW_ROWS, ScalarEvent, Scalars

VALUES = st.floats() | st.integers(-9, 9) | st.sampled_from([True, None, "1.5", 10**400, [], {}])
NAMES = st.sampled_from(["loss", "accuracy", "lr"])
EVENT = st.tuples(
    st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, VALUES)
)
BAND = ({"loss": 1, "lr": 0.1}, {"loss": 0.5}, {"loss": 1.5})


def points_of(scalars):
    """Return the columns of each curve as text, in which NaN equals NaN."""
    names = ("step", "done", "time", "value", "low", "high")
    return {
        name: [repr(getattr(curve.points(), column)) for column in names]
        for name, curve in scalars.curves.items()
    }


def added(events, at_once):
    scalars = Scalars()
    for number, (values, low, high) in enumerate(events):
        position = number // 2, number % 2 == 0
        scalars.add(ScalarEvent(position, 0.5 * number, values, low, high))
        if number % at_once == at_once - 1:
            scalars.append_rows()
    scalars.append_rows()
    return scalars


@given(st.lists(EVENT, max_size=8), st.integers(1, 30), st.integers(1, 3))
@example([({"loss": 10**400}, {}, {}), BAND], 30, 1)
@example([({"loss": 1.0}, {}, {}), BAND, ({"lr": "1.5"}, {}, {})], 30, 3)
def test_rows_appended_at_once_are_those_appended_one_by_one(events, at_once, repeats):
    events = [event for event in events for _ in range(FEW_ROWS * (repeats - 1) + 1)]
    expected = points_of(added(events, 1))
    together = points_of(added(events, at_once))
    assert together == expected
    assert list(together) == list(expected)


def test_a_band_begins_late_and_has_gaps():
    plain = [({"loss": float(number)}, {}, {}) for number in range(20)]
    scalars = added([*plain, *[BAND] * 20, *plain], 1000)
    loss, rate = scalars.curves["loss"].points(), scalars.curves["lr"].points()
    np.testing.assert_array_equal(loss.low, [math.nan] * 20 + [0.5] * 20 + [math.nan] * 20)
    np.testing.assert_array_equal(loss.high, [math.nan] * 20 + [1.5] * 20 + [math.nan] * 20)
    assert rate.low is None
    assert rate.value.tolist() == [0.1] * 20


@pytest.mark.parametrize("count", [1, 2 * FEW_ROWS])
def test_more_scalars_than_are_shown(monkeypatch, count):
    monkeypatch.setattr(scalars_module, "MOST_SCALARS", 2)
    scalars = added([({"a": 1.0, "b": 2.0, "c": 3.0}, {}, {})] * count, 100)
    assert scalars.is_cut
    assert {name: len(curve) for name, curve in scalars.curves.items()} == {"a": count, "b": count}


def test_a_thinned_curve_goes_on():
    events = [({"loss": float(number)}, {}, {}) for number in range(500)]
    scalars = added(events, 100)
    bytes_before = scalars.nbytes
    scalars.flush(100)
    assert scalars.nbytes < bytes_before / 3
    for number in range(500, 600):
        scalars.add(ScalarEvent((number, True), 0.0, {"loss": float(number)}, {}, {}))
    scalars.append_rows()
    curve = scalars.curves["loss"]
    assert len(curve) < 200
    assert curve.points().value[-100:].tolist() == list(range(500, 600))
    scalars.discard_after((-math.inf, False))
    assert scalars.curves == {}
