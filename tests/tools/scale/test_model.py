"""Step timings from a record, and predictions that agree with a simulation of all messages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import RecordError
from samestep.tools.scale.model import (
    FEWEST_RECORDED,
    PARTS,
    WARM_UP,
    Costs,
    Range,
    exchange_seconds,
    predict,
    read_timing,
    serial_fraction,
)
from samestep.tools.scale.network import LinkModel, Network, count_traffic
from tests.tools.scale.simulation import Simulation, record_calls

FREE = math.inf  # the bandwidth of a memory without cost
NETWORK = Network(LinkModel(50e-6, 10e9), LinkModel(20e-6, 1e9), 2)
RECORDED = {"data": 0.125, "compute": 0.25, "exchange": 0.125, "optimizer": 0.125, "snapshot": 0.0}

latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e6, 1e11)
sizes = st.integers(1, 50_000)  # elements
# hosts, and workers per host
groups = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4])).filter(
    lambda group: group[0] * group[1] > 1
)


def _events(seconds, workers=lambda step: [RECORDED]):
    """Return the timing events of steps with these durations, mixed with other events."""
    now, events = 1000.0, []
    for step, duration in enumerate(seconds):
        now += duration
        events += [
            {"event": "timing", "time": now, "step": step, "workers": workers(step)},
            {"event": "scalars", "time": now, "step": step},
        ]
    return events


def test_a_step_is_the_time_between_two_events_and_other_is_the_rest():
    timing = read_timing(_events([1.0] * 9))
    assert timing.step == 1.0
    assert timing.parts == {**RECORDED, "other": 0.375}
    assert tuple(timing.parts) == PARTS
    assert timing.waiting == 0.0


def test_the_first_steps_and_the_last_are_left_out():
    slow_ends = [50.0] * (WARM_UP + 1) + [1.0, 2.0, 3.0] + [50.0]
    assert len(slow_ends) == FEWEST_RECORDED
    assert read_timing(_events(slow_ends)).step == 2.0


def test_parts_are_means_over_workers_and_medians_over_steps():
    def workers(step):
        return [
            {"compute": 1.0 if step % 2 else 3.0, "exchange": 0.5},
            {"compute": 2.0 if step % 2 else 4.0, "exchange": 0.25},
        ]

    timing = read_timing(_events([9.0] * 11, workers))  # uses steps 4 to 9: three of each kind
    assert timing.parts["compute"] == 2.5
    assert timing.parts["exchange"] == 0.375
    assert timing.waiting == 0.125
    assert timing.parts["data"] == 0.0


def test_other_is_never_negative():
    assert read_timing(_events([0.25] * 9)).parts["other"] == 0.0


@pytest.mark.parametrize("steps", [0, 1, FEWEST_RECORDED - 1])
def test_too_few_steps_are_an_error(steps):
    message = f"the timing of at least {FEWEST_RECORDED} steps .*, got {steps}; increase --steps"
    with pytest.raises(RecordError, match=message):
        read_timing(_events([1.0] * steps))


@settings(max_examples=60)
@given(groups, st.integers(0, 2), sizes, latencies, bandwidths)
def test_predicted_times_agree_with_the_simulation(group, doublings, elements, latency, bandwidth):
    """With one worker per host, all send in lockstep and the formula is exact.

    With several, the latency of one worker overlaps the bytes of others. A call then takes at least
    the longer of its latencies and its bytes, and at most their sum: no less than half of the
    formula.
    """
    hosts, per_host = group
    middle, simulated = _both(hosts, per_host, doublings, elements, latency, bandwidth)
    assert middle / 2 <= simulated * (1 + 1e-9)
    assert simulated <= middle * (1 + 1e-9)
    if per_host == 1:
        assert simulated == pytest.approx(middle, rel=1e-9)


@settings(max_examples=30)
@given(groups, st.integers(0, 2), sizes, latencies)
def test_predicted_times_are_exact_if_bytes_are_free(group, doublings, elements, latency):
    hosts, per_host = group
    middle, simulated = _both(hosts, per_host, doublings, elements, latency, FREE)
    assert simulated == pytest.approx(middle, rel=1e-9)


@settings(max_examples=30)
@given(groups.filter(lambda group: group[0] > 1), st.integers(0, 2), sizes, bandwidths)
def test_predicted_times_are_exact_if_messages_are_free(group, doublings, elements, bandwidth):
    hosts, per_host = group
    middle, simulated = _both(hosts, per_host, doublings, elements, 0.0, bandwidth)
    assert simulated == pytest.approx(middle, rel=1e-9)


def _both(hosts, per_host, doublings, elements, latency, bandwidth):
    """Return the predicted and simulated time of an exchange with one sum per worker to send."""
    workers = hosts * per_host
    lanes = workers << doublings
    network = Network(LinkModel(latency, FREE), LinkModel(latency, bandwidth), per_host)
    calls = [record_calls(rank, workers, per_host, lanes, elements) for rank in range(workers)]
    traffic = count_traffic(workers, per_host, lanes, 4 * elements)
    expected = exchange_seconds(traffic, network, per_host)
    assert expected.lowest <= expected.middle * (1 + 1e-9)
    return expected.middle, Simulation(calls, network).play()


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


def test_the_worker_with_the_most_lanes_determines_the_time():
    parts = {workers: predict(_costs(), NETWORK, workers).parts for workers in (1, 2, 3, 5, 8)}
    assert [part["compute"].middle for part in parts.values()] == [8.0, 4.0, 3.0, 2.0, 1.0]
    assert [part["data"].highest for part in parts.values()] == [16.0, 8.0, 6.0, 4.0, 2.0]
    assert all(
        part["other"] == Range(0.5, 1.0, 2.0) == part["optimizer"] for part in parts.values()
    )
    assert parts[1]["exchange"] == Range.exactly(0.0)


def test_the_same_batch_needs_one_lane_per_worker():
    assert predict(_costs(), NETWORK, 9) is None
    assert predict(_costs(), NETWORK, 9, lanes=9).parts["compute"].middle == 1.0


def test_workers_share_the_update_of_a_sharded_optimizer():
    assert predict(_costs(sharded=True), NETWORK, 4).parts["optimizer"] == Range(0.125, 0.25, 0.5)


def test_waiting_is_part_of_the_exchange():
    waited = predict(_costs(waiting=Range(0.0, 3.0, 7.0)), NETWORK, 4).parts["exchange"]
    plain = predict(_costs(), NETWORK, 4).parts["exchange"]
    assert (waited.lowest, waited.middle, waited.highest) == (
        plain.lowest,
        plain.middle + 3.0,
        plain.highest + 7.0,
    )


@pytest.mark.parametrize("workers", [8, 4])
def test_computing_the_last_lane_may_hide_an_exchange_between_hosts(workers):
    def exchange(seconds, per_host):
        network = Network(NETWORK.memory, LinkModel(1e-3, 1e6), per_host)
        costs = _costs(compute=Range.exactly(seconds))
        return predict(costs, network, workers).parts["exchange"]

    small, large = exchange(0.01, 1), exchange(100.0, 1)
    assert small.middle == large.middle
    assert large.lowest < small.lowest < small.middle
    assert exchange(100.0, 2).lowest < exchange(0.01, 2).lowest
    assert exchange(0.01, 8) == exchange(100.0, 8)


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]), latencies, bandwidths)
def test_a_worse_network_is_never_faster(workers, per_host, latency, bandwidth):
    traffic = count_traffic(workers, per_host, workers, 10_000)
    better, worse = (
        exchange_seconds(traffic, Network(NETWORK.memory, link, per_host), per_host)
        for link in (LinkModel(latency, bandwidth), LinkModel(2 * latency, bandwidth / 2))
    )
    assert better.lowest <= worse.lowest
    assert better.middle <= worse.middle
    assert better.highest <= worse.highest


@given(st.integers(2, 1024), st.floats(0.0, 1.0))
def test_the_serial_fraction_follows_amdahls_law(workers, serial):
    speedup = 1 / (serial + (1 - serial) / workers)
    assert serial_fraction(speedup, workers) == pytest.approx(serial, abs=1e-9)
