from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.record.record import PARTS
from samestep.step import layout
from samestep.watch import timings as timings_module
from samestep.watch import view as view_module
from samestep.watch.timings import RECENT, Timings, lanes_of, seconds_of
from tests.watch.writing import START, loop, started, timing, view_of, write

EQUAL = (0.1, 0.2, 0.4, 0.0, 0.0)  # data, compute, exchange, optimizer, snapshot


def timings(*steps):
    """Return timings of steps (step, time, seconds by worker)."""
    made = Timings()
    for step, time, workers in steps:
        append(made, step, time, workers)
    return made


def append(made, step, time, workers):
    rows = [seconds_of(dict(zip(PARTS, parts, strict=False))) for parts in workers]
    made.append(step, time, rows)


def test_means_of_parts_over_workers_and_the_rest_of_the_time():
    made = timings(*[(step, float(step), [EQUAL, (0.1, 0.4, 0.2, 0.0, 0.0)]) for step in range(3)])
    parts = made.parts()
    assert parts == pytest.approx(
        {
            **dict.fromkeys(PARTS, 0.0),
            "data": 0.1,
            "compute": 0.3,
            "exchange": 0.3,
            "other": 0.3,
        },
        abs=1e-6,
    )


def test_only_the_newest_steps_count():
    slow, fast = [(9.0, 0.0, 0.0, 0.0, 0.0)], [(1.0, 0.0, 0.0, 0.0, 0.0)]
    made = timings(
        *[(step, 0.0, slow) for step in range(5)],
        *[(step, 0.0, fast) for step in range(5, 5 + RECENT)],
    )
    assert made.parts()["data"] == 1
    assert made.workers()[0]["seconds"] == 1


def test_time_between_attempts_and_over_missing_steps_does_not_count():
    made = timings((0, 0.0, [EQUAL]), (1, 1.0, [EQUAL]), (3, 50.0, [EQUAL]))
    made.discard_after((4, False))
    append(made, 4, 99.0, [EQUAL])
    answer = made.steps().to_json(None, None, 10)
    assert answer["parts"]["other"] == [None, pytest.approx(0.3), None, None]


def test_own_seconds_of_a_worker_are_those_recorded():
    made = Timings()
    worker = dict(zip(PARTS, EQUAL, strict=False))
    made.append(0, 0.0, [seconds_of({**worker, "own": seconds}) for seconds in (0.3, 0.8)])
    workers = made.workers()
    assert [worker["seconds"] for worker in workers] == pytest.approx([0.3, 0.8])
    assert [worker["lag"] is not None for worker in workers] == [False, True]
    assert made.parts()["exchange"] == pytest.approx(0.4)


@pytest.mark.parametrize(("own_seconds", "is_clear"), [(1.05, False), (1.2, True)])
def test_the_slower_of_two_workers_is_compared_with_the_other(own_seconds, is_clear):
    made = timings((0, 0.0, [(1.0, 0.0, 0.0, 0.0, 0.0), (own_seconds, 0.0, 0.0, 0.0, 0.0)]))
    assert [worker["lag"] is not None for worker in made.workers()] == [False, is_clear]


