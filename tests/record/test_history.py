from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.errors import RecordError
from samestep.record import open_record, read_events, read_history

STEPS = st.integers(0, 4)
EVENTS = st.lists(
    st.fixed_dictionaries({"event": st.sampled_from(["started", "resumed"]), "step": STEPS})
    | st.fixed_dictionaries(
        {"event": st.sampled_from(["scalars", "image"]), "step": STEPS},
        optional={"between": st.just(value=True)},
    )
    | st.fixed_dictionaries(
        {"event": st.sampled_from(["timing", "snapshot", "failed"]), "step": STEPS}
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def write(directory, events):
    (directory / "events.jsonl").unlink(missing_ok=True)
    record = open_record(directory, writes=True)
    for event in events:
        record.event(
            event["event"], **{name: value for name, value in event.items() if name != "event"}
        )
    record.close()


def history(directory):
    return [
        {name: value for name, value in event.items() if name != "time"}
        for event in read_history(directory)
    ]


def is_valid(event, start):
    """Return whether an event remains valid after a later start."""
    if event["event"] not in {"scalars", "timing", "image"}:
        return True
    if start["event"] == "started":
        return False
    return event["step"] < start["step"] or (
        event["step"] == start["step"] and event.get("between", False)
    )


@given(EVENTS)
@example(
    [{"event": "scalars", "step": step} for step in range(4)]
    + [{"event": "resumed", "step": step} for step in (3, 1, 2)]
)
def test_each_start_removes_superseded_events(directory, events):
    valid = []
    for event in events:
        if event["event"] in {"started", "resumed"}:
            valid = [earlier for earlier in valid if is_valid(earlier, event)]
        valid.append(event)
    write(directory, events)
    assert history(directory) == valid


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=5))
def test_a_run_that_was_killed_often_reads_like_an_uninterrupted_one(directory, kills):
    """Each attempt resumes from an earlier step, and is killed later, in or after a step."""

    def attempt(first, last):
        for step in range(first, last):
            yield {"event": "scalars", "step": step}
            yield {"event": "timing", "step": step}
            if step % 3 == 2:
                yield {"event": "scalars", "step": step + 1, "between": True}

    events, reached = [{"event": "started", "step": 0}], 0
    for kept, more, in_body in kills:
        reached = min(reached + more, 20)
        start = events[-1]["step"]
        events += attempt(start, reached)
        events += [{"event": "scalars", "step": reached}] * in_body
        events.append({"event": "resumed", "step": max(start, reached - kept)})
    events += attempt(events[-1]["step"], 20)
    write(directory, events)
    step_events = [
        event for event in history(directory) if event["event"] not in {"started", "resumed"}
    ]
    once = list(attempt(0, 20))
    assert sorted(step_events, key=order) == sorted(once, key=order)


def order(event):
    return event["step"], "between" in event, event["event"]


def test_values_logged_between_steps_stay_at_the_step_of_a_resume(tmp_path):
    evaluation = {"event": "scalars", "step": 2, "between": True}
    body = {"event": "scalars", "step": 2}
    write(tmp_path, [evaluation, body, {"event": "resumed", "step": 2}, body])
    assert history(tmp_path) == [evaluation, {"event": "resumed", "step": 2}, body]


def test_invalid_steps_are_tolerated(tmp_path):
    odd = [
        {"event": "scalars"},
        {"event": "image", "step": "four"},
        {"event": "timing", "step": None},
    ]
    write(tmp_path, [*odd, {"event": "resumed", "step": 3}])
    assert len(history(tmp_path)) == 4
    write(
        tmp_path,
        [
            {"event": "scalars", "step": math.inf},
            {"event": "image", "step": 10**400},
            {"event": "resumed"},
        ],
    )
    assert history(tmp_path) == [{"event": "resumed"}]


def test_events_appended_while_reading_are_left_for_the_next_call(tmp_path):
    write(tmp_path, [{"event": "scalars", "step": 0}])
    reading = read_history(tmp_path)
    assert next(reading)["step"] == 0
    record = open_record(tmp_path, writes=True)
    record.event("resumed", step=0)
    record.close()
    assert list(reading) == []
    assert [event["event"] for event in read_events(tmp_path)] == ["scalars", "resumed"]
    assert [event["event"] for event in history(tmp_path)] == ["resumed"]


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(RecordError, match="cannot read a record"):
        list(read_history(tmp_path))
