"""What is advised follows from what was measured by rules that are written down."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.scale.advice import TO_DO, lanes_to_choose, learning_rates, limit_of, memory_of
from samestep.tools.scale.timing import PARTS, Timing
from samestep.tools.scale.trials import Job, Trial


def _parts(**seconds):
    return {**dict.fromkeys(PARTS, 0.0), **seconds}


@pytest.mark.parametrize("part", PARTS)
def test_the_part_beyond_its_share_is_what_limits(part):
    alone = _parts(compute=8.0, data=1.0)
    together = {name: seconds / 2 for name, seconds in alone.items()}
    together[part] += 2.0
    limit = limit_of(alone, together, 0.0, 2, sharded=False)
    assert (limit.part, limit.seconds, limit.to_do) == (part, 2.0, TO_DO[part])


def test_waiting_is_told_from_the_exchange():
    assert (
        limit_of(_parts(compute=8.0), _parts(compute=4.0, exchange=2.0), 1.5, 2, sharded=False).part
        == "waiting"
    )
    assert (
        limit_of(_parts(compute=8.0), _parts(compute=4.0, exchange=2.0), 0.5, 2, sharded=False).part
        == "exchange"
    )


def test_a_sharded_optimizer_is_not_told_to_be_sharded():
    alone, together = _parts(compute=8.0, optimizer=2.0), _parts(compute=4.0, optimizer=2.0)
    assert "run.shard" in limit_of(alone, together, 0.0, 2, sharded=False).to_do
    assert "run.shard" not in limit_of(alone, together, 0.0, 2, sharded=True).to_do


def test_nothing_limits_what_is_nearly_ideal():
    assert (
        limit_of(_parts(compute=8.0), _parts(compute=4.0, exchange=0.2), 0.1, 2, sharded=False)
        is None
    )


def _trial(lanes, peak_bytes, *, workers=1, batch_size=64, nbytes=1000):
    return Trial(
        workers,
        Timing(1.0, _parts(), 0.0),
        peak_bytes,
        Job(lanes, nbytes, batch_size, "cpu", 1, None),
    )


@given(
    st.integers(1, 10**9),
    st.integers(1, 10**8),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 10**6),
)
def test_the_line_through_two_lane_batches_gives_the_largest_that_fits(
    fixed, a_sample, lanes, nbytes
):
    def peak(lanes):
        return fixed + nbytes * int(math.log2(lanes)) + a_sample * 64 // lanes

    memory = memory_of(
        _trial(lanes, peak(lanes), nbytes=nbytes), _trial(2 * lanes, peak(2 * lanes), nbytes=nbytes)
    )
    if memory is None:
        assert a_sample * 32 // lanes < 0.03 * peak(lanes)
        return
    assert memory.a_sample == pytest.approx(a_sample, rel=1e-6, abs=1)
    largest = memory.largest_lane_batch(peak(lanes) * 3)
    assert (
        memory.fixed + largest * memory.a_sample
        <= peak(lanes) * 3
        < memory.fixed + (largest + 1) * memory.a_sample + 1
    )
    assert memory.largest_lane_batch(0) == 0


def test_memory_that_does_not_grow_or_batches_that_are_unknown_give_no_line():
    assert memory_of(_trial(2, 1_000_000), _trial(4, 1_000_500)) is None
    assert (
        memory_of(_trial(2, 1_000_000, batch_size=None), _trial(4, 500_000, batch_size=None))
        is None
    )
    assert memory_of(_trial(2, 1_000_000, batch_size=1), _trial(4, 500_000, batch_size=1)) is None


@pytest.mark.parametrize(
    ("batch_size", "workers", "overhead", "lanes"),
    [
        (256, 64, 0.0, 64),
        # a power of two, so that every number of workers up to it has its lanes
        (256, 65, 0.0, 128),
        (32, 1024, 0.0, 32),  # never more lanes than samples
        (256, 1024, 0.5, 16),  # 8 / 16 = 0.5
        (256, 1024, 100.0, 1),
        (256, 1, 0.0, 1),
    ],
)
def test_lanes_are_as_many_as_still_compute_longer_than_the_rest_takes(
    batch_size, workers, overhead, lanes
):
    assert lanes_to_choose(batch_size, workers, 8.0, lambda _: overhead) == lanes


def test_learning_rates_follow_the_two_rules():
    linear, root = learning_rates(0.1, 256, 1024)
    # Goyal et al.: 0.1 at 256
    assert (linear.rate, linear.warm_up_from, linear.warm_up_epochs, linear.betas) == (
        0.4,
        0.1,
        5,
        None,
    )
    assert (root.rate, root.warm_up_from) == (0.2, 0.1)
    assert root.betas == pytest.approx((0.6, 0.996))


def test_adams_betas_are_given_up_where_none_are_left():
    assert learning_rates(0.1, 64, 64 * 16)[1].betas is None
    assert learning_rates(0.1, 64, 64 * 9)[1].betas == pytest.approx((0.1, 0.991))


@given(st.floats(1e-6, 10.0), st.integers(1, 10**6), st.integers(1, 10**6))
def test_rules_lead_back_to_where_they_came_from(rate, now, new):
    for there, back in zip(
        learning_rates(rate, now, new), learning_rates(1.0, new, now), strict=True
    ):
        assert there.rate * back.rate == pytest.approx(rate)
        assert there.warm_up_from <= rate