def test_a_part_that_ends_in_the_next_step_is_not_counted_twice():
    """A snapshot of 1 s at the end of each second step passes in the time of the step after it."""
    steps = [(0.1, 0.1, 0.0, 0.0, float(step % 2)) for step in range(9)]
    times = [0.2 * step + step // 2 for step in range(9)]
    made = timings(*[(n, times[n], [step]) for n, step in enumerate(steps)])
    assert made.seconds() == pytest.approx(times[-1] / 8)
    assert made.parts()["other"] == pytest.approx(0)


def test_a_healthy_slower_worker_is_no_alarm_and_a_wait_states_its_share():
    own_seconds = {"healthy": (0.044, 0.049), "waits": (0.044, 0.074)}
    tables = {}
    for name, seconds in own_seconds.items():
        workers = [(own, 0.0, 0.1, 0.0, 0.0) for own in seconds]
        tables[name] = timings(*[(step, 0.15 * step, workers) for step in range(9)]).workers()
    assert [worker["lag"] for worker in tables["healthy"]] == [None, None]  # 1.1 times the other
    assert [worker["lag"] for worker in tables["waits"]] == [None, pytest.approx(0.2)]


def test_one_pause_of_a_worker_is_no_lag():
    pause = [EQUAL, (50.0, *EQUAL[1:])]
    made = timings(*[(step, float(step), [EQUAL, EQUAL] if step else pause) for step in range(9)])
    assert [worker["lag"] for worker in made.workers()] == [None, None]


def test_time_workers_and_the_header_have_the_same_step(tmp_path, monkeypatch):
    """Each fourth step of 0.1 s also evaluates for 0.4 s, and 1.25 s pass in the user's code."""
    made, now = [loop(0, steps=100, batch_size=8)], 0.0
    for step in range(9):
        evaluation = 0.4 if step % 4 == 3 else 0.0
        now += 0.1 + evaluation + (1.25 if step == 8 else 0.0)
        made.append({**timing(step, *[(0.0, 0.05, 0.05, 0.0, 0.0)] * 2), "time": START + now})
        for worker in made[-1]["workers"]:
            worker |= {"evaluation": evaluation, "logging": 0.0}
    view = view_of(tmp_path, started(), *made)
    monkeypatch.setattr(view_module.time, "time", lambda: START + now)
    summary = view.summary()
    mean = (now - 0.1) / 8
    assert sum(summary["parts"].values()) == pytest.approx(mean, abs=1e-6)
    assert summary["progress"]["samples_per_second"] == pytest.approx(8 / mean)
    assert [sum(worker["parts"].values()) for worker in summary["workers"]] == [
        pytest.approx(mean)
    ] * 2
    assert summary["parts"]["evaluation"] == pytest.approx(0.8 / 8)
    assert summary["parts"]["other"] == pytest.approx(1.25 / 8, abs=1e-6)


def test_own_seconds_in_earlier_records_exclude_the_exchange():
    workers = timings((0, 0.0, [EQUAL, (0.1, 0.5, 0.1, 0.0, 0.0)])).workers()
    assert [worker["seconds"] for worker in workers] == pytest.approx([0.3, 0.6])
    seconds = {"data": 0.1, "compute": 0.5, "exchange": 0.1, "other": None}
    assert workers[1]["parts"] == {**dict.fromkeys(PARTS, 0.0), **seconds}


def test_seconds_that_are_not_finite_are_null():
    made = timings(*[(step, float(step), [(-math.inf, 0.0, 0.0, 0.0, 0.0)]) for step in (0, 1)])
    (worker,) = made.workers()
    assert worker["seconds"] is worker["parts"]["data"] is worker["parts"]["other"] is None


def test_workers_are_those_of_the_current_attempt():
    made = timings((0, 0.0, [EQUAL]))
    made.discard_after((0, False))
    assert made.workers() == []
    assert made.parts()["data"] is None
    append(made, 0, 0.0, [(1.0, 1.0, 1.0, 1.0, 1.0)] * 3)
    assert [worker["seconds"] for worker in made.workers()] == [4, 4, 4]


def test_seconds_by_worker_are_null_before_it_joined():
    made = timings((0, 0.0, [EQUAL]), (1, 0.0, [EQUAL, EQUAL]), (2, 0.0, [EQUAL, EQUAL, EQUAL]))
    answer = made.steps().to_json(None, None, 10)
    assert answer["x"] == [0, 1, 2]
    seconds = pytest.approx(0.3)
    assert answer["workers"] == [
        [seconds, seconds, seconds],
        [None, seconds, seconds],
        [None, None, seconds],
    ]
    assert made.steps().to_json(1, 1, 10)["workers"] == [[seconds], [seconds]]
    assert made.steps().to_json(5, None, 10) == {
        "x": [],
        "parts": {part: [] for part in (*PARTS, "other")},
        "workers": [],
        "quantiles": [],
    }


def test_many_steps_are_means_over_spans():
    made = timings(
        *[
            (step, 0.0, [(float(step), 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0, 0.0)])
            for step in range(100)
        ]
    )
    answer = made.steps().to_json(None, None, 2)
    assert answer["x"] == [0, 50]
    assert answer["parts"]["data"] == [pytest.approx(49 / 4), pytest.approx(149 / 4)]
    assert answer["workers"] == [[pytest.approx(24.5), pytest.approx(74.5)], [1, 1]]


def test_discarded_steps_are_removed_with_their_workers():
    made = timings(
        *[
            (step, float(step), [(float(step), 0.0, 0.0, 0.0, 0.0)] * (1 + step % 3))
            for step in range(7)
        ]
    )
    made.discard_after((4, False))
    append(made, 4, 9.0, [(7.0, 0.0, 0.0, 0.0, 0.0)])
    assert made.steps().to_json(None, None, 10)["workers"] == [
        [0, 1, 2, 3, 7],
        [None, 1, 2, None, None],
        [None, None, 2, None, None],
    ]


def alternating(steps):
    """Return timings of two workers whose second steps take three times as long as the first."""
    made = Timings()
    for step in range(steps):
        seconds = 0.2 if step % 2 else 0.0
        rows = [(0.1, 0.1 + seconds, 0.0, 0.0, 0.0), (0.1, 0.1 + 2 * seconds, 0.0, 0.0, 0.0)]
        append(made, step, step + 0.5 * (step // 2), rows)
    return made


def test_bounded_steps_keep_their_means_and_the_newest_ones():
    unbounded, bounded = alternating(3000), alternating(3000)
    bounded.flush(1000)
    assert len(bounded.steps().step) <= 1000
    assert bounded.steps().count.sum() == 3000
    unbounded.flush(3000)
    assert bounded.nbytes < unbounded.nbytes / 2
    assert bounded.parts() == unbounded.parts()
    assert bounded.workers() == unbounded.workers()
    expected, answer = (made.steps().to_json(None, None, 3) for made in (unbounded, bounded))
    for part in ("data", "compute", "other"):
        assert answer["parts"][part] == pytest.approx(expected["parts"][part], rel=0.02)
    for of_worker, expected_of_worker in zip(answer["workers"], expected["workers"], strict=True):
        assert of_worker == pytest.approx(expected_of_worker, rel=0.02)


def test_bounded_steps_that_a_resume_replaced_are_removed():
    made = alternating(3000)
    made.flush(1000)
    made.discard_after((1001, False))
    steps = made.steps()
    assert 990 < steps.count.sum() <= 1001
    assert steps.step[-1] + steps.count[-1] <= 1001
    append(made, 1001, 0.0, [EQUAL])
    assert math.isnan(made.steps().parts[-1][-1])


def test_steps_with_gaps_are_bounded_too():
    made = timings(*[(2 * step, float(step), [EQUAL] * (1 + step % 2)) for step in range(3000)])
    made.flush(1000)
    steps = made.steps()
    assert 500 <= len(steps.step) <= 1000
    assert (steps.step[0], steps.step[-1]) == (0, 5998)
    assert len(steps.own_seconds) == steps.workers.sum()
    assert steps.to_json(None, None, 2)["parts"]["compute"] == pytest.approx([0.2, 0.2])


def test_the_seconds_of_many_workers_are_bounded(monkeypatch):
    monkeypatch.setattr(timings_module, "OWN_PER_ROW", 1)
    made = timings(*[(step, float(step), [EQUAL] * 8) for step in range(1000)])
    made.flush(5000)
    assert len(made.steps().own_seconds) <= 5000
    assert made.steps().to_json(None, None, 1)["workers"] == [[pytest.approx(0.3)]] * 8


def test_steps_are_sorted():
    made = timings(
        *[
            (step, 0.0, [(float(step), 0.0, 0.0, 0.0, 0.0)] * workers)
            for step, workers in ((3, 1), (1, 3), (2, 2))
        ]
    )
    answer = made.steps().to_json(None, None, 10)
    assert (answer["x"], answer["workers"]) == (
        [1, 2, 3],
        [[1, 2, 3], [1, 2, None], [1, None, None]],
    )


@pytest.mark.parametrize(
    ("events", "lanes"),
    [
        ([], [(0, 2, 1), (2, 5, 1), (5, 8, 1)]),
        (["sharded_model"], [(0, 8, 3), (1, 8, 3), (2, 8, 3)]),
    ],
)
def test_workers_their_lanes_and_the_slowest(events, lanes, tmp_path):
    fast, slow = (0.1, 0.1, 0.5, 0.0, 0.0), (0.1, 0.5, 0.1, 0.0, 0.0)
    view = view_of(
        tmp_path,
        started(workers=3),
        *[{"event": event} for event in events],
        *[timing(step, fast, slow, fast) for step in range(3)],
    )
    workers = view.summary()["workers"]
    assert [
        (worker["rank"], worker["host"], worker["pid"], worker["lanes"]) for worker in workers
    ] == [(rank, "here", 100 + rank, lanes[rank]) for rank in range(3)]
    assert [worker["lag"] is not None for worker in workers] == [False, True, False]
    even = view_of(
        tmp_path / "even",
        started(),
        timing(0, (0.1, 0.2, 0.0, 0.0, 0.0), (0.1, 0.21, 0.0, 0.0, 0.0)),
    )
    assert not any(worker["lag"] is not None for worker in even.summary()["workers"])


@given(st.integers(1, 40), st.booleans(), st.data())
def test_lanes_equal_those_of_training(lanes, is_strided, data):
    workers = data.draw(st.integers(1, lanes))
    assignment = layout.Assignment(workers, lanes, is_strided)
    for rank in range(workers):
        own = range(*lanes_of(rank, workers, lanes, is_strided=is_strided))
        assert own == assignment.of(rank)


def summary(step, *, slowest, own_seconds, data=0.1, count=100):
    """Return a timing event of many workers, with quantiles of their own seconds."""
    means = {"data": data, "compute": 0.2, "exchange": 0.3, "optimizer": 0.0, "snapshot": 0.0}
    quantiles = {**dict.fromkeys(means, [0.0] * 5), "own": list(own_seconds)}
    return {
        "event": "timing",
        "step": step,
        "count": count,
        "mean": means,
        "quantiles": quantiles,
        "slowest": slowest,
    }


def test_many_workers_have_quantiles_and_the_slowest(tmp_path):
    own_seconds = (0.1, 0.2, 0.3, 0.4, 0.9)
    events = [
        summary(step, slowest=70 if step else 3, own_seconds=own_seconds) for step in range(4)
    ]
    view = view_of(tmp_path, started(workers=100, lanes=100), *events)
    workers = view.summary()["workers"]
    assert [worker["rank"] for worker in workers if worker["lag"]] == [70]
    assert workers[70]["seconds"] == 0.9
    assert {worker["seconds"] for worker in workers} == {None, 0.9}
    assert view.summary()["parts"]["data"] == pytest.approx(0.1)
    answer = view.timing()
    assert answer["x"] == [0, 1, 2, 3]
    assert answer["workers"] == []
    assert answer["quantiles"] == [pytest.approx([value] * 4) for value in own_seconds]


def test_a_start_that_only_evaluates_keeps_the_seconds_of_the_workers_that_trained(tmp_path):
    many = [summary(step, slowest=5, own_seconds=(1, 1, 1, 1, 2 + step)) for step in range(3)]
    few = [timing(step, (step, 1.0, 0.0, 0.0, 0.0)) for step in range(3)]
    for name, steps, own_seconds in (("many", many, 2.5), ("few", few, 1.5)):
        events = loop(0), *steps, {"event": "finished", "step": 3}
        evaluated = started(2, kind="resumed", workers=3)  # step 2 is void
        view = view_of(tmp_path / name, started(workers=6), *events, evaluated)
        assert [worker["seconds"] for worker in view.summary()["workers"]] == [None] * 3
        write(tmp_path / name, {"event": "finished", "step": 2})
        view.refresh()
        workers = view.summary()["workers"]
        assert len(workers) == 6
        assert [worker["seconds"] for worker in workers if worker["seconds"]] == [own_seconds]


def test_a_run_may_have_few_workers_and_then_many(tmp_path):
    own_seconds = (0.1, 0.2, 0.3, 0.4, 0.5)
    few = [timing(step, EQUAL, EQUAL) for step in range(2)]
    many = [summary(step, slowest=1, own_seconds=own_seconds) for step in (2, 3)]
    restart = started(2, kind="resumed", workers=100, lanes=100)
    answer = view_of(tmp_path, started(), *few, restart, *many).timing()
    assert answer["workers"] == [[pytest.approx(0.3)] * 2 + [None] * 2] * 2
    assert answer["quantiles"][4] == [None, None, 0.5, 0.5]
    assert answer["parts"]["exchange"] == pytest.approx([0.4, 0.4, 0.3, 0.3])


@pytest.mark.parametrize(
    ("change", "steps", "quantiles"),
    [
        ({"mean": None}, 0, 0),
        ({"quantiles": {}}, 0, 0),
        ({"quantiles": {"own": [1, 2]}}, 0, 0),
        ({"quantiles": {"own": ["x"] * 5}}, 1, 0),
        ({"slowest": 1e15}, 1, 5),
        ({"slowest": "x"}, 1, 5),
    ],
)
def test_of_a_summary_that_no_run_writes_the_usable_part_is_shown(
    tmp_path, change, steps, quantiles
):
    event = {**summary(0, slowest=0, own_seconds=(0.1,) * 5), **change}
    view = view_of(tmp_path, started(), event)
    assert view.summary()["step"] == steps
    answer = view.timing()
    assert (len(answer["x"]), len(answer["quantiles"])) == (steps, quantiles)
