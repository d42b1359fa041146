from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.watch.smoothing import BLOCK, Average

WEIGHTS = st.sampled_from([0.1, 0.5, 0.9, 0.999])
VALUES = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), max_size=4 * BLOCK)


def one_by_one(values, weight):
    mean, count = 0.0, 0
    for value in values:
        if math.isfinite(value):
            mean, count = weight * mean + (1 - weight) * value, count + 1
            yield mean / (1 - weight**count)
        else:
            yield math.nan


@given(VALUES, WEIGHTS)
def test_it_is_the_recurrence_with_the_bias_of_its_start_taken_out(values, weight):
    averages = Average(weight).over(np.asarray(values, dtype=float))
    np.testing.assert_allclose(averages, list(one_by_one(values, weight)), rtol=1e-9, atol=1e-6)


@given(VALUES, WEIGHTS, st.lists(st.integers(0, 4 * BLOCK), max_size=4))
def test_values_that_come_later_change_nothing_before_them_and_nothing_at_all_of_how_they_came(
    values, weight, cuts
):
    whole = np.asarray(values, dtype=float)
    expected, average = Average(weight).over(whole), Average(weight)
    for cut in sorted(cuts):
        np.testing.assert_allclose(average.over(whole[:cut]), expected[:cut], rtol=1e-12)
    np.testing.assert_allclose(average.over(whole), expected, rtol=1e-12)


@pytest.mark.parametrize("weight", [0.5, 0.999])
def test_a_constant_stays_what_it_is_from_the_first_value_on(weight):
    np.testing.assert_allclose(Average(weight).over(np.full(3 * BLOCK, 7.0)), 7.0, rtol=1e-9)
