from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.watch import curves
from samestep.watch.curves import Curve, MovingAverage, Table, equal_spans, select_points, spread

NAN = math.nan


def curve(*rows):
    """Return a curve of rows (step, between, time, value, low, high)."""
    made = Curve()
    for step, between, time, value, low, high in rows:
        made.append((step, not between), time, value, low, high)
    return made


def straight(count):
    return curve(*[(step, False, 100.0 + step, float(step), NAN, NAN) for step in range(count)])


def ask(made, start=None, end=None, points=1000, smooth=0.0, axis="step"):
    return made.points(smooth).to_json(start, end, points, axis)


def test_all_of_few_points_are_drawn():
    answer = ask(straight(3))
    assert answer == {
        "x": [0, 1, 2],
        "value": [0, 1, 2],
        "low": None,
        "high": None,
        "smooth": None,
        "runs": None,
        "spans": None,
        "points": 3,
        "exact": True,
    }


def test_no_points():
    answer = ask(Curve(), smooth=0.5)
    assert answer == {
        "x": [],
        "value": [],
        "low": None,
        "high": None,
        "smooth": [],
        "runs": None,
        "spans": None,
        "points": 0,
        "exact": True,
    }


def test_a_range_includes_both_ends():
    assert ask(straight(10), start=2, end=4)["x"] == [2, 3, 4]
    assert ask(straight(10), start=8.5)["x"] == [9]
    assert ask(straight(10), end=0)["x"] == [0]
    assert ask(straight(10), start=5, end=4)["x"] == []
    assert ask(straight(10), start=102, end=103, axis="time")["x"] == [102, 103]


def test_zooming_in_gives_exact_data():
    made = straight(1000)
    far, near = ask(made, points=40), ask(made, start=100, end=139, points=40)
    assert (far["exact"], far["points"], len(far["x"]) <= 40) == (False, 1000, True)
    assert (near["exact"], near["points"], near["x"]) == (True, 40, list(range(100, 140)))


def test_the_drawn_points_of_a_span_have_the_extremes_of_all_its_points():
    values = np.random.default_rng(0).normal(size=1000)
    made = curve(*[(step, False, 0.0, value, NAN, NAN) for step, value in enumerate(values)])
    answer = ask(made, points=40)
    drawn, seen = list(zip(answer["spans"], answer["x"], answer["value"], strict=True)), 0
    for span in dict.fromkeys(answer["spans"]):
        steps = [int(x) for number, x, _ in drawn if number == span]
        drawn_values = [value for number, _, value in drawn if number == span]
        all_points = values[steps[0] : steps[-1] + 1]
        assert (min(drawn_values), max(drawn_values)) == (all_points.min(), all_points.max())
        seen += len(all_points)
    assert seen == len(values)


def test_a_moving_average_is_over_all_points_even_if_few_are_drawn():
    made = straight(1000)
    exact = ask(made, smooth=0.9, points=1000)["smooth"]
    few = ask(made, smooth=0.9, points=40, start=300)
    assert few["smooth"] == [exact[int(step)] for step in few["x"]]


def test_another_weight_gives_another_average():
    made = straight(10)
    assert (
        ask(made, smooth=0.9)["smooth"]
        != ask(made, smooth=0.5)["smooth"]
        == ask(straight(10), smooth=0.5)["smooth"]
    )


def test_a_curve_has_a_band_if_any_point_has_one():
    answer = ask(curve((0, False, 0.0, 1.0, NAN, NAN), (1, False, 1.0, 2.0, 1.0, 3.0)))
    assert (answer["low"], answer["high"]) == ([None, 1.0], [None, 3.0])


def test_values_that_are_not_finite_are_null():
    answer = ask(
        curve(
            *[
                (step, False, 0.0, value, NAN, NAN)
                for step, value in enumerate([1.0, NAN, math.inf, -math.inf])
            ]
        )
    )
    assert answer["value"] == [1.0, None, None, None]


def test_points_are_sorted_by_time_after_a_clock_was_set_back():
    made = curve(
        (0, False, 10.0, 1.0, NAN, NAN),
        (1, False, 5.0, 2.0, NAN, NAN),
        (2, False, 7.0, 3.0, NAN, NAN),
    )
    answer = ask(made, axis="time", start=6)
    assert (answer["x"], answer["value"]) == ([7, 10], [3, 1])
    assert ask(made)["x"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("last", "left"),
    [
        ((1, False), [0, 1, 2]),
        ((1, True), [0, 1, 2]),
        ((-math.inf, False), []),
        ((9, False), [0, 1, 2, 3]),
    ],
)
def test_points_after_a_place_are_discarded(last, left):
    rows = [(0, False), (0, False), (1, True), (1, False)]  # step, between
    made = curve(
        *[
            (step, between, 0.0, float(number), NAN, NAN)
            for number, (step, between) in enumerate(rows)
        ]
    )
    ask(made, smooth=0.5)
    made.discard_after(last)
    answer = ask(made, smooth=0.5)
    assert answer["value"] == left
    assert len(answer["smooth"]) == len(made) == len(left)


