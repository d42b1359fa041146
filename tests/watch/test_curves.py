from __future__ import annotations

import math

import numpy as np
import pytest

from samestep.watch.curves import Curve, Request

NAN = math.nan


def curve(*rows):
    """Make a curve of (step, between, time, value, low, high)."""
    made = Curve()
    for step, between, time, value, low, high in rows:
        made.append((step, not between), time, value, low, high)
    return made


def straight(count):
    return curve(*[(step, False, 100.0 + step, float(step), NAN, NAN) for step in range(count)])


def ask(made, **options):
    return made.points(options.get("smooth", 0.0)).answer(Request(**options))


def test_all_points_where_there_are_few():
    answer = ask(straight(3))
    assert answer == {
        "x": [0, 1, 2],
        "value": [0, 1, 2],
        "low": None,
        "high": None,
        "smooth": None,
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
        "points": 0,
        "exact": True,
    }


def test_a_range_takes_both_its_ends():
    assert ask(straight(10), start=2, end=4)["x"] == [2, 3, 4]
    assert ask(straight(10), start=8.5)["x"] == [9]
    assert ask(straight(10), end=0)["x"] == [0]
    assert ask(straight(10), start=5, end=4)["x"] == []
    assert ask(straight(10), start=102, end=103, axis="time")["x"] == [102, 103]


def test_zooming_in_makes_it_exact():
    made = straight(1000)
    far, near = ask(made, points=40), ask(made, start=100, end=139, points=40)
    assert (far["exact"], far["points"], len(far["x"]) <= 40) == (False, 1000, True)
    assert (near["exact"], near["points"], near["x"]) == (True, 40, list(range(100, 140)))


def test_a_moving_average_is_that_of_all_points_also_where_few_are_drawn():
    made = straight(1000)
    exact = ask(made, smooth=0.9, points=1000)["smooth"]
    few = ask(made, smooth=0.9, points=40, start=300)
    assert few["smooth"] == [exact[int(step)] for step in few["x"]]


def test_another_weight_is_another_average():
    made = straight(10)
    assert (
        ask(made, smooth=0.9)["smooth"]
        != ask(made, smooth=0.5)["smooth"]
        == ask(straight(10), smooth=0.5)["smooth"]
    )


def test_a_band_is_there_where_any_point_has_one():
    answer = ask(curve((0, False, 0.0, 1.0, NAN, NAN), (1, False, 1.0, 2.0, 1.0, 3.0)))
    assert (answer["low"], answer["high"]) == ([None, 1.0], [None, 3.0])


def test_numbers_that_are_not_finite_are_null():
    answer = ask(
        curve(
            *[
                (step, False, 0.0, value, NAN, NAN)
                for step, value in enumerate([1.0, NAN, math.inf, -math.inf])
            ]
        )
    )
    assert answer["value"] == [1.0, None, None, None]


def test_a_clock_that_was_set_back_is_drawn_in_order():
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
def test_striking_out_what_a_later_start_makes_void(last, left):
    rows = [(0, False), (0, False), (1, True), (1, False)]  # step, between
    made = curve(
        *[
            (step, between, 0.0, float(number), NAN, NAN)
            for number, (step, between) in enumerate(rows)
        ]
    )
    ask(made, smooth=0.5)
    made.strike(last)
    answer = ask(made, smooth=0.5)
    assert answer["value"] == left
    assert len(answer["smooth"]) == len(made) == len(left)


def test_last_lowest_and_highest():
    made = straight(3)
    assert made.extremes() == {"last": 2, "lowest": 0, "highest": 2}
    made.append((3, True), 0.0, -5.0, NAN, NAN)
    made.append((4, True), 0.0, NAN, NAN, NAN)
    assert made.extremes() == {"last": None, "lowest": -5, "highest": 2}
    made.strike((1, False))
    assert made.extremes() == {"last": 0, "lowest": 0, "highest": 0}
    assert Curve().extremes() == {"last": None, "lowest": None, "highest": None}


def test_points_that_were_asked_for_stay_while_more_come():
    made = straight(3)
    points = made.points()
    made.strike((1, False))
    made.append((1, True), 0.0, 9.0, NAN, NAN)
    assert np.array_equal(points.value, [0, 1, 2])
