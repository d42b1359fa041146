from __future__ import annotations

import pytest

from samestep.record.record import PARTS
from samestep.watch.timings import RECENT, Timings

EQUAL = (0.1, 0.2, 0.4, 0.0, 0.0)  # data, compute, exchange, optimizer, snapshot


def timings(*steps):
    """Make timings of (step, time, attempt, seconds by worker)."""
    made = Timings()
    for step, time, attempt, workers in steps:
        made.append(step, time, attempt, workers)
    return made


def test_means_of_parts_over_workers_and_the_rest_of_the_time():
    made = timings(
        *[(step, float(step), 0, [EQUAL, (0.1, 0.4, 0.2, 0.0, 0.0)]) for step in range(3)]
    )
    parts = made.parts()
    assert parts == pytest.approx(
        {"data": 0.1, "compute": 0.3, "exchange": 0.3, "optimizer": 0, "snapshot": 0, "other": 0.3},
        abs=1e-6,
    )


def test_only_the_newest_steps_count():
    slow, fast = [(9.0, 0.0, 0.0, 0.0, 0.0)], [(1.0, 0.0, 0.0, 0.0, 0.0)]
    made = timings(
        *[(step, 0.0, 0, slow) for step in range(5)],
        *[(step, 0.0, 0, fast) for step in range(5, 5 + RECENT)],
    )
    assert made.parts()["data"] == 1
    assert made.workers()[0]["seconds"] == 1


def test_the_time_between_attempts_and_over_steps_that_are_missing_is_no_steps():
    steps = [
        (0, 0.0, 0, [EQUAL]),
        (1, 1.0, 0, [EQUAL]),
        (3, 50.0, 0, [EQUAL]),
        (4, 99.0, 1, [EQUAL]),
    ]
    answer = timings(*steps).steps().answer(None, None, 10)
    assert answer["parts"]["other"] == [None, pytest.approx(0.3), None, None]


def test_own_seconds_are_without_the_wait_for_others():
    workers = timings((0, 0.0, 0, [EQUAL, (0.1, 0.5, 0.1, 0.0, 0.0)])).workers()
    assert [worker["seconds"] for worker in workers] == pytest.approx([0.3, 0.6])
    assert workers[1]["parts"] == {
        "data": 0.1,
        "compute": 0.5,
        "exchange": 0.1,
        "optimizer": 0,
        "snapshot": 0,
        "other": None,
    }


def test_workers_are_those_of_the_attempt():
    made = timings((0, 0.0, 0, [EQUAL]))
    made.strike((0, False))
    assert made.workers() == []
    assert made.parts()["data"] is None
    made.append(0, 0.0, 1, [(1.0, 1.0, 1.0, 1.0, 1.0)] * 3)
    assert [worker["seconds"] for worker in made.workers()] == [4, 4, 4]


def test_by_step_and_worker_with_null_where_one_was_not_there():
    made = timings(
        (0, 0.0, 0, [EQUAL]), (1, 0.0, 0, [EQUAL, EQUAL]), (2, 0.0, 0, [EQUAL, EQUAL, EQUAL])
    )
    answer = made.steps().answer(None, None, 10)
    assert answer["x"] == [0, 1, 2]
    some = pytest.approx(0.3)
    assert answer["workers"] == [[some, some, some], [None, some, some], [None, None, some]]
    assert made.steps().answer(1, 1, 10)["workers"] == [[some], [some]]
    assert made.steps().answer(5, None, 10) == {
        "x": [],
        "parts": {part: [] for part in (*PARTS, "other")},
        "workers": [],
    }


def test_many_steps_are_means_over_spans():
    made = timings(
        *[
            (step, 0.0, 0, [(float(step), 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0, 0.0)])
            for step in range(100)
        ]
    )
    answer = made.steps().answer(None, None, 2)
    assert answer["x"] == [0, 50]
    assert answer["parts"]["data"] == [pytest.approx(49 / 4), pytest.approx(149 / 4)]
    assert answer["workers"] == [[pytest.approx(24.5), pytest.approx(74.5)], [1, 1]]


def test_struck_steps_are_gone_with_their_workers():
    made = timings(
        *[
            (step, float(step), 0, [(float(step), 0.0, 0.0, 0.0, 0.0)] * (1 + step % 3))
            for step in range(7)
        ]
    )
    made.strike((4, False))
    made.append(4, 9.0, 1, [(7.0, 0.0, 0.0, 0.0, 0.0)])
    assert made.steps().answer(None, None, 10)["workers"] == [
        [0, 1, 2, 3, 7],
        [None, 1, 2, None, None],
        [None, None, 2, None, None],
    ]


def test_steps_out_of_order_are_put_in_order():
    made = timings(
        *[
            (step, 0.0, 0, [(float(step), 0.0, 0.0, 0.0, 0.0)] * workers)
            for step, workers in ((3, 1), (1, 3), (2, 2))
        ]
    )
    answer = made.steps().answer(None, None, 10)
    assert (answer["x"], answer["workers"]) == (
        [1, 2, 3],
        [[1, 2, 3], [1, 2, None], [1, None, None]],
    )
