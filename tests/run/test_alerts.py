"""Losses that are not finite or unusually high cause an alert; others do not."""

from __future__ import annotations

import math
import random

import pytest

from samestep.config import Config
from samestep.data.batch import Batch
from samestep.record import open_record, read_events
from samestep.run.alerts import QUIET_STEPS, WARM_UP, LossAlerts
from samestep.step.lane_pass import LaneResult


class Watched:
    """Alerts about losses of two lanes; `kept` has the reasons for which snapshots are kept."""

    def __init__(self, directory, *, is_main=True, **options):
        self.kept, self.step = [], 0
        record = open_record(directory, writes=is_main)
        config = Config(dir=directory, **options)
        self.alerts = LossAlerts(record, config, self.kept.append, is_main=is_main)

    def add(self, *losses, count=1, call=0, **options):
        """Return the advice of the alert about a step with the losses of its lanes."""
        results = [LaneResult(n, 0, count, {"loss": loss}) for n, loss in enumerate(losses)]
        batch = Batch(0, range(2), None, iter(()))
        self.step += call == 0
        options = {"are_sums": False, **options}
        return self.alerts.look(batch, (self.step - 1, call), results, **options)

    def warm_up(self, steps=WARM_UP, scale=1.0):
        """Add falling losses with noise."""
        draw = random.Random(0)
        for step in range(steps):
            loss = scale * (2 + draw.random() / 2 - step / (10 * steps))
            assert self.add(loss, loss / 2) == ""


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def alerts_of(directory):
    return [event for event in read_events(directory) if event["event"] == "loss_alert"]


def test_a_spike_after_the_warm_up_is_one_alert(watched, tmp_path, caplog):
    watched.warm_up()
    assert watched.add(1.0, 50.0) == f"to look at it: {alerts_of(tmp_path)[0]['replay']}"
    assert watched.add(1.0, 50.0) == ""  # the same spike
    watched.warm_up(5)
    assert watched.add(1.0, 50.0) == ""  # too early for another alert of a finite loss
    (alert,) = alerts_of(tmp_path)
    assert (alert["step"], alert["lane"], alert["loss"]) == (WARM_UP, 1, 50.0)
    assert alert["losses"] == [[0, 1.0], [1, 50.0]]
    reason = f"the loss is 50 at step {WARM_UP} in lane 1, usually about 2"
    assert alert["reason"].startswith(reason)
    assert watched.kept == [alert["reason"]]
    assert reason in caplog.text
    watched.warm_up(QUIET_STEPS)
    assert watched.add(60.0, 1.0)


def test_a_spike_before_the_end_of_the_warm_up_is_none(watched, tmp_path):
    watched.warm_up(WARM_UP - 1)
    assert watched.add(1.0, 50.0) == ""
    assert not alerts_of(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_alert_at_any_step(value, watched, tmp_path):
    assert watched.add(value, 50.0)
    assert watched.add(value, 50.0) == ""
    assert watched.add(1.0, 1.0) == ""
    assert watched.add(1.0, value)
    assert [alert["lane"] for alert in alerts_of(tmp_path)] == [0, 1]


def test_new_levels_become_usual(watched, tmp_path):
    watched.warm_up()
    watched.add(50.0, 50.0)
    watched.warm_up(QUIET_STEPS, scale=25)
    assert watched.add(55.0, 55.0) == ""
    assert len(alerts_of(tmp_path)) == 1


def test_the_averages_continue_after_a_resume(watched, tmp_path):
    watched.warm_up()
    resumed = Watched(tmp_path)
    resumed.alerts.load_state_dict(watched.alerts.state_dict())
    assert resumed.add(1.0, 50.0)
    assert not Watched(tmp_path).add(1.0, 50.0)


def test_only_the_main_worker_records_and_all_get_the_text(tmp_path):
    main, other = Watched(tmp_path), Watched(tmp_path, is_main=False)
    for each in (main, other):
        each.warm_up()
    assert main.add(1.0, 50.0) == other.add(1.0, 50.0) != ""
    assert len(alerts_of(tmp_path)) == 1
    assert other.kept == []


def test_steps_that_are_left_out_and_scaled_losses_are_no_alerts(tmp_path):
    left_out = Watched(tmp_path, skip_batches=f"{WARM_UP}:{WARM_UP + 1}")
    scaled = Watched(tmp_path, precision="float16")
    for each in (left_out, scaled):
        each.warm_up()
    assert left_out.add(1.0, math.nan) == ""
    assert left_out.add(1.0, math.nan)
    assert scaled.add(1.0, 50.0) == ""
    assert scaled.add(1.0, math.inf)


def test_a_sum_is_reported_per_item_like_the_average_of_earlier_ones(watched, tmp_path):
    for _ in range(WARM_UP):
        assert watched.add(30.0, 30.0, count=30, are_sums=True) == ""
    assert watched.add(30.0, 3000.0, count=30, are_sums=True)
    (alert,) = alerts_of(tmp_path)
    assert alert["reason"] == f"the loss is 100 at step {WARM_UP} in lane 1, usually about 1"
    assert (alert["loss"], alert["losses"]) == (100.0, [[0, 30.0], [1, 3000.0]])


def test_a_loss_of_the_whole_batch_blames_no_lane(watched, tmp_path):
    assert watched.add(math.nan, math.nan, is_shared=True)
    (alert,) = alerts_of(tmp_path)
    assert alert["reason"] == "the loss is nan at step 0 of the whole batch"
    assert (alert["lane"], alert["samples"]) == (None, [])


def test_calls_of_a_step_and_sums_have_their_own_averages(watched):
    for _ in range(WARM_UP):
        assert watched.add(1.0, 1.0) == ""
        assert watched.add(100.0, 100.0, call=1) == ""
        assert watched.add(30.0, 30.0, count=30, call=2, are_sums=True) == ""
    assert watched.add(1.0, 1.0) == ""
    assert watched.add(100.0, 101.0, call=1) == ""
    assert watched.add(900.0, 900.0, count=900, call=2, are_sums=True) == ""
    assert watched.add(1.0, 100.0)
