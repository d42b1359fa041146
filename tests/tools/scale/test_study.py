"""What a study makes of measurements: arithmetic that can be done by hand."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace

import pytest

from samestep.errors import ConfigError
from samestep.tools.scale.advice import Memory
from samestep.tools.scale.links import Seconds, links_of
from samestep.tools.scale.model import Link, Network
from samestep.tools.scale.picture import check_can_draw
from samestep.tools.scale.ranges import Range
from samestep.tools.scale.study import Setting, Study
from samestep.tools.scale.text import lines_of, milliseconds, table
from samestep.tools.scale.timing import PARTS, Timing
from samestep.tools.scale.traffic import traffic
from samestep.tools.scale.trials import Job

FREE = Link(1e-12, 1e30)


def _timing(compute, *, other=0.0, optimizer=0.0, waiting=0.0):
    parts = {
        **dict.fromkeys(PARTS, 0.0),
        "compute": compute,
        "other": other,
        "optimizer": optimizer,
        "exchange": waiting,
    }
    return Timing(sum(parts.values()), parts, waiting)


def _study(
    timings, *, lanes=4, batch_size=64, room=8, network=FREE, per_host=8, sharded=False, **setting
):
    job = Job(lanes, 4_000_000, batch_size, "cpu", 1, sharded)
    setting = Setting(**{"room": room, "load": 0.0, "available": 10**9, **setting})
    return Study(
        job,
        timings,
        Network(FREE, network, per_host),
        network_is_given=True,
        memory=None,
        setting=setting,
    )


def _text(study):
    return "\n".join(lines_of(study))


def test_speed_up_is_between_the_worst_and_the_best_of_what_was_measured():
    study = _study(
        {
            1: [_timing(4.0), _timing(5.0), _timing(8.0)],
            2: [_timing(2.0), _timing(2.5), _timing(4.0)],
        }
    )
    assert study.speed_up(1) == Range.exactly(1)
    assert study.speed_up(2) == Range(1.0, 2.0, 4.0)
    assert study.serial() == 0.0
    assert study.limit() is None
    assert "nothing limits them yet" in _text(study)


def test_the_fewest_workers_count_as_ideal_where_one_was_not_measured():
    study = _study({2: [_timing(2.0)], 4: [_timing(1.0)]})
    assert study.speed_up(2) == Range.exactly(2)
    assert study.speed_up(4).middle == 4.0


def test_a_model_of_fewer_workers_meets_what_it_is_made_for():
    study = _study({1: [_timing(8.0, other=1.0)], 2: [_timing(4.0, other=1.0)]})
    workers, expected = study.check()
    assert workers == 2
    assert expected.middle == pytest.approx(5.0)
    assert study.same_batch(4).step.middle == pytest.approx(3.0)
    assert study.expected_speed_up(study.same_batch(4)).middle == pytest.approx(3.0)
    assert study.serial() == pytest.approx(1 / 9)
    assert "were no faster" not in _text(study)
    assert "the speed-up ends at 9 (Amdahl 1967)" in _text(study)


def test_workers_without_a_core_each_are_told_of_and_left_out_of_the_model():
    study = _study({1: [_timing(8.0)], 2: [_timing(4.0)], 4: [_timing(50.0)]}, room=2)
    assert list(study.fair) == [1, 2]
    assert study.costs.compute == Range.exactly(2.0)
    assert study.check()[0] == 2
    assert "what was measured with 4 is of a shared machine" in _text(study)
    assert list(_study({4: [_timing(50.0)]}, room=2).fair) == [4]


def test_the_same_lane_batch_takes_a_lane_a_worker_and_is_compared_with_one_worker_that_does_the_same():
    study = _study({1: [_timing(8.0, other=1.0)]})
    larger = study.same_lane_batch(64)
    assert larger.lanes == 64
    assert larger.step.middle == pytest.approx(3.0)
    assert study.expected_speed_up(larger).middle == pytest.approx((64 * 2.0 + 1.0) / 3.0)
    assert study.same_batch(64) is None
    assert study.check() is None
    assert "measured at two numbers of workers" in _text(study)


def test_a_network_that_waits_for_messages_is_told_from_one_that_waits_for_bytes():
    slow, narrow = (
        _study({1: [_timing(0.1)]}, network=link, per_host=1)
        for link in (Link(1e-2, 1e12), Link(1e-9, 1e3))
    )
    assert slow.share_of_latency(1024) == pytest.approx(1.0)
    assert "fewer and larger workers help" in _text(slow)
    assert narrow.share_of_latency(1024) == pytest.approx(0.0, abs=1e-3)
    assert "more bandwidth help" in _text(narrow)


def test_lanes_and_learning_rates_are_told_where_the_batch_size_is_known():
    told = _text(
        _study({1: [_timing(8.0, other=0.99)], 2: [_timing(4.0, other=0.99)]}, learning_rate=0.1)
    )
    # 8 s of 8 lanes are still more than what stays
    assert "8 for at most 8 workers, 8 for at most 64 workers" in told
    assert "now 0.1 at 64" in told
    assert re.search(
        r"^ +8 +128 +0\.2 \(0\.1\) +0\.141 \(0\.1\) +5 epochs +0\.8, 0\.998$", told, re.MULTILINE
    )
    assert "the record names no batch size" in _text(_study({1: [_timing(8.0)]}, batch_size=None))


def test_the_largest_lane_batch_is_that_of_a_worker_s_share_of_the_memory():
    study = _study({1: [_timing(8.0)], 2: [_timing(4.0)]})
    assert study.largest_lane_batch(2) is None
    measured = replace(study, memory=Memory(100e6, 1e6))
    assert measured.largest_lane_batch(2) == 400
    assert "about 400 samples, where 2 workers share the 1 GB" in _text(measured)


def test_a_busy_machine_is_told():
    assert "Other programs were using this machine (a load of 1.5)" in _text(
        _study({1: [_timing(8.0)]}, room=2, load=1.5)
    )
    assert "Other programs" not in _text(_study({1: [_timing(8.0)]}))


def test_everything_is_json():
    study = _study({1: [_timing(8.0, other=1.0)], 2: [_timing(4.0, waiting=1.0)]})
    told = json.loads(json.dumps(study.to_json(), allow_nan=False))
    assert told["limit"]["part"] == "waiting"
    assert told["check"]["workers"] == 2
    assert told["same_global_batch"] == [None] * 3


def test_links_are_what_explains_the_medians():
    nbytes = 1 << 20
    moved = traffic(2, 2, 2, nbytes).moved_bytes
    seconds = Seconds([1.0, 2.0, 9.0], [6.0 + 4.0] * 3, [0.5] * 3, [0.5 + 2.0] * 3)
    assert links_of(seconds, nbytes) == (Link(2.0, moved / 4.0), Link(0.5, nbytes / 2.0))
    # large messages that took no longer than small ones
    noise = Seconds([1.0], [2.0], [0.5], [0.25])
    assert all(
        link.bandwidth > 1e12 and math.isfinite(link.bandwidth) for link in links_of(noise, nbytes)
    )


def test_columns_stand_under_each_other():
    assert list(table([["a", "bcd"], ["12", "3"]])) == [" a  bcd", "12    3"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0"), (0.00123456, "1.23"), (0.12345, "123"), (12.3456, "12346")]
)
def test_milliseconds_have_three_digits(seconds, text):
    assert milliseconds(seconds) == text


def test_drawing_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "samestep\[plot\]"'):
        check_can_draw(tmp_path / "scale.svg")
