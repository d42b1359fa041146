from __future__ import annotations

from itertools import chain, pairwise
from operator import attrgetter, itemgetter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.record import read_history
from samestep.record.source import open_source
from samestep.watch.run_state import LONGEST_TEXT, RunState
from samestep.watch.view import View
from tests.watch.writing import START, lines, loop, scalars, started, timing


def busy(step, *own_seconds):
    """Return a timing event of workers that only load data."""
    return timing(step, *[(float(seconds), 0.0, 0.0, 0.0, 0.0) for seconds in own_seconds])


STEPS = st.integers(0, 3)


NAMES = st.sampled_from(["loss", "accuracy"])


EVENTS = st.lists(
    st.builds(
        started,
        STEPS,
        kind=st.sampled_from(["started", "resumed"]),
        workers=st.integers(1, 3),
        epoch=STEPS,
    )
    | st.builds(
        lambda step, name, mark: {**scalars(step, **{name: step / 3}), **mark},
        STEPS,
        NAMES,
        st.sampled_from([{}, {"between": True}]),
    )
    | st.builds(
        lambda step, own_seconds: busy(step, *own_seconds),
        STEPS,
        st.lists(st.integers(1, 9), min_size=1, max_size=3),
    )
    | st.builds(
        lambda step, name: {
            "event": "image",
            "step": step,
            "name": name,
            "path": f"images/{step}.png",
        },
        STEPS,
        NAMES,
    )
    | st.builds(
        lambda step, kind: {"event": kind, "step": step},
        STEPS,
        st.sampled_from(["snapshot", "failed", "finished", "restarting"]),
    )
    | st.builds(lambda step, name: loop(step, name=name, done=step, steps=9), STEPS, NAMES),
    max_size=16,
)


