from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

from samestep.data.batch import (
    Batch,
    Incomplete,
    LaneStream,
    samples_in,
    steps_left,
    stream_batches,
    to_device,
)
from samestep.errors import ConfigError, DataError


class Pair(NamedTuple):
    x: object
    y: object


@dataclass
class Columns:
    x: object
    y: object


def images(*widths):
    """Return a list of RGB images."""
    return [torch.zeros(3, 4, width) for width in widths]


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
    assert batch.size == 6
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
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        (np.zeros((4, 2)), 4),
        ((torch.zeros(3), torch.zeros(3, 7)), 3),
        ((torch.zeros(3, 2), torch.zeros(3, 7)), 3),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ({"a": torch.zeros(6), "b": 1, "c": "text", "d": ["one"] * 6}, 6),
        ({"epoch": torch.tensor(1), "x": [torch.zeros(6, 2), (torch.zeros(6), ["w"] * 6)]}, 6),
        (Pair(torch.zeros(2), None), 2),
        (Pair(torch.zeros(2, 3), torch.zeros(2, 4)), 2),
        (Columns(torch.zeros(2, 3), [1, 2.5]), 2),
        ([torch.zeros(9, 9), torch.zeros(8, 8)], 2),
        ((images(5, 6), [{"boxes": torch.zeros(9, 4)}, {"boxes": torch.zeros(8, 4)}]), 2),
        ([{"x": torch.zeros(3)}, {"x": torch.zeros(4)}, {"x": torch.zeros(3)}], 3),
        (["word", None, "third"], 3),
        ([torch.tensor(1), torch.tensor(2)], 2),
        (deque([1, 2, 3]), 3),
        ([], 0),
    ],
    ids=str,
)
def test_samples_are_counted(batch, samples):
    for planned in (None, 8):
        assert samples_in(batch, planned, "lane 0") == samples


@pytest.mark.parametrize("batch", [{}, 7, "text", torch.tensor(1.0), (1, "text"), object()])
def test_a_batch_without_a_length_counts_as_planned(batch):
    assert samples_in(batch, None, "lane 0") == 1
    assert samples_in(batch, 8, "lane 0") == 8


def test_a_batch_of_nothing_has_no_samples_if_some_were_planned():
    assert samples_in(None, 8, "lane 0") == 0
    assert samples_in(None, None, "lane 0") == 1


@pytest.mark.parametrize(
    ("batch", "planned", "words"),
    [
        (
            {"epoch": [1], "x": torch.zeros(32, 2)},
            None,
            r"its parts have different lengths \('epoch': 1, 'x': 32\)",
        ),
        ({"epoch": [1], "x": torch.zeros(32, 2)}, 32, "different lengths"),
        ((torch.zeros(4), torch.zeros(3)), 4, r"\(0: 4, 1: 3\)"),
        ([torch.zeros(32, 2), torch.zeros(32, 1)], None, "it can be read as 2 or 32 samples"),
        (images(5, 5, 5, 5), 5, "it can be read as 3 or 4 samples"),
    ],
)
def test_a_batch_that_cannot_be_counted_is_an_error(batch, planned, words):
    with pytest.raises(
        DataError, match=f"the samples in lane 7 cannot be counted: .*{words}.*pass count="
    ):
        samples_in(batch, planned, "lane 7")


@pytest.mark.parametrize(
    ("batch", "planned"),
    [
        ([torch.zeros(32, 2), torch.zeros(32, 1)], 32),
        (images(5, 5, 5, 5), 4),
        (((torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.zeros(2))), 2),
    ],
)
def test_the_plan_decides_between_two_readings(batch, planned):
    assert samples_in(batch, planned, "lane 0") == planned


def test_samples_are_those_that_are_there_unless_they_are_exact():
    three, two = torch.zeros(3), [torch.zeros(2, 1), torch.zeros(2, 1)]
    batch = Batch(0, range(3), [4, 4, 4], iter([three, Incomplete(two, 2), None]), is_exact=False)
    assert [batch.samples(lane, data) for lane, data in batch.lane_batches()] == [3, 2, 0]
    batch = Batch(0, range(2), [4, 4], iter([three, torch.zeros(2)]))
    assert [batch.samples(lane, data) for lane, data in batch.lane_batches()] == [4, 4]


def test_a_batch_is_not_taken_for_a_lane_batch():
    batch, _ = batch_of([1, 1])
    with pytest.raises(DataError, match=r"cannot be unpacked: .*one lane batch.*run.backward"):
        _, _ = batch
    with pytest.raises(DataError, match=r"no item 'x': .*one lane batch.*run.backward"):
        batch["x"]
    assert [*batch] == list(batch) == [data for data in batch]  # noqa: C416  three ways
    (only,) = batch_of([1])[0]
    assert only == "lane 0"


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
    assert (
        len({draw for lane_items in everything for item in lane_items for draw in item[-1]})
        == 3 * 4 * 6
    )
    assert len({lane_items[0][1] for lane_items in everything}) == 6


@SOURCES
def test_a_stream_continues_from_its_state(source):
    stream = LaneStream(source, "games", 1, seed=0)
    for count in (0, 1, 3):
        original = LaneStream(source, "games", 1, seed=0)
        items(original, count)
        state = original.state_dict()
        continued = LaneStream(source, "games", 1, seed=0)
        continued.load_state_dict(state)
        assert items(continued, 3) == items(original, 3)
        assert continued.state_dict() == original.state_dict()
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
    contents = []
    for batch in itertools.islice(stream_batches(streams, range(2, 4)), 4):
        assert batch.counts is None
        with pytest.raises(DataError, match="streams have no plan"):
            assert batch.size
        contents.append(list(batch) if len(contents) % 2 == 0 else next(iter(batch)))
    assert contents == [[200, 300], 201, [202, 302], 203]


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
