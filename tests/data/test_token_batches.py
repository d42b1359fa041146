"""Batches with a bounded number of tokens: exact, and the same at any number of workers."""

from __future__ import annotations

import tracemalloc
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.orders import ByLength, TokenPlan
from samestep.errors import ConfigError, DataError
from tests.data.test_own_order import read_by
from tests.data.test_plan import assert_pure, lane_batches, samples


@st.composite
def plans(draw):
    """Return a function that makes the same plan again, and its lengths."""
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=80))
    lanes, seed = draw(st.integers(4, 12)), draw(st.integers(0, 2**63 - 1))
    order = ByLength(lengths, max_tokens=draw(st.integers(max(lengths), 2000)))
    shuffle = draw(st.booleans())
    return lambda: TokenPlan(len(lengths), lanes, seed, shuffle=shuffle, order=order), lengths


@given(plans())
def test_each_sample_is_used_once_within_the_bound(made):
    make, lengths = made
    plan = make()
    for epoch in range(3):
        steps = lane_batches(plan, epoch)
        assert sorted(samples(steps)) == list(range(len(lengths)))
        for lane in chain(*steps):
            assert len(lane) * max((lengths[index] for index in lane), default=0) <= plan.max_tokens
        assert all(map(all, steps[:-1]))  # no lane is empty, except in the last step
        assert_pure(make(), make(), steps, epoch)


@given(plans())
def test_a_step_has_the_same_samples_at_any_number_of_workers(made):
    make, _ = made
    alone = read_by(1, make())
    for workers in (2, 3, 4):
        assert read_by(workers, make()) == alone
    assert alone == {
        (epoch, step, lane): data
        for epoch in range(2)
        for step, lanes in enumerate(lane_batches(make(), epoch))
        for lane, data in enumerate(lanes)
        if data
    }


@given(plans())
def test_only_the_batch_of_the_shortest_samples_may_be_small(made):
    make, lengths = made
    batches = sorted(filter(None, chain(*lane_batches(make(), 0))), key=len)
    least = make().max_tokens // max(lengths)
    assert all(len(lane) >= min(least, len(lengths)) for lane in batches[1:])


def lengths_of_text(size):
    """Return lengths as texts have: from 1 to 1024, of which half are below 55."""
    drawn = np.random.default_rng(0).lognormal(4, 0.8, size)
    return np.clip(drawn.astype(int), 1, 1024)


def test_little_is_padding():
    lengths = lengths_of_text(50_000)
    steps = lane_batches(TokenPlan(50_000, 8, 3, order=ByLength(lengths, max_tokens=4096)), 0)
    lanes = [lane for lane in chain(*steps) if lane]
    padded = np.array([len(lane) * lengths[lane].max() for lane in lanes])
    assert 1 - lengths.sum() / padded.sum() < 0.06
    assert padded.mean() > 0.95 * 4096


def test_epochs_have_other_batches_in_another_order():
    plan = TokenPlan(1000, 4, 3, order=ByLength([100] * 500 + [10] * 500, max_tokens=1000))
    first, second = (
        [frozenset(lane) for lane in chain(*lane_batches(plan, epoch)) if lane] for epoch in (0, 1)
    )
    assert len(first) == len(second) == 50 + 5
    assert not set(first) & set(second)
    assert [len(lane) for lane in first] != [len(lane) for lane in second]
    assert len({min(lane) // 500 for lane in first[:8]}) == 2  # long ones and short ones


def test_without_shuffle_the_longest_samples_come_first():
    plan = TokenPlan(5, 2, 0, order=ByLength([2, 9, 5, 9, 1], max_tokens=18), shuffle=False)
    assert lane_batches(plan, 0) == lane_batches(plan, 1) == [[[1, 3], [2, 0, 4]]]


def test_token_batches_never_change():
    """A run that resumes under another version must get the same samples."""
    lengths = 1 + np.arange(10_000) * 7919 % 500
    plan = TokenPlan(10_000, 4, 7, order=ByLength(lengths, max_tokens=4096))
    assert plan.steps_per_epoch == 166
    assert plan.indices(3, 100, 2)[:5].tolist() == [8099, 2420, 7852, 3266, 3945]


def test_lengths_may_be_of_any_type():
    given_as = [
        [3, 1, 2],
        np.array([3, 1, 2], dtype=np.uint8),
        torch.tensor([3, 1, 2], dtype=torch.int32),
    ]
    described = [
        TokenPlan(3, 2, 0, order=ByLength(lengths, max_tokens=4)).describe() for lengths in given_as
    ]
    assert described == 3 * [described[0]]
    same, others = [3, 1, 2], ByLength([3, 2, 1], max_tokens=4)
    for plan in (
        TokenPlan(3, 2, 0, order=others),
        TokenPlan(3, 2, 0, order=ByLength(same, max_tokens=5)),
        TokenPlan(3, 2, 0, order=ByLength(same, max_tokens=4), shuffle=False),
    ):
        assert plan.describe() != described[0]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "error", "words"),
    [
        ([5, 1, 8], 7, DataError, "sample 2 has 8 tokens, more than max_tokens=7; increase"),
        ([5, 1], 7, DataError, "lengths has 2 entries for 3 samples"),
        ([5, 0, 1], 7, DataError, "lengths must be at least 1, got 0 for sample 1"),
        ([5, -3, 1], 7, DataError, "lengths must be at least 1, got -3 for sample 1"),
        ([5.0, 1.0, 1.0], 7, DataError, r"lengths must be .* whole numbers, got list of float64"),
        ([[5], [1], [1]], 7, DataError, r"lengths must be a one-dimensional .*\[3, 1\]"),
        (len, 7, DataError, "lengths must be .* got builtin_function"),
        ([5, 1, 1], 0, ConfigError, "max_tokens must be .* at least 1 .*, got 0"),
        ([5, 1, 1], 7.5, ConfigError, "max_tokens must be a whole number .*, got 7.5"),
        ([1, 1, 1], True, ConfigError, "max_tokens must be a whole number .*, got True"),
    ],
)
def test_unusable_lengths_are_refused(lengths, max_tokens, error, words):
    with pytest.raises(error, match=words):
        TokenPlan(3, 2, 0, order=ByLength(lengths, max_tokens=max_tokens))


def test_memory_is_at_most_8_bytes_per_sample():
    lengths = lengths_of_text(10**6)
    tracemalloc.start()
    try:
        plan = TokenPlan(10**6, 8, 0, order=ByLength(lengths, max_tokens=4096))
        plan.indices(0, plan.steps_per_epoch - 1, 0)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 6e6 <= kept < 8e6
    assert peak < 40e6
