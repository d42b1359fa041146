from __future__ import annotations

import math

import pytest

from samestep.watch import groups
from samestep.watch.groups import mean_curve
from tests.watch.writing import loop, scalars, started, view_of


@pytest.fixture
def drawn(tmp_path):
    """Return a function that draws the mean of runs, each a dict of values by step."""

    def draw(*runs, axis="step", smooth=0.0, start=None, end=None, points=1000, seconds=1.0):
        views = []
        for number, values in enumerate(runs):
            events = (scalars(step, loss=value) for step, value in values.items())
            batch = loop(0, batch_size=4 * (number + 1))
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            timing = {"seconds": seconds, "start": 1000.0 * (number + 1)}
            views.append(view_of(folder, started(), batch, *events, **timing))
        return mean_curve(views, "loss", start, end, points, smooth, axis)

    return draw


def test_the_mean_of_runs_with_a_band_from_the_lowest_to_the_highest(drawn):
    assert drawn({0: 1.0, 1: 2.0}, {0: 3.0, 1: 2.5}, {0: 5.0, 1: 4.5}) == {
        "x": [0, 1],
        "value": [3, 3],
        "low": [1, 2],
        "high": [5, 4.5],
        "smooth": None,
        "runs": [3, 3],
        "spans": None,
        "points": 2,
        "exact": True,
    }


def test_a_run_counts_where_it_has_values_and_between_them(drawn):
    curve = drawn({0: 0.0, 4: 4.0}, {1: 3.0, 2: 6.0})
    assert curve["x"] == [0, 1, 2, 4]
    assert curve["value"] == [0, 2, 4, 4]
    assert curve["runs"] == [1, 2, 2, 1]
    assert drawn({0: 0.0, 4: 4.0}, {1: 3.0, 2: 6.0}, start=1, end=2)["value"] == [2, 4]


def test_values_that_are_not_finite_do_not_count(drawn):
    curve = drawn({0: 1.0, 1: math.nan, 2: math.inf}, {0: 3.0, 1: 5.0, 2: math.nan})
    assert (curve["value"], curve["runs"]) == ([2, 5, None], [2, 1, 0])
    assert (curve["low"], curve["high"]) == ([1, 5, None], [3, 5, None])


def test_moving_averages_are_averaged(drawn):
    curves = {0: 1.0, 1: 2.0, 2: 0.5}, {0: 3.0, 1: 1.0, 2: 4.0}
    both = drawn(*curves, smooth=0.5)["value"]
    alone = [drawn(curve, smooth=0.5)["value"] for curve in curves]
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(*alone, strict=True)])
    assert both != drawn(*curves)["value"]


def test_time_begins_with_each_run_and_samples_follow_its_batch_size(drawn):
    curves = {0: 1.0, 1: 2.0}, {0: 3.0, 1: 4.0}
    assert drawn(*curves, axis="time", seconds=0.5)["x"] == [1, 1.5]  # after a start and a loop
    samples = drawn(*curves, axis="samples")
    assert samples["x"] == [4, 8, 16]
    assert samples["value"] == [1, 2.5, 4]  # of 4 and 8 samples, 8 and 16


def test_many_points_are_averaged_within_spans(drawn, monkeypatch):
    monkeypatch.setattr(groups, "MOST_PLACES", 50)
    monkeypatch.setattr(groups, "SPANS", 10)
    high = {step: 10.0 + step % 10 for step in range(100)}
    curve = drawn({step: step % 10 for step in range(100)}, high, {0: 7.0, 99: 7.0})
    assert len(curve["x"]) == 10
    assert curve["value"] == pytest.approx([(4.5 + 14.5 + 7) / 3] * 10, rel=0.1)
    assert (curve["low"][5], curve["high"][5]) == (4.5, 14.5)  # means of a run, no single values
    assert not curve["exact"]


def test_runs_without_the_scalar_or_samples_are_an_error(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))
    with pytest.raises(KeyError):
        mean_curve([view], "other", None, None, 9, 0.0, "step")
    with pytest.raises(KeyError):
        mean_curve([view], "loss", None, None, 9, 0.0, "samples")
