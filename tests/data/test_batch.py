from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from samestep.data.batch import Batch, LaneStream, items_in, steps_left, stream_batches, to_device
from samestep.errors import ConfigError, DataError


class Pair(NamedTuple):
    x: object
    y: object


def batch_of(counts):
    """Return a batch with `counts` samples per lane, and a list of the lanes loaded so far."""
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


def test_concurrent_iterations_yield_the_same():
    batch, loaded = batch_of([1, 1, 0, 1])
    assert list(zip(batch, batch, strict=True)) == [
        (f"lane {lane}", f"lane {lane}") for lane in (0, 1, 3)
    ]
    assert loaded == [0, 1, 3]


def test_load_loads_the_lanes_not_iterated():
    batch, loaded = batch_of([1, 1, 1])
    next(iter(batch))
    batch.load()
    assert loaded == [0, 1, 2]
    assert batch.data_seconds > 0


def test_every_lane_has_items_without_a_plan():
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


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


def generator(lane):
    start = random.random()
    while True:
        yield lane, start, draws()


class Counter:
    """Reads its position at every item."""

    def __init__(self, lane):
        self.lane, self.start, self.position = lane, random.random(), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return self.lane, self.start, self.position, draws()

    def state_dict(self):
        return {"position": self.position, "start": self.start}

    def load_state_dict(self, state):
        self.position, self.start = state["position"], state["start"]


class Reader(Counter):
    """Reads its position when an iteration begins, as stateful data loaders do."""

    def __iter__(self):
        return self._from(self.position + 1)

    def _from(self, first):
        for self.position in itertools.count(first):
            yield self.lane, self.start, self.position, draws()


SOURCES = pytest.mark.parametrize("source", [generator, Counter, Reader])


def items(stream, number):
    return [next(stream) for _ in range(number)]


@SOURCES
def test_the_stream_of_a_lane_does_not_depend_on_the_worker(source):
    expected = {lane: items(LaneStream(source, "games", lane, seed=1), 4) for lane in range(4)}
    streams = {lane: LaneStream(source, "games", lane, seed=1) for lane in reversed(range(4))}
    for step in range(4):
        for lane in (2, 0, 3, 1):
            draws()
            assert next(streams[lane]) == expected[lane][step]
    others = [LaneStream(source, "games", 0, seed=2), LaneStream(source, "others", 0, seed=1)]
    everything = [*expected.values(), *(items(other, 4) for other in others)]
    assert len({draw for some in everything for item in some for draw in item[-1]}) == 3 * 4 * 6
    assert len({some[0][1] for some in everything}) == 6


@SOURCES
def test_a_stream_continues_from_its_state(source):
    stream = LaneStream(source, "games", 1, seed=0)
    for given in (0, 1, 3):
        whole = LaneStream(source, "games", 1, seed=0)
        items(whole, given)
        state = whole.state_dict()
        continued = LaneStream(source, "games", 1, seed=0)
        continued.load_state_dict(state)
        assert items(continued, 3) == items(whole, 3)
        assert continued.state_dict() == whole.state_dict()
    assert (stream.state_dict()["source"] is None) == (source is generator)


@SOURCES
def test_streams_do_not_change_the_generators(source):
    def after(disturb):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        disturb()
        return draws()

    assert after(lambda: items(LaneStream(source, "games", 0, seed=0), 3)) == after(lambda: None)


def test_a_stream_that_ends_is_an_error():
    stream = LaneStream(lambda lane: [lane] * 3, "frames", 2, seed=0)
    assert items(stream, 3) == [2, 2, 2]
    with pytest.raises(
        DataError, match="stream 'frames' of lane 2 must be endless, but ended after 3 items"
    ):
        next(stream)


def test_a_step_takes_one_item_of_each_lane():
    streams = {
        lane: LaneStream(lambda lane: itertools.count(100 * lane), "numbers", lane, seed=0)
        for lane in (2, 3)
    }
    taken = []
    for batch in itertools.islice(stream_batches(streams, range(2, 4)), 4):
        assert batch.counts is None
        taken.append(list(batch) if len(taken) % 2 == 0 else next(iter(batch)))
    assert taken == [[200, 300], 201, [202, 302], 203]


def test_batches_end_after_their_steps_without_an_extra_item():
    streams = {0: LaneStream(lambda _: itertools.count(), "numbers", 0, seed=0)}
    assert [list(batch) for batch in stream_batches(streams, range(1), steps=3)] == [[0], [1], [2]]
    assert next(streams[0]) == 3


@pytest.mark.parametrize(
    ("steps", "done", "left"),
    [(None, 7, None), (5, 0, 5), (5, 3, 2), (5, 5, 0), (5, 7, 0), (0, 0, 0)],
)
def test_steps_left_after_those_done(steps, done, left):
    assert steps_left(steps, done) == left


@pytest.mark.parametrize("steps", [-1, 2.0, "3", True])
def test_steps_are_a_whole_number(steps):
    with pytest.raises(
        ConfigError,
        match=f"steps must be a whole number of at least 0 or None, got {steps!r}",
    ):
        steps_left(steps, 0)
