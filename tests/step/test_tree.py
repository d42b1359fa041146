from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.step.layout import halves, lanes_of, subtrees, tree_sum

MOST_LANES = 64


def pair(left, right):
    """Add two values so that every order of additions gives a different result."""
    return (left, right)


def written_out(low, high):
    """Return the tree over [low, high) by definition, without the code under test."""
    length = high - low
    if length == 1:
        return low
    half = max(power for power in (1, 2, 4, 8, 16, 32) if power < length)
    return (written_out(low, low + half), written_out(low + half, high))


def added_up(ranges, lanes):
    """Add in parts, as workers with the lanes `ranges` do, and then finish the tree."""
    sums = {}
    for own_lanes in ranges:
        for span in subtrees(own_lanes, lanes):
            sums[span] = tree_sum(span, lambda s: s[0] if s[1] - s[0] == 1 else None, pair)
    return tree_sum((0, lanes), sums.get, pair)


def assert_maximal(spans, own_lanes, lanes):
    """Check that spans tile `own` and that none of them could be larger."""
    assert [lane for low, high in spans for lane in range(low, high)] == list(own_lanes)
    assert not {
        merged
        for merged in all_spans((0, lanes))
        if merged[0] in own_lanes and merged[1] - 1 in own_lanes
    } - set(inside(spans))


def all_spans(span):
    yield span
    if span[1] - span[0] > 1:
        for half in halves(span):
            yield from all_spans(half)


def inside(spans):
    return [below for span in spans for below in all_spans(span)]


def test_the_tree_matches_its_definition():
    assert halves((0, 8)) == ((0, 4), (4, 8))
    assert halves((3, 10)) == ((3, 7), (7, 10))
    assert [added_up([range(lanes)], lanes) for lanes in (1, 2, 3, 6)] == [
        0,
        (0, 1),
        ((0, 1), 2),
        (((0, 1), (2, 3)), (4, 5)),
    ]


@pytest.mark.parametrize("lanes", range(1, MOST_LANES + 1))
def test_any_number_of_workers_adds_in_the_same_order(lanes):
    expected = written_out(0, lanes)
    for workers in range(1, lanes + 1):
        ranges = [lanes_of(rank, workers, lanes) for rank in range(workers)]
        assert [lane for own_lanes in ranges for lane in own_lanes] == list(range(lanes))
        assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
        assert added_up(ranges, lanes) == expected


@given(st.data(), st.integers(1, MOST_LANES))
def test_any_partition_adds_in_the_same_order(data, lanes):
    cuts = sorted({0, lanes, *data.draw(st.sets(st.integers(0, lanes)))})
    ranges = [range(low, high) for low, high in pairwise(cuts)]
    for own_lanes in ranges:
        assert_maximal(subtrees(own_lanes, lanes), own_lanes, lanes)
    assert added_up(ranges, lanes) == written_out(0, lanes)
    assert subtrees(range(cuts[0], cuts[0]), lanes) == []


@given(st.integers(1, MOST_LANES))
def test_each_lane_is_requested_once_and_in_order(lanes):
    asked = []

    def value_of(span):
        if span[1] - span[0] > 1:
            return None
        asked.append(span[0])
        return span[0]

    tree_sum((0, lanes), value_of, pair)
    assert asked == list(range(lanes))
