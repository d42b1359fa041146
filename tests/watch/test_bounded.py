from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.watch.bounded import Thinned, newest_of_each


def appended(count, limit):
    series = Thinned(limit)
    for number in range(count):
        series.append(number)
    return series


@given(st.integers(0, 60), st.integers(1, 10))
def test_thinned_items_are_even_and_keep_both_ends(count, limit):
    series, stride = appended(count, limit), 1
    while len(range(0, count, stride)) > limit:
        stride *= 2
    assert list(series) == sorted({*range(0, count, stride), *range(count)[-1:]})
    assert len(series) == len(list(series)) <= limit + 1
    assert series.count == count


@given(st.integers(1, 60), st.integers(1, 10), st.integers(0, 60))
def test_filtered_items_go_on(count, limit, last):
    series = appended(count, limit)
    series.filter(lambda number: number < last)
    left = list(series)
    assert left == [number for number in appended(count, limit) if number < last]
    for number in range(100, 200):
        series.append(number)
    assert list(series)[-1] == 199
    assert list(series)[:1] == (left[:1] or [100])
    assert len(series) <= limit + 1


def test_a_smaller_bound_keeps_both_ends():
    series = appended(9, 20)
    series.bound(2)
    assert list(series) == [0, 8]
    series.append(9)
    assert list(series) == [0, 8, 9]


@given(st.lists(st.sampled_from("abc") | st.text(max_size=2), min_size=9), st.integers(8, 20))
def test_the_newest_of_each_kind_stay_within_the_limit(kinds, limit):
    items = list(range(len(kinds)))
    kept = newest_of_each(items, kinds, limit)
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert len(kept) <= 1 + limit * 3 // 4
    for kind in set(kinds):
        numbers = [number for number in items if kinds[number] == kind and number]
        of_kind = [number for number in kept if kinds[number] == kind and number]
        assert of_kind == numbers[len(numbers) - len(of_kind) :]


@pytest.mark.parametrize("frequent", [1, 2])
def test_all_of_a_rare_kind_stay(frequent):
    kinds = ["started", *["rare", *[f"kind {number % frequent}" for number in range(40)]] * 3]
    kept = [kinds[number] for number in newest_of_each(range(len(kinds)), kinds, 60)]
    counts = Counter(kept)
    assert (counts.pop("started"), counts.pop("rare")) == (1, 3)
    assert len(set(counts.values())) == 1
    assert sum(counts.values()) >= 20