def test_summary():
    def figures_of(curve):
        return [curve.summary()[name] for name in ("points", "last", "lowest", "highest")]

    made = straight(3)
    assert figures_of(made) == [3, 2, 0, 2]
    made.append((3, True), 0.0, -5.0, NAN, NAN)
    made.append((4, True), 0.0, NAN, NAN, NAN)
    assert figures_of(made) == [5, None, -5, 2]
    made.discard_after((1, False))
    assert figures_of(made) == [1, 0, 0, 0]
    assert figures_of(Curve()) == [0, None, None, None]


@pytest.mark.parametrize(("in_step", "done"), [(True, 1507), (False, 1506)])
def test_the_best_value_of_a_step_is_in_the_snapshot_after_it(in_step, done):
    made = Curve()
    made.append((1506, in_step), 0.0, 0.9748, NAN, NAN)
    summary = made.summary()
    assert (summary["highest_step"], summary["highest_done"]) == (1506, done)


def test_a_digest_is_of_all_points_also_of_those_that_are_thinned_later():
    values = [math.sin(step) for step in range(3000)]
    whole, thinned, part = Curve(), Curve(), Curve()
    for step, value in enumerate(values):
        whole.append((step, True), 0.0, value)
        thinned.append((step, True), float(step), value, low=value - 1)
        part.append((step, True), 0.0, value)
        if step % 1000 == 500:
            thinned.flush(200)
            part.digest()
    assert len(thinned) < 3000
    assert whole.digest() == thinned.digest() == part.digest()
    part.append((3000, False), 0.0, NAN)
    assert whole.digest() != part.digest()
    part.discard_after((2999, True))
    whole.discard_after((2999, True))
    assert whole.digest() == part.digest()


def test_the_steps_of_extremes_and_the_trend_are_exact():
    made = Curve()
    for step, value in enumerate([NAN, 7.0, 3.0, 9.0, 3.0, 9.0, *[1e6 / 3] * 4, *[4.0] * 990]):
        made.append((step, False), 0.0, value, NAN, NAN)
    summary = made.summary()
    assert (summary["lowest_step"], summary["highest_step"], summary["trend"]) == (
        2,
        6,
        0,
    )  # between steps
    for step in range(249):
        made.append((1000 + step, False), 0.0, 3.0, NAN, NAN)
    assert made.summary()["trend"] == pytest.approx(3 / 4 - 1)
    assert made.summary()["highest"] == 1e6 / 3  # all digits


@pytest.mark.parametrize("values", [[], [1.0] * 4, [0.0] * 4 + [1.0], [1e308] * 10, [NAN] * 9])
def test_a_trend_is_unknown(values):
    made = Curve()
    for step, value in enumerate(values):
        made.append((step, False), 0.0, value, NAN, NAN)
    assert made.summary()["trend"] in {None, 0}


def test_returned_points_do_not_change_later():
    made = straight(3)
    points = made.points()
    made.discard_after((1, False))
    made.append((1, True), 0.0, 9.0, NAN, NAN)
    assert np.array_equal(points.value, [0, 1, 2])


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
def test_at_most_the_given_points_with_the_extremes_and_both_ends(rows, points):
    x, value, _, _ = columns(rows)
    chosen = select_points(x, [value], [value], points)
    assert len(chosen) <= points
    assert list(chosen) == sorted(set(chosen))
    assert {0, len(x) - 1} <= set(chosen)
    assert extremes(value[chosen]) == extremes(value)


@given(CURVES, st.integers(6, 100))
def test_a_band_keeps_its_outer_edges(rows, points):
    x, value, low, high = columns(rows)
    chosen = select_points(x, [value, low], [value, high], points)
    assert len(chosen) <= points
    assert extremes(value[chosen]) == extremes(value)
    for edge, end in ((low, 0), (high, 1)):
        if extremes(edge) is not None:
            assert extremes(edge[chosen])[end] == extremes(edge)[end]


@given(CURVES, st.integers(4, 60))
def test_every_span_keeps_its_own_extremes(rows, points):
    """M4: drawn in as many pixel columns as there are spans, it looks like all points."""
    x, value, _, _ = columns(rows)
    chosen = select_points(x, [value], [value], points)
    for start, stop in equal_spans(x, points // 4):
        inside = chosen[(chosen >= start) & (chosen < stop)]
        assert {start, stop - 1} <= set(inside)
        assert extremes(value[inside]) == extremes(value[start:stop])


@given(CURVES)
def test_few_points_are_all_drawn(rows):
    x, value, low, high = columns(rows)
    assert list(select_points(x, [value, low], [value, high], len(x))) == list(range(len(x)))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1).map(sorted), st.integers(1, 20))
def test_spans_contain_each_row_once(x, count):
    spans = equal_spans(np.asarray(x), count)
    assert len(spans) <= count
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(len(x)))


