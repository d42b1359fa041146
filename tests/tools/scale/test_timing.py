"""Step timings from a record, and forecasts that follow from them."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import RecordError
from samestep.tools.scale.timing import (
    FEWEST_RECORDED,
    PARTS,
    WARM_UP,
    Range,
    StepTiming,
    Workload,
    fit_forecast,
    max_lanes_per_worker,
    read_timing,
    read_workload,
)

RECORDED = {"data": 0.125, "compute": 0.25, "exchange": 0.125, "optimizer": 0.125, "snapshot": 0.0}


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
    assert timing.parts == {**dict.fromkeys(PARTS, 0.0), **RECORDED, "other": 0.375}
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


def _timing(compute, *, data=0.0, other=0.0):
    parts = {**dict.fromkeys(PARTS, 0.0), "data": data, "compute": compute, "other": other}
    return StepTiming(sum(parts.values()), parts, 0.0)


seconds = st.floats(1e-4, 10.0)


@given(st.integers(2, 64), seconds, seconds, st.integers(2, 64), st.integers(1, 100))
def test_steps_that_follow_the_law_are_forecast(lanes, per_lane, constant, measured, workers):
    def timing(workers):
        return _timing(per_lane * max_lanes_per_worker(lanes, workers), other=constant)

    forecast = fit_forecast({1: [], measured: [timing(measured)]}, lanes)
    assert forecast.step(workers).middle == pytest.approx(timing(workers).step)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4), st.integers(2, 64))
def test_forecasts_are_between_the_measured_and_the_ideal_step(runs, workers):
    timings = [_timing(compute, other=other) for compute, other in runs]
    measured = Range.of(timing.step for timing in timings)
    step = fit_forecast({2: timings}, 64).step(workers)
    share = max_lanes_per_worker(64, workers) / 32  # of the lanes of a measured worker
    for forecast, slowest in zip(astuple(step), astuple(measured), strict=True):
        assert share * slowest * (1 - 1e-9) <= forecast <= slowest * (1 + 1e-9)


def test_the_range_covers_all_runs_of_the_most_workers():
    timings = {1: [_timing(99.0)], 2: [_timing(3.0, data=1.0, other=1.0), _timing(8.0)]}
    forecast = fit_forecast(timings, 4)
    assert forecast.per_lane == Range(2.0, 3.0, 4.0)
    assert forecast.constant == Range(0.0, 0.5, 1.0)
    assert forecast.step(4) == Range(3.0, 3.5, 4.0)


def test_the_worker_with_the_most_lanes_determines_the_time():
    forecast = fit_forecast({2: [_timing(4.0, other=1.0)]}, 8)
    assert [forecast.step(n).middle for n in (1, 2, 3, 5, 8, 9)] == [9.0, 5.0, 4.0, 3.0, 2.0, 2.0]


def test_one_worker_does_not_show_the_exchange():
    assert fit_forecast({1: [_timing(1.0)]}, 8) is None


STARTED = {"event": "started", "lanes": 4, "devices": ["cpu"], "config": {"threads": 1}}


def test_the_workload_is_read_from_the_record():
    loop = {"event": "loop", "batch_size": 12}
    assert read_workload([STARTED, loop]) == Workload(4, 12, "cpu", 1)
    stream = {"event": "loop", "batch_size": None}
    assert read_workload([STARTED, stream]).batch_size is None
    assert read_workload([STARTED, {"event": "sharded"}]).is_sharded
