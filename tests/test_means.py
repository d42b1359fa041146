from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.errors import EvaluationError
from samestep.metrics import Mean, Means
from samestep.step.lane_pass import LaneResult

COUNTS = st.integers(1, 10**6)
ANY = st.lists(st.tuples(st.floats(), COUNTS), min_size=1, max_size=12)
ORDINARY = st.lists(st.tuples(st.floats(-1e290, 1e290), COUNTS), min_size=1, max_size=12)
MOST = 1.7976931348623157e308


def bits(number):
    return "nan" if math.isnan(number) else struct.pack("<d", number)


@given(ANY, st.randoms(use_true_random=False))
@example([(MOST, 1), (MOST, 1), (-MOST, 1), (1.0, 1)], None)
@example([(MOST, 1), (MOST, 1), (-math.inf, 1)], None)
@example([(math.inf, 1), (1.0, 1), (-math.inf, 1), (math.nan, 1)], None)
def test_the_order_of_merging_does_not_matter(means, random):
    orders = [means, means[::-1], sorted(means, key=repr)]
    if random is not None:
        orders.append(random.sample(means, len(means)))
    assert len({bits(Mean.of(order).value) for order in orders}) == 1


@given(ORDINARY)
@example([(1e16, 1), (1.0, 1), (-1e16, 1)])
@example([(5e-324, 1), (5e-324, 2)])
def test_the_sum_is_rounded_once(means):
    mean = Mean.of(means)
    assert mean.total == float(sum(Fraction(total) for total, _ in means))
    assert mean.count == sum(count for _, count in means)
    assert mean.value == mean.total / mean.count


def test_a_mean_weighs_by_items():
    assert Mean.of([(3.0, 3), (5.0, 1)]).value == 2.0
    assert Mean.of([(14.0, 2)]).value == 7.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, MOST, MOST], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([MOST, MOST], math.inf),
        ([MOST, MOST, -MOST, -MOST], 0.0),
    ],
)
def test_nonfinite_values_follow_arithmetic_without_overflow(values, expected):
    assert bits(Mean.of([(value, 1) for value in values]).value) == bits(expected)


def test_a_mean_over_nothing_is_an_error():
    for empty in (Mean.of([]), Mean.of([(3.0, 0)])):
        with pytest.raises(EvaluationError, match="at least one item, got 0"):
            _ = empty.value


def test_means_are_a_mapping_in_order_of_appearance():
    results = [
        LaneResult(0, 0, 3, {"loss": 1.0, "accuracy": 0.5}),
        LaneResult(1, 0, 1, {"loss": 5.0, "accuracy": 0.0, "rare": 4.0}),
        LaneResult(3, 2, 4, {"loss": 3.0, "accuracy": 1.0}),
    ]
    means = Means(results)
    assert dict(means) == {"loss": 20 / 8, "accuracy": 5.5 / 8, "rare": 4.0}
    assert list(means) == ["loss", "accuracy", "rare"]
    assert len(means) == 3
    assert "loss" in means
    assert "other" not in means
    assert means.by_worker("loss") == [2.0, 3.0]
    assert means.by_worker("rare") == [4.0]
    assert repr(means) == "Means(loss=2.5, accuracy=0.6875, rare=4)"
    with pytest.raises(KeyError, match="no metric 'other'; available: loss, accuracy, rare"):
        means["other"]
    assert dict(Means([])) == {}
    with pytest.raises(KeyError, match="no lane had items"):
        Means([])["loss"]


def test_entries_of_items_are_summed_exactly_and_divided_once():
    # [right, samples] of two divisions of 397 samples into lanes
    exact = [
        Means([LaneResult(n, 0, 1, {"right": entries}) for n, entries in enumerate(division)])
        for division in ([[97.0, 100.0], [285.0, 297.0]], [[376.0, 391.0], [6.0, 6.0]])
    ]
    assert [means["right"] for means in exact] == [382 / 397] * 2
    of_a_sum = Means([LaneResult(0, 0, 8, {"loss": 4.0, "right": [3.0, 4.0]})], "sum")
    assert dict(of_a_sum) == {"loss": 0.5, "right": 0.75}


def test_pairs_are_summed_and_divided_once():
    results = [
        LaneResult(0, 0, 3, {"loss": 1.0, "code": [2.0, 0.5], "prose": [0.0, 0.0]}),
        LaneResult(1, 1, 5, {"loss": 1.0, "code": [0.0, 0.0], "prose": [0.0, 0.0]}),
        LaneResult(2, 1, 1, {"loss": 1.0, "code": [4.0, 1.0], "prose": [0.0, 0.0]}),
    ]
    for reduction in ("mean", "sum"):
        means = Means(results, reduction)
        assert list(means) == ["loss", "code"]  # prose has no item
        assert means["code"] == 6.0 / 1.5
        assert means.by_worker("code") == [4.0, 4.0]
        assert means.by_worker("prose") == []
        with pytest.raises(KeyError, match="no metric 'prose'; available: loss, code"):
            means["prose"]
