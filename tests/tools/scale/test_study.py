"""Results and reports that can be checked by hand."""

from __future__ import annotations

import json
import re

import pytest

from samestep.tools.scale import report
from samestep.tools.scale.report import milliseconds, report_lines, table
from samestep.tools.scale.study import REMEDIES, Study, find_bottleneck
from samestep.tools.scale.timing import PARTS, Range, StepTiming, Workload


def _timing(compute, *, other=0.0, waiting=0.0):
    parts = {**dict.fromkeys(PARTS, 0.0), "compute": compute, "other": other, "exchange": waiting}
    return StepTiming(sum(parts.values()), parts, waiting)


def _study(timings, *, lanes=4, batch_size=64, capacity=8, load=0.0):
    return Study(Workload(lanes, batch_size, "cpu", 1), timings, capacity, load)


def _text(study):
    return "\n".join(report_lines(study))


def test_speedups_range_from_the_worst_to_the_best_measurements():
    study = _study(
        {
            1: [_timing(4.0), _timing(5.0), _timing(8.0)],
            2: [_timing(2.0), _timing(2.5), _timing(4.0)],
        }
    )
    assert study.speedup(1) == Range.of([1])
    assert study.speedup(2) == Range(1.0, 2.0, 4.0)
    assert study.bottleneck() is None
    assert "there is no bottleneck yet" in _text(study)
    assert _text(study).startswith("Use 2 workers: 2 times as fast as 1 (100%).\n")


def test_the_fewest_workers_count_as_ideal_if_one_was_not_measured():
    study = _study({2: [_timing(2.0)], 4: [_timing(1.0)]})
    assert study.speedup(2) == Range.of([2])
    assert study.speedup(4).middle == 4.0


def test_more_workers_are_forecast_up_to_the_lanes():
    study = _study({1: [_timing(12.0, other=1.0)], 2: [_timing(6.0, other=1.0)]}, lanes=12)
    assert study.forecast_workers() == [4, 8, 12]
    assert study.forecast.step(12) == Range.of([2.0])
    text = _text(study)
    assert "1000 (1000 to 1000) x lanes per worker, for data and compute, + 1000" in text
    assert re.search(r"^ +4 +4000 \(4000 to 4000\) +3.25 +81%$", text, re.MULTILINE)
    assert "More than 12 workers need more lanes (--lanes)" in text


def test_no_forecast_beyond_one_lane_per_worker():
    study = _study({1: [_timing(4.0)], 4: [_timing(1.0)]})
    assert study.forecast_workers() == []
    assert "More than 4 workers need more lanes" in _text(study)


@pytest.mark.parametrize("capacity", [1, 2])
def test_oversubscribed_workers_are_reported_and_excluded_from_the_forecast(capacity):
    timings = {1: [_timing(8.0)], 2: [_timing(4.0)], 4: [_timing(50.0)]}
    study = _study(timings, capacity=capacity)
    assert list(study.within_capacity) == [1, 2][:capacity]
    text = _text(study)
    assert f"with {'2, 4' if capacity == 1 else '4'} workers, which share cores" in text
    assert ("No forecast" in text) is (study.forecast is None) is (capacity == 1)
    assert list(_study({4: [_timing(50.0)]}, capacity=2).within_capacity) == [4]


def test_slower_workers_and_a_single_worker_are_reported():
    slower = _text(_study({1: [_timing(8.0)], 2: [_timing(16.0)]}))
    assert slower.startswith("Stay with 1 worker: 2 are 0.5 times as fast.\n")
    alone = _text(_study({1: [_timing(8.0)]}))
    assert alone.startswith("No verdict: it needs at least two worker counts")
    assert "No forecast: it needs runs of at least two workers" in alone


def test_a_busy_machine_is_reported():
    study = _study({1: [_timing(8.0)]}, capacity=2, load=1.5)
    assert _text(study).splitlines()[1].startswith("This machine was busy (load 1.5)")
    assert "busy" not in _text(_study({1: [_timing(8.0)]}))


def test_a_verdict_within_the_noise_says_so():
    noisy = {1: [_timing(8.0), _timing(12.0)], 2: [_timing(7.0), _timing(11.0)]}
    assert "These runs differ more among themselves" in _text(_study(noisy)).splitlines()[1]
    clear = {1: [_timing(8.0), _timing(12.0)], 2: [_timing(5.0), _timing(6.0)]}
    assert "among themselves" not in _text(_study(clear))


def test_the_study_is_json():
    study = _study({1: [_timing(8.0, other=1.0)], 2: [_timing(4.0, waiting=1.0)]})
    results = json.loads(json.dumps(study.to_json(), allow_nan=False))
    assert results["limit"]["part"] == "waiting"
    assert results["forecast"]["constant"] == {"lowest": 1.0, "middle": 1.0, "highest": 1.0}
    assert results["forecast"]["steps"] == {"4": {"lowest": 3.0, "middle": 3.0, "highest": 3.0}}
    assert _study({1: [_timing(8.0)]}).to_json()["forecast"] is None


def test_lines_fit_100_columns(monkeypatch):
    study = _study(
        {
            1: [_timing(9e3, other=1e3), _timing(1.0)],
            2: [_timing(8e3), _timing(1.5)],
            4: [_timing(7e3), _timing(1.25)],
        },
        lanes=64,
        batch_size=1_000_000,
        load=9.0,
    )
    assert max(map(len, report_lines(study))) <= 100
    monkeypatch.setattr(report, "WIDTH", 1000)  # tables fit without being wrapped
    rows = [line for line in report_lines(study) if re.match(r" *(workers|\d+)  ", line)]
    assert len(rows) == 2 * 4 + 5
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


def _bottleneck(alone, together, waiting=0.0):
    return find_bottleneck(
        *({**dict.fromkeys(PARTS, 0.0), **parts} for parts in (alone, together)), waiting, 2
    )


@pytest.mark.parametrize("part", PARTS)
def test_the_bottleneck_is_the_part_above_its_ideal_share(part):
    alone = {"compute": 8.0, "data": 1.0}
    together = {"compute": 4.0, "data": 0.5}
    together[part] = together.get(part, 0.0) + 2.0
    bottleneck = _bottleneck(alone, together)
    assert (bottleneck.part, bottleneck.seconds, bottleneck.remedy) == (part, 2.0, REMEDIES[part])


def test_a_plain_optimizer_is_not_called_sharded():
    parts = ({**dict.fromkeys(PARTS, 0.0), "optimizer": seconds} for seconds in (1.0, 9.0))
    before, after = parts
    assert "gather" not in find_bottleneck(before, after, 0.0, 2).remedy
    sharded = find_bottleneck(before, after, 0.0, 2, is_sharded=True).remedy
    assert "gather" in sharded
    assert "run.shard" not in sharded


@pytest.mark.parametrize(("waiting", "part"), [(1.5, "waiting"), (0.5, "exchange")])
def test_waiting_is_separate_from_the_exchange(waiting, part):
    together = {"compute": 4.0, "exchange": 2.0}
    assert _bottleneck({"compute": 8.0}, together, waiting).part == part


def test_there_is_no_bottleneck_near_the_ideal():
    assert _bottleneck({"compute": 8.0}, {"compute": 4.0, "exchange": 0.2}, 0.1) is None
