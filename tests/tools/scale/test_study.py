"""Results and advice that can be checked by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.scale import report
from samestep.tools.scale.model import PARTS, Range, StepTiming
from samestep.tools.scale.network import LinkModel, Network
from samestep.tools.scale.report import milliseconds, report_lines, table
from samestep.tools.scale.study import (
    REMEDIES,
    LearningRate,
    Machine,
    Study,
    find_bottleneck,
    learning_rates,
    recommend_lanes,
)
from samestep.tools.scale.trials import MemoryModel, Workload

FREE = LinkModel(1e-12, 1e30)


def _timing(compute, *, other=0.0, optimizer=0.0, waiting=0.0):
    parts = {
        **dict.fromkeys(PARTS, 0.0),
        "compute": compute,
        "other": other,
        "optimizer": optimizer,
        "exchange": waiting,
    }
    return StepTiming(sum(parts.values()), parts, waiting)


def _study(
    timings, *, batch_size=64, capacity=8, load=0.0, between=FREE, per_host=8, learning_rate=None
):
    return Study(
        Workload(4, 4_000_000, batch_size, "cpu", 1, sharded=False),
        timings,
        Network(FREE, between, per_host),
        network_is_given=True,
        memory=None,
        machine=Machine(capacity, load, 10**9),
        learning_rate=learning_rate,
    )


def _text(study):
    return "\n".join(report_lines(study))


def test_speedups_range_from_the_worst_to_the_best_measurements():
    study = _study(
        {
            1: [_timing(4.0), _timing(5.0), _timing(8.0)],
            2: [_timing(2.0), _timing(2.5), _timing(4.0)],
        }
    )
    assert study.speedup(1) == Range.exactly(1)
    assert study.speedup(2) == Range(1.0, 2.0, 4.0)
    assert study.serial_fraction() == 0.0
    assert study.bottleneck() is None
    assert "there is no bottleneck yet" in _text(study)


def test_the_fewest_workers_count_as_ideal_if_one_was_not_measured():
    study = _study({2: [_timing(2.0)], 4: [_timing(1.0)]})
    assert study.speedup(2) == Range.exactly(2)
    assert study.speedup(4).middle == 4.0


def test_fewer_workers_predict_more_workers():
    study = _study({1: [_timing(8.0, other=1.0)], 2: [_timing(4.0, other=1.0)]})
    workers, expected = study.check()
    assert workers == 2
    assert expected.middle == pytest.approx(5.0)
    assert study.same_batch(4).step.middle == pytest.approx(3.0)
    assert study.predicted_speedup(study.same_batch(4)).middle == pytest.approx(3.0)
    assert study.serial_fraction() == pytest.approx(1 / 9)
    assert "were no faster" not in _text(study)
    assert "the speedup is at most 9 (Amdahl 1967)" in _text(study)


def test_oversubscribed_workers_are_reported_and_excluded_from_the_model():
    study = _study({1: [_timing(8.0)], 2: [_timing(4.0)], 4: [_timing(50.0)]}, capacity=2)
    assert list(study.modeled) == [1, 2]
    assert study.costs.compute == Range.exactly(2.0)
    assert study.check()[0] == 2
    assert "Measurements with 4 workers, which share cores" in _text(study)
    assert list(_study({4: [_timing(50.0)]}, capacity=2).modeled) == [4]


def test_the_same_lane_batch_is_compared_with_one_worker_and_the_same_lanes():
    study = _study({1: [_timing(8.0, other=1.0)]})
    larger = study.same_lane_batch(64)
    assert larger.lanes == 64
    assert larger.step.middle == pytest.approx(3.0)
    assert study.predicted_speedup(larger).middle == pytest.approx((64 * 2.0 + 1.0) / 3.0)
    assert study.same_batch(64) is None
    assert study.check() is None
    assert "measure at least two worker counts" in _text(study)


def test_latency_and_bandwidth_of_the_network_need_different_remedies():
    slow, narrow = (
        _study({1: [_timing(0.1)]}, between=link, per_host=1)
        for link in (LinkModel(1e-2, 1e12), LinkModel(1e-9, 1e3))
    )
    assert slow.latency_share(1024) == pytest.approx(1.0)
    assert "use fewer, larger workers" in _text(slow)
    assert narrow.latency_share(1024) == pytest.approx(0.0, abs=1e-3)
    assert "or more bandwidth" in _text(narrow)


def test_advice_on_lanes_and_learning_rates_needs_the_batch_size():
    report = _text(
        _study({1: [_timing(8.0, other=0.99)], 2: [_timing(4.0, other=0.99)]}, learning_rate=0.1)
    )
    # each of 8 lanes still computes for longer than 0.99 s
    assert "8 for up to 8 workers, 8 for up to 64 workers" in report
    assert "now 0.1 at batch size 64" in report
    assert re.search(
        r"^ +8 +128 +0\.2 \(0\.1\) +0\.141 \(0\.1\) +5 epochs +0\.8, 0\.998$", report, re.MULTILINE
    )
    assert "the record has no batch size" in _text(_study({1: [_timing(8.0)]}, batch_size=None))


def test_workers_share_the_memory_for_the_largest_lane_batch():
    study = _study({1: [_timing(8.0)], 2: [_timing(4.0)]})
    assert study.largest_lane_batch(2) is None
    measured = replace(study, memory=MemoryModel(100e6, 1e6))
    assert measured.largest_lane_batch(2) == 400
    assert "about 400 samples with 2 workers in 1 GB" in _text(measured)


def test_a_busy_machine_is_reported():
    assert "This machine was busy (load 1.5)" in _text(
        _study({1: [_timing(8.0)]}, capacity=2, load=1.5)
    )
    assert "busy" not in _text(_study({1: [_timing(8.0)]}))


def test_the_study_is_json():
    study = _study({1: [_timing(8.0, other=1.0)], 2: [_timing(4.0, waiting=1.0)]})
    report = json.loads(json.dumps(study.to_json(), allow_nan=False))
    assert report["limit"]["part"] == "waiting"
    assert report["check"]["workers"] == 2
    assert report["same_global_batch"] == [None] * 3


NOISY = LinkModel(20e-6, 5e9, is_bound=True)


@pytest.mark.parametrize(
    ("memory", "between", "is_given", "bounds"),
    [
        (NOISY, FREE, True, 1),
        (FREE, NOISY, False, 1),
        (NOISY, NOISY, False, 2),
        (FREE, FREE, False, 0),
    ],
)
def test_a_bandwidth_that_noise_hides_is_not_printed_as_measured(memory, between, is_given, bounds):
    study = replace(
        _study({1: [_timing(1.0)], 2: [_timing(0.6)]}),
        network=Network(memory, between, 8),
        network_is_given=is_given,
    )
    text = _text(study)
    assert text.count("20 us per message, at least 5 GB/s") == bounds
    assert ("too noisy to estimate the bandwidth" in text) is (bounds > 0)
    assert json.loads(json.dumps(study.to_json()))["network"]["memory"]["is_bound"] is (
        memory is NOISY
    )


def test_lines_fit_100_columns(monkeypatch):
    study = replace(
        _study(
            {1: [_timing(9e3, other=1e3), _timing(1.0)], 2: [_timing(8e3), _timing(1.5)]},
            batch_size=1_000_000,
            load=9.0,
            learning_rate=1.23456e-7,
        ),
        network=Network(NOISY, LinkModel(1.0, 1e12, is_bound=True), 8),
        network_is_given=False,
        memory=MemoryModel(100e6, 1.0),
    )
    assert max(map(len, report_lines(study))) <= 100
    monkeypatch.setattr(report, "WIDTH", 1000)  # tables fit without being wrapped
    rows = [line for line in report_lines(study) if re.match(r" *(workers|\d+)  ", line)]
    assert len(rows) == 2 * 3 + 3 * 4
    assert max(map(len, rows)) <= 100


def test_columns_are_aligned():
    assert list(table([["a", "bcd"], ["12", "3"]])) == [" a  bcd", "12    3"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0"), (0.00123456, "1.23"), (0.12345, "123"), (12.3456, "12346")]
)
def test_milliseconds_have_three_digits(seconds, text):
    assert milliseconds(seconds) == text


def _parts(**seconds):
    return {**dict.fromkeys(PARTS, 0.0), **seconds}


@pytest.mark.parametrize("part", PARTS)
def test_the_bottleneck_is_the_part_above_its_ideal_share(part):
    alone = _parts(compute=8.0, data=1.0)
    together = {name: seconds / 2 for name, seconds in alone.items()}
    together[part] += 2.0
    bottleneck = find_bottleneck(alone, together, 0.0, 2, sharded=False)
    assert (bottleneck.part, bottleneck.seconds, bottleneck.remedy) == (part, 2.0, REMEDIES[part])


def test_waiting_is_separate_from_the_exchange():
    assert (
        find_bottleneck(
            _parts(compute=8.0), _parts(compute=4.0, exchange=2.0), 1.5, 2, sharded=False
        ).part
        == "waiting"
    )
    assert (
        find_bottleneck(
            _parts(compute=8.0), _parts(compute=4.0, exchange=2.0), 0.5, 2, sharded=False
        ).part
        == "exchange"
    )


def test_a_sharded_optimizer_needs_another_remedy():
    alone, together = _parts(compute=8.0, optimizer=2.0), _parts(compute=4.0, optimizer=2.0)
    assert "run.shard" in find_bottleneck(alone, together, 0.0, 2, sharded=False).remedy
    assert "run.shard" not in find_bottleneck(alone, together, 0.0, 2, sharded=True).remedy


def test_there_is_no_bottleneck_near_the_ideal():
    assert (
        find_bottleneck(
            _parts(compute=8.0), _parts(compute=4.0, exchange=0.2), 0.1, 2, sharded=False
        )
        is None
    )


@pytest.mark.parametrize(
    ("batch_size", "workers", "overhead", "lanes"),
    [
        (256, 64, 0.0, 64),
        # a power of two divides evenly among all smaller powers of two
        (256, 65, 0.0, 128),
        (32, 1024, 0.0, 32),  # never more lanes than samples
        (256, 1024, 0.5, 16),  # 8 / 16 = 0.5
        (256, 1024, 100.0, 1),
        (256, 1, 0.0, 1),
    ],
)
def test_recommended_lanes_compute_longer_than_the_rest_of_a_step(
    batch_size, workers, overhead, lanes
):
    assert recommend_lanes(batch_size, workers, 8.0, lambda _: overhead) == lanes


def test_learning_rates_follow_the_two_rules():
    linear, root = learning_rates(0.1, 256, 1024)
    # Goyal et al.: 0.1 at 256
    assert linear == LearningRate(0.4, 0.1, None)
    assert (root.rate, root.warm_up_from) == (0.2, 0.1)
    assert root.betas == pytest.approx((0.6, 0.996))


def test_adams_betas_are_none_if_one_is_not_positive():
    assert learning_rates(0.1, 64, 64 * 16)[1].betas is None
    assert learning_rates(0.1, 64, 64 * 9)[1].betas == pytest.approx((0.1, 0.991))


@given(st.floats(1e-6, 10.0), st.integers(1, 10**6), st.integers(1, 10**6))
def test_scaling_back_restores_the_learning_rate(rate, now, new):
    both = zip(learning_rates(rate, now, new), learning_rates(1.0, new, now), strict=True)
    for scaled, back in both:
        assert scaled.rate * back.rate == pytest.approx(rate)
        assert scaled.warm_up_from <= rate