@given(st.lists(st.integers(0, 1000), min_size=1).map(sorted), st.integers(1, 20))
def test_items_are_spread_over_their_steps_with_both_ends(steps, count):
    rows = spread(range(len(steps)), steps, count)
    assert (rows[0], rows[-1]) == (0, len(steps) - 1)
    assert rows == sorted(set(rows))
    assert len(rows) <= count + 1
    assert set(rows) >= {start for start, _ in equal_spans(np.array(steps), count)}


CHANGES = st.lists(
    st.integers(1, 5).map(lambda count: ("append", count))
    | st.integers(0, 9).map(lambda last: ("filter", last)),
    max_size=20,
)


@given(CHANGES, st.integers(1, 4))
def test_a_table_contains_the_rows_appended_and_not_removed(changes, at_a_time):
    before, curves.ROWS_AT_A_TIME = curves.ROWS_AT_A_TIME, at_a_time
    try:
        table, expected, seen = Table(np.float64, np.int32), [], []
        for action, number in changes:
            if action == "append":
                rows = [(len(expected) + row, row) for row in range(number)]
                expected += rows
                for row in rows:
                    table.append(row)
            else:
                expected = [row for row in expected if row[0] <= number]
                table.filter(table.columns()[0] <= number)
            seen.append((table.columns(), [*expected]))
            assert len(table) == len(expected)
    finally:
        curves.ROWS_AT_A_TIME = before
    for columns, rows in seen:  # returned columns do not change later
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == rows


WEIGHTS = st.sampled_from([0.1, 0.5, 0.9, 0.999])
VALUES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), max_size=200)


@given(VALUES, WEIGHTS)
def test_the_average_is_the_recurrence_divided_by_its_bias(values, weight):
    mean, count, expected = 0.0, 0, []
    for value in values:
        if math.isfinite(value):
            mean, count = weight * mean + (1 - weight) * value, count + 1
        expected.append(mean / (1 - weight**count) if math.isfinite(value) else NAN)
    averages = MovingAverage(weight).over(np.asarray(values, dtype=float))
    np.testing.assert_allclose(averages, expected, rtol=1e-9, atol=1e-6)


@given(VALUES, WEIGHTS, st.lists(st.integers(0, 200), max_size=4))
def test_the_average_has_the_same_bits_however_values_are_appended(values, weight, cuts):
    values = np.asarray(values, dtype=float)
    expected, average = MovingAverage(weight).over(values), MovingAverage(weight)
    for cut in sorted(cuts):
        np.testing.assert_array_equal(average.over(values[:cut]), expected[:cut])
    np.testing.assert_array_equal(average.over(values), expected)


@pytest.mark.parametrize("weight", [0.5, 0.999])
def test_the_average_of_a_constant_is_the_constant(weight):
    np.testing.assert_allclose(MovingAverage(weight).over(np.full(200, 7.0)), 7.0, rtol=1e-9)


@pytest.fixture
def long_curves():
    """Return a curve of 5,000 noisy values with a band, and the same thinned to 512 points."""
    noise = np.random.default_rng(0).normal(size=5000)
    both = Curve(), Curve()
    for step, value in enumerate((10 / (1 + np.arange(5000) / 500) + noise).tolist()):
        for made in both:
            made.append((step, True), 10.0 + step, value, value - 1, value + 1)
        both[1].flush(512)
    return both


def test_a_thinned_curve_keeps_its_extremes_and_its_summary(long_curves):
    complete, thinned = long_curves
    assert len(complete) == 5000
    assert len(thinned) <= 512
    expected, summary = complete.summary(), thinned.summary()
    assert (expected.pop("trend") is None, summary.pop("trend")) == (False, None)
    assert (expected.pop("points"), summary.pop("points")) == (5000, len(thinned))
    assert summary == expected
    answer = ask(thinned)
    assert (answer["points"], answer["exact"]) == (len(thinned), False)
    assert (answer["x"][0], answer["x"][-1]) == (0, 4999)
    for name, extreme in {"value": max, "low": min, "high": max}.items():
        assert extreme(answer[name]) == extreme(ask(complete, points=5000)[name])


def test_a_thinned_curve_is_resumed_and_grows(long_curves):
    _, thinned = long_curves
    thinned.discard_after((3000, False))
    assert 2900 < thinned.points().step[-1] < 3000
    size = len(thinned)
    for step in range(3000, 3010):
        thinned.append((step, True), 0.0, math.nan)
    assert thinned.summary()["points"] == size + 10
    assert thinned.nonfinite_since() == 3000
    answer = ask(thinned, start=3000)
    assert (answer["points"], answer["exact"]) == (10, False)
    assert answer["low"] == [None] * 10


def test_a_curve_that_descends_is_thinned_in_the_order_of_the_record():
    made = curve(*[(-step, False, 0.0, float(step), NAN, NAN) for step in range(500)])
    made.flush(100)
    assert len(made) <= 100
    assert made.points().value.tolist() == sorted(made.points().value.tolist())
    assert made.points().low is None
