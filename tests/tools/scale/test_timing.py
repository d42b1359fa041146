"""Where the time of steps went, from the events of a record."""

from __future__ import annotations

import pytest

from samestep.errors import RecordError
from samestep.tools.scale.timing import FEWEST_RECORDED, PARTS, WARM_UP, read_timing


def _events(
    seconds,
    workers=lambda step: [
        {"data": 0.125, "compute": 0.25, "exchange": 0.125, "optimizer": 0.125, "snapshot": 0.0}
    ],
):
    """Return the timing events of steps that took so long, with others between them."""
    now, events = 1000.0, []
    for step, duration in enumerate(seconds):
        now += duration
        events += [
            {"event": "timing", "time": now, "step": step, "workers": workers(step)},
            {"event": "scalars", "time": now, "step": step},
        ]
    return events


def test_a_step_is_what_passes_between_two_events_and_other_is_the_rest():
    timing = read_timing(_events([1.0] * 9))
    assert timing.step == 1.0
    assert timing.parts == {
        "data": 0.125,
        "compute": 0.25,
        "exchange": 0.125,
        "optimizer": 0.125,
        "snapshot": 0.0,
        "other": 0.375,
    }
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

    timing = read_timing(_events([9.0] * 11, workers))  # steps 4 to 9 are left: three of each kind
    assert timing.parts["compute"] == 2.5
    assert timing.parts["exchange"] == 0.375
    assert timing.waiting == 0.125
    assert timing.parts["data"] == 0.0


def test_other_is_never_below_nothing():
    assert read_timing(_events([0.25] * 9)).parts["other"] == 0.0


@pytest.mark.parametrize("steps", [0, 1, FEWEST_RECORDED - 1])
def test_too_few_steps_are_an_error(steps):
    with pytest.raises(
        RecordError, match=f"the timing of {steps} steps; expected at least {FEWEST_RECORDED}"
    ):
        read_timing(_events([1.0] * steps))
