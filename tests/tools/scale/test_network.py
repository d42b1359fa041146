"""`count_traffic` counts what the exchange sends, and links explain measured times."""

from __future__ import annotations

import math
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.step.exchange import buckets
from samestep.tools.scale.network import (
    LOSS_BYTES,
    LinkModel,
    Traffic,
    count_traffic,
    fit_links,
)
from tests.tools.scale.simulation import (
    AllToAll,
    Doubling,
    HostBarrier,
    RecordingWorld,
    record_calls,
)


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4])).filter(lambda pair: pair != (1, 1)),
    st.integers(0, 20),
    st.integers(1, 50_000),
    st.sampled_from([None, torch.bfloat16]),
)
def test_the_traffic_is_what_the_exchange_sends(hosts_and_workers, more_lanes, elements, round_to):
    hosts, per_host = hosts_and_workers
    workers = hosts * per_host
    lanes = workers + more_lanes
    traffic = count_traffic(workers, per_host, lanes, 4 * elements, 2 if round_to else 4)
    calls = [
        record_calls(rank, workers, per_host, lanes, elements, round_to) for rank in range(workers)
    ]
    sent = [sum(sum(call.nbytes) for call in some if isinstance(call, AllToAll)) for some in calls]
    by_host = [sum(sent[first : first + per_host]) for first in range(0, workers, per_host)]
    batches, doublings, barriers = (
        [call for call in calls[0] if isinstance(call, kind)]
        for kind in (AllToAll, Doubling, HostBarrier)
    )
    assert traffic.sent_bytes == max(by_host)
    assert traffic.batches == len(batches)
    assert traffic.messages == sum(sum(map(bool, call.nbytes)) for call in batches)
    loss_rounds = len(doublings) * math.ceil(math.log2(hosts))
    assert traffic.rounds == loss_rounds
    loss_bytes = sum(call.nbytes for call in doublings) * (hosts - 1)
    assert traffic.forwarded_bytes == loss_bytes
    assert traffic.host_messages == len(barriers) * (per_host - 1)


@pytest.mark.parametrize("round_to", [None, torch.bfloat16])
@pytest.mark.parametrize("tensors", [8, 80, 192, 1280])
def test_buckets_are_counted(tensors, round_to):
    parameters = [torch.nn.Parameter(torch.empty(1 << 14, device="meta")) for _ in range(tensors)]
    expected = len(buckets(parameters, RecordingWorld(0, 4, 1), round_to))
    sizes = tensors << 16, 2 if round_to else 4
    assert count_traffic(4, 1, 4, *sizes).batches == 2 * expected  # and to the partners
    assert count_traffic(4, 2, 4, *sizes).batches == expected  # two hosts swap


def test_two_hosts_swap_small_gradients_at_once():
    assert len(record_calls(0, 2, 1, 2, (8 << 20) // 4)) == 1 + 1  # losses, and one swap
    assert count_traffic(2, 1, 2, 512 << 20).batches == 65


def test_one_worker_sends_nothing():
    assert count_traffic(1, 8, 64, 10**9) == Traffic()


def test_losses_reach_each_host_once_in_few_rounds():
    assert count_traffic(1024, 8, 1024, 4).rounds == 7
    assert count_traffic(1024, 8, 1024, 4).forwarded_bytes == 127 * 8 * LOSS_BYTES


def test_links_explain_the_medians():
    nbytes = 1 << 20
    moved = count_traffic(2, 2, 2, nbytes).moved_bytes
    rounds = [[barrier, 6.0 + 4.0, 0.5, 0.5 + 2.0] for barrier in (1.0, 2.0, 9.0)]
    assert fit_links(rounds, nbytes) == (LinkModel(2.0, moved / 4.0), LinkModel(0.5, nbytes / 2.0))


@pytest.mark.parametrize(
    ("exchange", "large"), [(2.0, 0.25), (3.0, 0.5), (3.3, 0.55), (1e-9, 1e-9)]
)
def test_a_bandwidth_that_noise_hides_is_the_lowest_that_it_may_be(exchange, large):
    nbytes = 1 << 20
    moved = count_traffic(2, 2, 2, nbytes).moved_bytes
    links = fit_links([[1.0, exchange, 0.5, large]], nbytes)
    assert links == (
        LinkModel(1.0, moved / exchange, is_bound=True),
        LinkModel(0.5, nbytes / large, is_bound=True),
    )


@settings(max_examples=200)
@given(st.lists(st.tuples(*[st.floats(1e-7, 10.0)] * 4), min_size=1, max_size=5))
def test_a_bandwidth_is_at_most_ten_times_what_was_seen(rounds):
    nbytes = 1 << 20
    _, exchange, _, large = map(median, zip(*rounds, strict=True))
    memory, between = fit_links(rounds, nbytes)
    moved = count_traffic(2, 2, 2, nbytes).moved_bytes
    assert moved / exchange <= memory.bandwidth <= 10.01 * moved / exchange
    assert nbytes / large <= between.bandwidth <= 10.01 * nbytes / large