def visible_state(view):
    """Return what is shown of a run, in an order of scalars that does not depend on void events.

    The numbers of images are left out, because they count void ones, too.
    """
    run, view._seen = view._run, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samestep.watch.view.time.time", lambda: START + 99)
        summary = view.summary()
    summary["scalars"].sort(key=itemgetter("name"))
    del summary["elapsed"]  # counts void events, whose time has passed
    for name in summary["images"]:
        for item in name["items"]:
            del item["number"]
    curves = {name: curve.points(0.5) for name, curve in run.curves.items()}
    return (
        summary,
        {
            name: [column.tolist() for column in (points.step, points.value, points.smooth)]
            for name, points in curves.items()
        },
        run.timings.steps().to_json(None, None, 9),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def points_of(history):
    """Return the points of curves, the images and workers' own seconds in a history."""
    curves, images, own_seconds = {}, [], []
    for event in history:
        if event["event"] == "scalars":
            for name, value in event["values"].items():
                curves.setdefault(name, []).append((event["step"], value))
        if event["event"] == "image":
            images.append((event["step"], event["name"]))
        if event["event"] == "timing":
            own_seconds.append((event["step"], [worker["data"] for worker in event["workers"]]))
    return curves, images, own_seconds


def points_in(run):
    """Return the same for a run's state."""
    curves = {name: curve.points() for name, curve in run.curves.items()}
    images = chain.from_iterable(run.images.values())
    steps = run.timings.steps()
    own_seconds = np.split(steps.own_seconds, np.cumsum(steps.workers)[:-1])
    return (
        {
            name: list(zip(points.step.tolist(), points.value.tolist(), strict=True))
            for name, points in curves.items()
        },
        [(image.position[0], image.name) for image in sorted(images, key=attrgetter("number"))],
        [
            (step, seconds.tolist())
            for step, seconds in zip(
                steps.step.tolist(), own_seconds[: len(steps.step)], strict=True
            )
        ],
    )


@given(events=EVENTS, cuts=st.lists(st.floats(0, 1), max_size=4), is_torn=st.booleans())
@example(
    events=[
        scalars(2, loss=1.0),
        {**scalars(2, loss=2.0), "between": True},
        scalars(3, loss=3.0),
        started(2, kind="resumed"),
    ],
    cuts=[],
    is_torn=False,
)
@example(
    events=[
        scalars(1, loss=0.5),
        scalars(0, accuracy=0.0),
        scalars(0, loss=0.0),
        started(1, kind="resumed"),
    ],
    cuts=[],
    is_torn=False,
)
@example(
    events=[busy(0, 1), busy(1, 2), started(1, kind="resumed"), busy(1, 3, 4)],
    cuts=[0.5],
    is_torn=False,
)
def test_the_state_equals_the_history(directory, events, cuts, is_torn):
    """Reads may end anywhere, also in the middle of a line."""
    data = lines(*events) + (b'{"time":1,"event":"sca' if is_torn else b"")
    file = directory / "events.jsonl"
    file.write_bytes(b"")
    view = View(open_source(directory))
    for start, end in pairwise(sorted({0, len(data), *[int(cut * len(data)) for cut in cuts]})):
        with file.open("ab") as growing:
            growing.write(data[start:end])
        view.refresh()
    history, expected = list(read_history(directory)), View(open_source(directory))
    for event in history:
        expected._run.apply(event)
    assert visible_state(view) == visible_state(expected)
    assert points_in(view._run) == points_of(history)


def texts(*events):
    run = RunState()
    for event in events:
        run.apply({"time": 1.0, **event})
    return [(line.text, line.severity) for line in run.timeline]


def test_starts():
    assert texts(
        started(),
        started(7, kind="resumed"),
        started(9, kind="resumed", workers=4),
        started(9, kind="resumed", workers=1),
        started(),
    ) == [
        ("started with 2 workers, 8 lanes", "info"),
        ("resumed at step 7 with 2 workers", "info"),
        ("resumed at step 9 with 4 workers: resized from 2 to 4 workers", "info"),
        ("resumed at step 9 with 1 worker: resized from 4 to 1 worker", "info"),
        ("started with 2 workers, 8 lanes", "info"),
    ]


@pytest.mark.parametrize(
    ("event", "text", "severity"),
    [
        ({"event": "finished", "step": 9}, "finished after 9 steps", "good"),
        ({"event": "stopped", "step": 9, "signal": 15}, "stopped at step 9 by SIGTERM", "info"),
        ({"event": "stopped", "step": 9, "signal": 999}, "stopped at step 9 by signal 999", "info"),
        ({"event": "stopped", "step": 9, "signal": 0}, "stopped at step 9 on request", "info"),
        (
            {"event": "failed", "rank": 1, "host": "b", "step": 9, "error": "ValueError('x')"},
            "worker 1 on b failed at step 9: ValueError('x')",
            "bad",
        ),
        (
            {
                "event": "restarting",
                "rank": 1,
                "host": "",
                "step": 8,
                "reason": "killed by SIGKILL",
            },
            "worker 1 failed at step 8: killed by SIGKILL; restarting all workers",
            "bad",
        ),
        (
            {"event": "snapshot", "step": 9, "score": 0.25, "path": "/x"},
            "snapshot of step 9, score 0.25",
            "good",
        ),
        ({"event": "recovered", "step": 9}, "continues at step 9 after the stall", "good"),
        ({"event": "snapshot", "step": 9, "score": None}, "snapshot of step 9", "good"),
        (
            {"event": "snapshot_rejected", "path": "p", "reason": "cut"},
            "rejected snapshot p: cut",
            "bad",
        ),
        (
            {"event": "snapshot_copied", "step": 9},
            "snapshot of step 9 copied to remote storage",
            "good",
        ),
        (
            {"event": "images_dropped", "count": 3},
            "3 images were dropped because writing could not keep up",
            "bad",
        ),
        (
            {"event": "loop", "name": "train", "done": 0, "steps": 9},
            "loop train starts: 9 steps",
            "info",
        ),
        (
            {"event": "loop", "name": "train", "done": 4, "steps": 9},
            "loop train continues after 4 of 9 steps",
            "info",
        ),
        (
            {"event": "loop", "name": "train", "done": 4, "steps": None},
            "loop train continues after 4 steps",
            "info",
        ),
        (
            {"event": "sink", "name": "wandb", "error": "no disk"},
            "sink wandb failed: no disk",
            "bad",
        ),
        (
            {"event": "sink", "name": "wandb", "behind_bytes": 5, "dropped": 2},
            "sink wandb is 5 bytes behind, 2 dropped",
            "info",
        ),
        (
            {"event": "transfer_failed", "path": "p", "reason": "r"},
            "transfer failed: path p, reason r",
            "bad",
        ),
        ({"event": "something_new", "step": 4}, "something new", "info"),
    ],
)
def test_texts_of_events(event, text, severity):
    assert texts(event) == [(text, severity)]


def test_repeated_events_are_listed_once():
    train = loop(0)
    sink = {"event": "sink", "name": "wandb", "behind_bytes": 9, "dropped": 1}
    events = texts(
        started(),
        train,
        {**train, "done": 4},
        sink,
        {**sink, "behind_bytes": 0},
        started(2, kind="resumed"),
        train,
    )
    assert [text.split()[0] for text, _ in events] == ["started", "loop", "sink", "resumed", "loop"]


def test_a_failure_has_its_traceback_and_a_limited_text():
    run = RunState()
    run.apply({"time": 1.0, "event": "failed", "error": "x" * 99999, "traceback": "Traceback ..."})
    assert run.timeline[0].detail == "Traceback ..."
    assert len(run.timeline[0].text) == LONGEST_TEXT


def test_an_alert_has_its_samples_and_the_command_to_look_at_them():
    run = RunState()
    command = "samestep replay runs/one --step 3 train.py"
    alert = {"time": 1.0, "event": "loss_alert", "step": 3, "reason": "the loss is nan"}
    run.apply({**alert, "samples": ["7 (a.png)", "9"], "replay": command})
    run.apply({**alert, "samples": 5, "replay": ["not", "text"]})
    assert [event.text for event in run.timeline] == ["the loss is nan"] * 2
    assert [event.detail for event in run.timeline] == [f"samples 7 (a.png), 9\n{command}", None]


def test_a_stalled_run_says_why_until_its_next_event():
    run = RunState()
    stalled = {"event": "stalled", "step": 1, "reason": "worker 0 has waited"}
    sink = {"event": "sink", "name": "s"}
    image = {"event": "image", "step": 0, "name": "x", "path": "images/x.png"}  # by a thread
    states = []
    for number, event in enumerate([started(), busy(0, 1), stalled, sink, image, busy(1, 1)]):
        run.apply({**event, "time": START + number})
        states.append(run.state)
    assert states == ["running", "running", "stalled", "stalled", "stalled", "running"]
    assert run.stall == "worker 0 has waited"
    assert run.timeline[-1].text == "stalled: worker 0 has waited"


def samples_after(*events, steps):
    run = RunState()
    for event in events:
        run.apply({"time": 0.0, **event})
    samples = run.samples_after(np.array(steps, float))
    return samples if samples is None else samples.tolist()


def test_samples_of_epochs_whose_last_batch_is_short():
    plan = loop(0, batch_size=4, samples=10, steps_per_epoch=3)
    used = samples_after(started(), plan, steps=[0, 1, 2, 3, 4, 6, 7])
    assert used == [0, 4, 8, 10, 14, 20, 24]


def test_samples_of_loops_of_different_batches():
    first, second = loop(0, batch_size=4), loop(3, name="tune", batch_size=32)
    events = started(), first, {**first, "step": 2, "done": 2}, second
    assert samples_after(*events, steps=[0, 2, 3, 4, 5]) == [0, 8, 12, 44, 76]


def test_samples_after_a_resume_with_another_batch():
    resumed = started(2, kind="resumed")
    events = started(), loop(0, batch_size=4), loop(4, batch_size=8), resumed
    resumed_loop = loop(2, batch_size=16, done=2)
    assert samples_after(*events, resumed_loop, steps=[1, 2, 3, 5]) == [4, 8, 24, 56]


def test_samples_of_a_loop_without_a_batch_size_are_unknown():
    assert samples_after(started(), steps=[1]) is None
    assert samples_after(started(), loop(0, batch_size=4), loop(2), steps=[1]) is None
