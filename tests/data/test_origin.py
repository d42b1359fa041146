"""The samples of a batch have indices, and names where the data set has any."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import Subset

from samestep.data.orders import make_plan
from samestep.data.origin import Origin, name_of


class Named:
    """A data set with attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"samples": [("a.png", 0), ("b.png", 1), ("c.png", 0)]}, "b.png"),
        ({"imgs": [("a.png", 0), ("b.png", 1), ("c.png", 0)]}, "b.png"),
        ({"paths": [Path("x/a"), Path("x/b"), Path("x/c")]}, "x/b"),
        ({"paths": ["a", "b"], "names": ["n0", "n1", "n2"]}, "n1"),  # others are not of samples
        ({"describe": lambda index: f"row {index}", "paths": list("abc")}, "row 1"),
        ({"describe": lambda index: 1 / 0}, ""),
        ({"samples": [1.0, 2.0, 3.0]}, ""),
        ({"samples": ["a", "\x1b[31m" + "b" * 300, "c"]}, "\\x1b[31m" + "b" * 192),
        ({}, ""),
    ],
)
def test_names_are_found_in_attributes_or_a_method(attributes, name):
    assert name_of(Named(**attributes), 1) == name
    assert name_of(Subset(Subset(Named(**attributes), [2, 1]), [1]), 0) == name


def test_an_index_out_of_range_has_no_name():
    assert name_of(Named(paths=list("abc")), 7) == ""


def test_samples_of_a_lane_are_those_of_the_plan():
    plan = make_plan(*(6, 4, 2, 1), shuffle=False, drop_last=False, group_by=None, order=None)
    data = SimpleNamespace(paths=list("abcdef"), __len__=None)
    origin = Origin("train", data, plan, epoch=0, step=1, load_at=lambda *at: at)
    assert [origin.indices(lane) for lane in (0, 1)] == [[4], [5]]
    assert origin.describe(1) == ["5"]
    assert origin.load(1) == (0, 1, 1)
