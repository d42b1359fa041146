from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from samestep.data.batch import Batch, items_in, to_device


class Pair(NamedTuple):
    x: object
    y: object


def batch_of(counts):
    """Return a batch of the given samples a lane, and the list of what was loaded of it."""
    loaded = []

    def source():
        for lane, count in enumerate(counts):
            if count:
                loaded.append(lane)
                yield f"lane {lane}"

    return Batch(0, range(len(counts)), counts, source()), loaded


def test_lanes_without_samples_have_no_batch_and_a_batch_can_be_iterated_again():
    batch, loaded = batch_of([2, 0, 1, 0, 3])
    expected = ["lane 0", "lane 2", "lane 4"]
    assert next(iter(batch)) == "lane 0"
    assert loaded == [0]
    assert list(batch) == list(batch) == expected
    assert list(batch.lane_batches()) == [(0, "lane 0"), (2, "lane 2"), (4, "lane 4")]
    assert loaded == [0, 2, 4]


def test_two_iterations_at_once_see_the_same():
    batch, loaded = batch_of([1, 1, 0, 1])
    assert list(zip(batch, batch, strict=True)) == [
        (f"lane {lane}", f"lane {lane}") for lane in (0, 1, 3)
    ]
    assert loaded == [0, 1, 3]


def test_load_takes_what_nobody_iterated():
    batch, loaded = batch_of([1, 1, 1])
    next(iter(batch))
    batch.load()
    assert loaded == [0, 1, 2]
    assert batch.data_seconds > 0


def test_every_lane_has_items_where_no_plan_counts_them():
    batch = Batch(0, range(2, 4), None, iter("ab"))
    assert list(batch.lane_batches()) == [(2, "a"), (3, "b")]


@pytest.mark.parametrize(
    ("batch", "items"),
    [
        (torch.zeros(5, 2), 5),
        (np.zeros((4, 2)), 4),
        (torch.tensor(1.0), 1),
        ((torch.zeros(3), torch.zeros(3, 7)), 3),
        ({"a": torch.zeros(6), "b": 1}, 6),
        (Pair(torch.zeros(2), None), 2),
        ([torch.zeros(9, 9), torch.zeros(8, 8)], 2),
        (["word", "another", "third"], 3),
        ({}, 0),
        (7, 1),
    ],
    ids=str,
)
def test_items_are_counted(batch, items):
    assert items_in(batch) == items


def test_to_device_keeps_containers():
    tensor = torch.ones(2)
    for batch in (
        tensor,
        [tensor, "word"],
        (tensor, 3),
        Pair(tensor, None),
        {"x": [tensor]},
        OrderedDict(x=tensor),
        "word",
        None,
        4,
    ):
        moved = to_device(batch, "meta")
        assert type(moved) is type(batch)
    moved = to_device({"x": [Pair(tensor, (tensor, 1))]}, "meta")
    assert moved["x"][0].x.device.type == moved["x"][0].y[0].device.type == "meta"
