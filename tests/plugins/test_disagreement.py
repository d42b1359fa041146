"""Votes on values that are the same on healthy workers."""

from __future__ import annotations

import pytest

from samestep.errors import RecheckError
from samestep.plugins.disagreement import Disagreement, differing, majority


def test_majority_does_not_depend_on_the_order_of_names():
    values = [{"a": 1, "b": 2}, {"b": 3, "a": 1}, {"b": 2, "a": 1}]
    assert majority(values) == values[0]
    assert majority(values[:2]) is None


def test_what_some_lack_differs():
    assert differing([{"a": 1, "b": 2}, {"a": 1}]) == ["b"]


@pytest.mark.parametrize(
    ("values", "earlier", "ranks", "is_certain"),
    [
        ([1, 1, 2], {}, [2], True),
        ([1, 1, 1], {0: [1], 1: [2]}, [1], True),
        ([1, 2], {}, [0, 1], False),
        ([1, 2, 3], {0: [1], 1: [4]}, [0, 1], False),
        ([1, 1, 2], {0: [3], 1: [1]}, [0, 1], False),  # most workers were wrong once
        ([1], {0: [2, 1]}, [0], False),
    ],
)
def test_those_that_most_others_outvote_are_blamed(values, earlier, ranks, is_certain):
    disagreement = Disagreement([("host", "cpu", value) for value in values], earlier)
    assert (disagreement.ranks, disagreement.is_certain) == (ranks, is_certain)
    error = disagreement.error(RecheckError, 0, "text", step=3, tensor="weight")
    assert (error.ranks, error.is_certain) == (tuple(ranks), is_certain)
    assert error.hosts == ("host",) * len(ranks)
    assert error.is_secondary == (is_certain and 0 not in ranks)
    assert not disagreement.error(RecheckError, 0, "text", blames=False).is_certain
