"""`ShardStream`: shards without an index, read sequentially and shuffled in a buffer."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep as ss
from samestep.errors import ConfigError, DataError
from tests.data.test_permutation import assert_uniform

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


class Shards:
    """Shards of the given sizes: samples are (shard, number). Notes which ones were opened."""

    def __init__(self, sizes):
        self.sizes, self.opened = sizes, []

    def __call__(self, shard):
        self.opened.append(shard)
        return ((shard, number) for number in range(self.sizes[shard]))


def stream(sizes, *, lane=0, lanes=1, batch_size=1, **options):
    shards = sizes if isinstance(sizes, Shards) else Shards(sizes)
    return ss.ShardStream(
        range(len(shards.sizes)),
        shards,
        lane=lane,
        lanes=lanes,
        batch_size=batch_size,
        collate_fn=list,
        **options,
    )


def draw(source, count):
    return [batch[0] for batch in islice(source, count)]


@given(SIZES, st.integers(1, 5), st.integers(0, 2**63))
def test_lanes_share_the_shards_of_each_pass(sizes, lanes, seed):
    opened = []
    for lane in range(lanes):
        shards = Shards(sizes)
        draw(stream(shards, lane=lane, lanes=lanes, buffer=1, seed=seed), 100)
        opened.append(shards.opened)
    count = min(map(len, opened))
    in_turn = [opened[lane][number] for number in range(count) for lane in range(lanes)]
    passes = [in_turn[at : at + len(sizes)] for at in range(0, len(in_turn), len(sizes))]
    assert all(sorted(order) == list(range(len(sizes))) for order in passes[:-1])
    assert len(sizes) == 1 or len(set(map(tuple, passes))) > 1 or len(passes) < 12


@given(SIZES, st.integers(1, 30), st.integers(1, 60), st.integers(0, 2**63))
def test_a_buffer_neither_loses_nor_repeats_samples(sizes, buffer, count, seed):
    read = draw(stream(sizes, buffer=1, seed=seed), count + buffer - 1)
    shard_stream = stream(sizes, buffer=buffer, seed=seed)
    drawn = Counter(draw(shard_stream, count))
    held = Counter(read) - drawn
    assert held.total() == buffer - 1
    assert drawn <= Counter(read)
    again = stream(sizes, buffer=buffer, seed=seed)
    again.load_state_dict(shard_stream.state_dict())
    assert Counter(draw(again, 10 * buffer)) >= held - Counter(draw(again, 200 * buffer))


@given(SIZES, st.integers(1, 30), st.integers(0, 60), st.integers(1, 3), st.integers(1, 4))
def test_a_resume_continues_and_reads_only_what_the_buffer_needs(
    sizes, buffer, count, lanes, batch_size
):
    options = {"lane": lanes - 1, "lanes": lanes, "batch_size": batch_size, "buffer": buffer}
    shard_stream = stream(sizes, **options)
    list(islice(shard_stream, count))
    state = shard_stream.state_dict()
    expected = list(islice(shard_stream, 30))

    shards = Shards(sizes)
    resumed = stream(shards, **options)
    resumed.load_state_dict(state)
    needed = len({*state["buffer"][:, 0].tolist(), state["next"][0]})
    assert len(shards.opened) <= needed
    assert list(islice(resumed, 30)) == expected


def test_a_sample_is_equally_likely_in_each_part_of_a_pass():
    sizes, passes = [8] * 8, 400
    numbers = Counter()
    shard_stream = stream(sizes, buffer=64, seed=3)  # the buffer holds a pass
    draw(shard_stream, 64)
    for _ in range(passes):
        for place, (shard, number) in enumerate(draw(shard_stream, 64)):
            numbers[place // 8, 8 * shard + number] += 1
    counts = np.array([[numbers[part, sample] for sample in range(64)] for part in range(8)])
    assert_uniform(counts, 64 * 7)


def test_batches_are_collated_as_by_a_data_loader():
    shards = Shards([4])
    shard_stream = ss.ShardStream([0], shards, batch_size=3, lane=0, lanes=1, buffer=1)
    batch = next(shard_stream)
    assert [part.tolist() for part in batch] == [[0, 0, 0], [0, 1, 2]]
    assert all(isinstance(part, torch.Tensor) for part in batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"lanes": 0}, "lanes must be a whole number of at least 1"),
        ({"buffer": 1.5}, "buffer must be a whole number of at least 1"),
        ({"lane": 2, "lanes": 2}, "lane must be 0 to 1, as run.streams passes it, got 2"),
    ],
)
def test_wrong_numbers_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        stream([1], **options)


def test_shards_that_cannot_be_used_are_named():
    with pytest.raises(DataError, match="at least one element, got none"):
        stream([])
    with pytest.raises(DataError, match="the 3 shards are empty; check what read returns"):
        next(stream([0, 0, 0]))

    def read(shard):
        yield 1
        raise OSError("connection lost")

    broken = ss.ShardStream(["s3://a/1.tar"], read, batch_size=2, lane=0, lanes=1)
    with pytest.raises(
        DataError, match=r"cannot read shard s3://a/1\.tar: OSError: connection lost"
    ):
        next(broken)

    state = stream([4, 4])
    next(state)
    with pytest.raises(DataError, match="expected 2 shards, as before the resume, got 3"):
        stream([4, 4, 4]).load_state_dict(state.state_dict())
    with pytest.raises(DataError, match=r"shard \d has fewer samples than before the resume"):
        stream([1, 1]).load_state_dict(state.state_dict())
