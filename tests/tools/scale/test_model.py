"""The model counts what the exchange really sends, and its times are those of a simulation, message by message."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.step.exchange import BUCKET_BYTES, buckets
from samestep.tools.scale.model import (
    Costs,
    Link,
    Network,
    exchange_seconds,
    predict,
    serial_fraction,
)
from samestep.tools.scale.ranges import Range
from samestep.tools.scale.traffic import MEETING_BYTES, Traffic, traffic
from tests.tools.scale.simulation import (
    AllToAll,
    Doubling,
    Meeting,
    Ring,
    Simulation,
    WrittenDown,
    calls_of,
)

FREE = math.inf  # the bandwidth of a memory that costs nothing

latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e6, 1e11)
sizes = st.integers(1, 50_000)  # elements
# hosts, and workers of each
teams = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4])).filter(
    lambda team: team[0] * team[1] > 1
)


@settings(max_examples=60)
@given(teams, st.integers(0, 20), sizes)
def test_what_is_counted_is_what_the_exchange_asks_for(team, more_lanes, elements):
    hosts, per_host = team
    workers = hosts * per_host
    lanes = workers + more_lanes
    counted = traffic(workers, per_host, lanes, 4 * elements)
    calls = [calls_of(rank, workers, per_host, lanes, elements) for rank in range(workers)]
    sent = [sum(sum(call.nbytes) for call in some if isinstance(call, AllToAll)) for some in calls]
    by_host = [sum(sent[first : first + per_host]) for first in range(0, workers, per_host)]
    batches = [call for call in calls[0] if isinstance(call, AllToAll)]
    rings = [call for call in calls[0] if isinstance(call, Ring)]
    meetings = [call for call in calls[0] if isinstance(call, Meeting)]
    assert counted.sent_bytes == max(by_host)
    assert counted.batches == len(batches)
    assert counted.messages == len(batches) * (workers - 1)
    doublings = [call for call in calls[0] if isinstance(call, Doubling)]
    assert counted.rounds == len(rings) * (workers - 1) + len(doublings) * math.ceil(
        math.log2(hosts)
    )
    assert counted.passed_bytes == sum(call.nbytes for call in rings) * (workers - 1) + sum(
        call.nbytes for call in doublings
    ) * (hosts - 1)
    assert counted.meetings == len(meetings) * (per_host - 1)


def test_buckets_are_counted_between_workers_that_share_no_memory():
    parameters = [
        torch.nn.Parameter(torch.empty(BUCKET_BYTES // 4, device="meta")) for _ in range(3)
    ]
    there = len(buckets(parameters, WrittenDown(0, 4, 1)))
    counted = traffic(4, 1, 4, 3 * BUCKET_BYTES)
    assert counted.batches == there == 3
    assert counted.rounds == 2 + there * 3
    assert traffic(4, 2, 4, 3 * BUCKET_BYTES).batches == 2  # the gradients, and what is gathered


def test_a_worker_alone_sends_nothing():
    assert traffic(1, 8, 64, 10**9) == Traffic()


@settings(max_examples=60)
@given(teams, st.integers(0, 2), sizes, latencies, bandwidths)
def test_times_are_those_of_the_simulation(team, doublings, elements, latency, bandwidth):
    """With one worker a host all send in step: the formula is exact. With several, one's latency passes while others use the link.

    A call then takes at least the longer of its latencies and its bytes, and at most both: no less
    than half of what the formula says.
    """
    hosts, per_host = team
    middle, simulated = _both(hosts, per_host, doublings, elements, latency, bandwidth)
    assert middle / 2 <= simulated * (1 + 1e-9)
    assert simulated <= middle * (1 + 1e-9)
    if per_host == 1:
        assert simulated == pytest.approx(middle, rel=1e-9)


@settings(max_examples=30)
@given(teams, st.integers(0, 2), sizes, latencies)
def test_times_are_exact_where_bytes_cost_nothing(team, doublings, elements, latency):
    hosts, per_host = team
    middle, simulated = _both(hosts, per_host, doublings, elements, latency, FREE)
    assert simulated == pytest.approx(middle, rel=1e-9)


@settings(max_examples=30)
@given(teams.filter(lambda team: team[0] > 1), st.integers(0, 2), sizes, bandwidths)
def test_times_are_those_of_the_bytes_where_messages_cost_nothing(
    team, doublings, elements, bandwidth
):
    hosts, per_host = team
    middle, simulated = _both(hosts, per_host, doublings, elements, 0.0, bandwidth)
    assert simulated == pytest.approx(middle, rel=1e-9)


def _both(hosts, per_host, doublings, elements, latency, bandwidth):
    """Return what the formula and the simulation say of an exchange in which each worker has one sum to send."""
    workers = hosts * per_host
    lanes = workers << doublings
    network = Network(Link(latency, FREE), Link(latency, bandwidth), per_host)
    calls = [calls_of(rank, workers, per_host, lanes, elements) for rank in range(workers)]
    expected = exchange_seconds(traffic(workers, per_host, lanes, 4 * elements), network, per_host)
    assert expected.lowest <= expected.middle * (1 + 1e-9)
    return expected.middle, Simulation(calls, network).play()


NETWORK = Network(Link(50e-6, 10e9), Link(20e-6, 1e9), 2)


def _costs(**changes):
    ones = {name: Range(0.5, 1.0, 2.0) for name in ("data", "compute", "optimizer", "constant")}
    return Costs(
        **{
            "lanes": 8,
            "nbytes": 4_000_000,
            "sharded": False,
            "waiting": Range(0.0, 0.0, 0.0),
            **ones,
            **changes,
        }
    )


def test_the_worker_with_most_lanes_decides():
    parts = {workers: predict(_costs(), NETWORK, workers).parts for workers in (1, 2, 3, 5, 8)}
    assert [part["compute"].middle for part in parts.values()] == [8.0, 4.0, 3.0, 2.0, 1.0]
    assert [part["data"].highest for part in parts.values()] == [16.0, 8.0, 6.0, 4.0, 2.0]
    assert all(
        part["other"] == Range(0.5, 1.0, 2.0) == part["optimizer"] for part in parts.values()
    )
    assert parts[1]["exchange"] == Range.exactly(0.0)


def test_workers_beyond_lanes_are_not_predicted_with_the_same_batch():
    assert predict(_costs(), NETWORK, 9) is None
    assert predict(_costs(), NETWORK, 9, lanes=9).parts["compute"].middle == 1.0


def test_a_sharded_optimizer_is_divided():
    assert predict(_costs(sharded=True), NETWORK, 4).parts["optimizer"] == Range(0.125, 0.25, 0.5)


def test_waiting_counts_with_the_exchange():
    waited = predict(_costs(waiting=Range(0.0, 3.0, 7.0)), NETWORK, 4).parts["exchange"]
    plain = predict(_costs(), NETWORK, 4).parts["exchange"]
    assert (waited.lowest, waited.middle, waited.highest) == (
        plain.lowest,
        plain.middle + 3.0,
        plain.highest + 7.0,
    )


def test_an_exchange_between_workers_with_a_lane_each_may_be_hidden():
    network = Network(NETWORK.memory, Link(1e-3, 1e6), 1)
    small, large = (
        predict(_costs(compute=Range.exactly(seconds)), network, 8).parts["exchange"]
        for seconds in (0.01, 100.0)
    )
    assert small.middle == large.middle
    assert large.lowest < small.lowest < small.middle
    two_lanes = predict(_costs(compute=Range.exactly(100.0)), network, 4).parts["exchange"]
    # three messages leave together: one latency and not three
    assert two_lanes.middle - two_lanes.lowest == pytest.approx(2e-3)


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]), latencies, bandwidths)
def test_a_worse_network_is_never_faster(workers, per_host, latency, bandwidth):
    sent = traffic(workers, per_host, workers, 10_000)
    better, worse = (
        exchange_seconds(sent, Network(NETWORK.memory, link, per_host), per_host)
        for link in (Link(latency, bandwidth), Link(2 * latency, bandwidth / 2))
    )
    assert better.lowest <= worse.lowest
    assert better.middle <= worse.middle
    assert better.highest <= worse.highest


@given(st.integers(2, 1024), st.floats(0.0, 1.0))
def test_the_serial_fraction_is_that_of_amdahls_law(workers, serial):
    speed_up = 1 / (serial + (1 - serial) / workers)
    assert serial_fraction(speed_up, workers) == pytest.approx(serial, abs=1e-9)


def test_losses_pass_a_host_once_and_in_few_rounds():
    assert traffic(1024, 8, 1024, 4).rounds == 7
    assert traffic(1024, 8, 1024, 4).passed_bytes == 127 * 8 * MEETING_BYTES
