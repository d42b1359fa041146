from __future__ import annotations

import pytest
import torch

from benchmarks import growth_samples, growth_steps
from benchmarks.turns import in_turn, table
from tests.workers import run_workers

pytestmark = pytest.mark.filterwarnings("default")  # warnings of peers are not ours


@pytest.mark.parametrize("parameters", [10_000, 100_000, 25_000_000, 100_000_000])
def test_a_network_has_about_the_requested_number_of_parameters(parameters):
    with torch.device("meta"):
        network = growth_steps.network(parameters)
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(
        parameters, rel=0.02
    )


@pytest.mark.long
@pytest.mark.parametrize("way", ["samestep", "ddp", "zero"])
def test_workers_measure_time_and_memory_of_their_steps(way):
    figures = run_workers(growth_steps.WAYS[way], 2, 10_000, 5)
    assert figures[0] == figures[1]
    assert figures[0]["step_milliseconds"] > 0
    assert figures[0]["memory_megabytes"] > 10


@pytest.mark.parametrize("way", growth_samples.WAYS)
def test_batches_hold_every_sample_once(way, monkeypatch):
    monkeypatch.setattr(growth_samples, "BATCHES", 4)
    seen = []
    monkeypatch.setattr(
        growth_samples, "as_they_are", lambda samples: seen.extend(samples) or samples
    )
    assert growth_samples.WAYS[way](growth_samples.Indices(1000)).keys() >= {
        "first_milliseconds",
        "batch_microseconds",
    }
    seen = seen[-1000:]  # the first loads of samestep are compared with each other
    assert sorted(seen) == list(range(1000))
    assert seen != sorted(seen)


def test_each_round_starts_with_another_contender():
    order = []
    positions = in_turn(
        {name: lambda name=name: order.append(name) or len(order) for name in "abc"}, 3
    )
    assert "".join(order) == "abcbcacab"
    assert positions == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_table_compares_the_first_contender_with_its_best_peer_round_by_round():
    seconds = {"ours": [2.0, 3.0], "slow": [9.0, 9.0], "fast": [4.0, 2.0], "floor": [1.0, 1.0]}
    text = table("seconds", {"one": seconds, "two": {"ours": [5.0, 6.0]}}, no_peers=["floor"])
    assert text.splitlines()[0] == "| seconds | ours | slow | fast | floor | ours / best peer |"
    assert text.splitlines()[2].endswith("| 1.00 (1.00 to 1.00) | 1.00 (0.50 to 1.50) of fast |")
    assert text.splitlines()[3] == "| two | 5.50 (5.00 to 6.00) |  |  |  |  |"


@pytest.mark.parametrize(
    ("ours", "more_is_better", "loses"),
    [(1.0, True, True), (1.0, False, False), (3.0, True, False), (3.0, False, True)],
)
def test_a_table_says_who_loses(ours, more_is_better, loses):
    text = table("title", {"one": {"ours": [ours], "peer": [2.0]}}, more_is_better=more_is_better)
    assert ("of peer: loses" in text) == loses
