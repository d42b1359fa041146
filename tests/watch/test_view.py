from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.errors import RecordError
from samestep.record import read_history
from samestep.record.source import open_source
from samestep.step import tree
from samestep.watch import view as view_module
from samestep.watch.run_state import RunState
from samestep.watch.summary import MOST_ITEMS, lanes_of, summary, thinned
from samestep.watch.view import View, open_views
from tests.watch.writing import START, lines, scalars, started, timing, write


def busy(step, *own):
    """Make the event of a step's seconds of workers that only load data."""
    return timing(step, *[(float(seconds), 0.0, 0.0, 0.0, 0.0) for seconds in own])


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
        lambda step, own: busy(step, *own),
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
    | st.builds(
        lambda step, name: {
            "event": "loop",
            "name": name,
            "step": step,
            "epoch": 0,
            "done": step,
            "steps": 9,
        },
        STEPS,
        NAMES,
    ),
    max_size=16,
)


def shown(run):
    """Return all that is shown of a run, but the numbers of images, which count also those that became void."""
    told = summary(run, START + 99, None)
    for name in told["images"]:
        for item in name["items"]:
            del item["number"]
    curves = {name: curve.points(0.5) for name, curve in run.curves.items()}
    return (
        told,
        {
            name: [column.tolist() for column in (points.step, points.value, points.smooth)]
            for name, points in curves.items()
        },
        run.timings.steps().answer(None, None, 9),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def points_of(history):
    """Return the points of curves, the images and workers' own seconds that a history tells."""
    curves, images, own = {}, [], []
    for event in history:
        if event["event"] == "scalars":
            for name, value in event["values"].items():
                curves.setdefault(name, []).append((event["step"], value))
        if event["event"] == "image":
            images.append((event["step"], event["name"]))
        if event["event"] == "timing":
            own.append((event["step"], [worker["data"] for worker in event["workers"]]))
    return curves, images, own


def points_in(run):
    """Return the same of what a view has read."""
    curves = {name: curve.points() for name, curve in run.curves.items()}
    steps = run.timings.steps()
    own = np.split(steps.own, np.cumsum(steps.workers)[:-1])
    return (
        {
            name: list(zip(points.step.tolist(), points.value.tolist(), strict=True))
            for name, points in curves.items()
        },
        [(image.step, image.name) for image in run.images.values()],
        [
            (step, seconds.tolist())
            for step, seconds in zip(steps.step.tolist(), own[: len(steps.step)], strict=True)
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
    events=[busy(0, 1), busy(1, 2), started(1, kind="resumed"), busy(1, 3, 4)],
    cuts=[0.5],
    is_torn=False,
)
def test_read_in_pieces_it_shows_what_the_history_gives(directory, events, cuts, is_torn):
    """Wherever a reading ends, also in the middle of a line."""
    data = lines(*events) + (b'{"time":1,"event":"sca' if is_torn else b"")
    file = directory / "events.jsonl"
    file.write_bytes(b"")
    view = View(open_source(directory))
    for start, end in pairwise(sorted({0, len(data), *[int(cut * len(data)) for cut in cuts]})):
        with file.open("ab") as growing:
            growing.write(data[start:end])
        view.refresh()
    history, expected = list(read_history(directory)), RunState()
    for event in history:
        expected.take(event)
    assert shown(view._run) == shown(expected)
    assert points_in(view._run) == points_of(history)


def view_of(directory, *events, **options):
    write(directory, *events, **options)
    view = View(open_source(directory))
    view.refresh()
    return view


def test_only_what_is_new_is_read(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))
    asked = []
    read = view.source.read
    view.source.read = lambda offset: asked.append(offset) or read(offset)
    assert view.refresh() is False
    assert asked == []
    size = (tmp_path / "events.jsonl").stat().st_size
    write(tmp_path, scalars(1, loss=0.5))
    assert view.refresh() is True
    assert min(asked) >= size - view_module.TAIL_BYTES
    assert view.curve("loss")["value"] == [1, 0.5]


def test_a_line_that_is_longer_than_what_is_read_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.record.source.READ_BYTES", view_module.TAIL_BYTES + 100)
    failure = {"event": "failed", "traceback": "x" * 9000}
    view = view_of(
        tmp_path,
        started(),
        *[scalars(step, loss=1.0) for step in range(20)],
        failure,
        scalars(20, loss=2.0),
    )
    assert view.curve("loss")["points"] == 21
    assert view.row()["state"] == "failed"


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_record_that_another_took_the_place_of_is_read_anew(tmp_path, steps):
    """Whether the other one is shorter, as long, or longer."""
    view = view_of(tmp_path, started(), *[scalars(step, loss=1.0) for step in range(3)])
    (tmp_path / "events.jsonl").unlink()
    write(
        tmp_path,
        started(workers=1),
        *[scalars(step, score=2.0) for step in range(steps)],
        start=START + 1000,
    )
    assert view.refresh() is True
    assert [scalar["name"] for scalar in view.summary()["scalars"]] == ["score"]
    assert view.curve("score")["points"] == steps
    assert view.row()["workers"] == 1


def test_a_record_that_went_is_empty_until_one_comes(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))
    (tmp_path / "events.jsonl").unlink()
    view.refresh()
    assert view.summary()["scalars"] == []
    write(tmp_path, started(), scalars(0, loss=4.0))
    assert view.refresh() is True
    assert view.curve("loss")["value"] == [4]


def test_a_storage_that_does_not_answer_changes_nothing(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))

    def fail(*_):
        raise RecordError("the storage did not answer")

    read, view.source.read = view.source.read, fail
    write(tmp_path, scalars(1, loss=2.0))
    with pytest.raises(RecordError, match="did not answer"):
        view.refresh()
    assert view.curve("loss")["value"] == [1]
    view.source.read = read
    assert view.refresh() is True
    assert view.curve("loss")["value"] == [1, 2]


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ({"event": "finished", "step": 1}, "finished"),
        ({"event": "stopped", "step": 1, "signal": 15}, "stopped"),
        ({"event": "failed", "step": 1, "rank": 0, "error": "ValueError()"}, "failed"),
        ({"event": "restarting", "step": 1, "rank": 0, "reason": "killed"}, "running"),
        (scalars(1, loss=0.0), "running"),
        (started(1, kind="resumed"), "running"),
    ],
)
def test_states(tmp_path, monkeypatch, last, state):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0), last)
    monkeypatch.setattr(view_module.time, "time", lambda: START + 10)
    assert view.row()["state"] == view.summary()["state"] == state


@pytest.mark.parametrize(
    ("seconds", "idle", "state"),
    [(1, 59, "running"), (1, 61, "silent"), (30, 140, "running"), (30, 160, "silent")],
)
def test_a_run_is_silent_after_a_minute_and_several_of_its_steps(
    tmp_path, monkeypatch, seconds, idle, state
):
    view = view_of(tmp_path, *[scalars(step, loss=1.0) for step in range(9)], seconds=seconds)
    monkeypatch.setattr(view_module.time, "time", lambda: START + 8 * seconds + idle)
    assert view.row()["state"] == state


def test_news_show_that_a_run_lives_though_its_clock_is_behind(tmp_path, monkeypatch):
    view = view_of(tmp_path, scalars(0, loss=1.0))
    monkeypatch.setattr(view_module.time, "time", lambda: START + 9999)
    assert view.row()["state"] == "silent"
    write(tmp_path, scalars(1, loss=1.0))
    view.refresh()
    assert view.row()["state"] == "running"


def test_progress(tmp_path, monkeypatch):
    loop = {
        "event": "loop",
        "name": "train",
        "step": 10,
        "epoch": 1,
        "done": 8,
        "steps": 28,
        "epochs": 4,
    }
    loop = {**loop, "steps_per_epoch": 7, "samples": 50, "batch_size": 8}
    events = [
        started(10, kind="resumed"),
        loop,
        *[scalars(step, loss=1.0) for step in range(10, 15)],
    ]
    view = view_of(tmp_path, *events, seconds=0.5)
    monkeypatch.setattr(view_module.time, "time", lambda: START + 5)
    assert view.summary()["progress"] == {
        "loop": "train",
        "done": 12,
        "steps": 28,
        "epochs": 4,
        "samples": 50 + 5 * 8,
        "samples_per_second": 16,
        "steps_per_second": 2,
        "seconds_left": 8,
    }
    assert (view.row()["step"], view.row()["epoch"]) == (14, 3)
    write(tmp_path, {"event": "stopped", "step": 15, "signal": 0}, start=START + 5)
    view.refresh()
    progress = view.summary()["progress"]
    assert (progress["done"], progress["samples"]) == (13, 50 + 6 * 8)
    assert progress["seconds_left"] is progress["steps_per_second"] is None


def test_a_run_that_was_evaluated_afterwards_shows_how_it_was_trained(tmp_path):
    loop = {
        "event": "loop",
        "name": "train",
        "step": 0,
        "epoch": 0,
        "done": 0,
        "steps": 8,
        "epochs": 2,
    }
    events = [
        started(workers=2),
        loop,
        *[scalars(step, loss=1.0) for step in range(8)],
        {"event": "finished", "step": 8},
    ]
    view = view_of(tmp_path, *events, started(8, kind="resumed", workers=1, epoch=2))
    row = view.row()
    assert (row["workers"], row["epoch"], row["step"]) == (1, 2, 8)  # while it runs
    assert view.summary()["progress"]["epochs"] is None
    for _ in range(2):
        write(tmp_path, {"event": "finished", "step": 8})
        view.refresh()
        row, progress = view.row(), view.summary()["progress"]
        assert (row["workers"], row["epoch"], row["step"], row["state"]) == (2, 2, 8, "finished")
        assert (progress["epochs"], progress["done"]) == (2, 8)
        assert [worker["lanes"] for worker in view.summary()["workers"]] == [[0, 4], [4, 8]]
        write(tmp_path, started(8, kind="resumed", workers=3, epoch=2))
        view.refresh()
        assert view.row()["workers"] == 3


def test_progress_of_what_tells_little(tmp_path):
    view = view_of(tmp_path, started(), scalars(3, loss=1.0))
    assert view.summary()["progress"] == {
        "done": 3,
        **dict.fromkeys(
            (
                "loop",
                "steps",
                "epochs",
                "samples",
                "samples_per_second",
                "steps_per_second",
                "seconds_left",
            )
        ),
    }


def test_workers_their_lanes_and_the_slowest(tmp_path):
    fast, slow = (0.1, 0.1, 0.5, 0.0, 0.0), (0.1, 0.5, 0.1, 0.0, 0.0)
    view = view_of(
        tmp_path, started(workers=3), *[timing(step, fast, slow, fast) for step in range(3)]
    )
    workers = view.summary()["workers"]
    assert [
        (worker["rank"], worker["host"], worker["pid"], worker["lanes"]) for worker in workers
    ] == [
        (0, "here", 100, [0, 2]),
        (1, "here", 101, [2, 5]),
        (2, "here", 102, [5, 8]),
    ]
    assert [worker["slowest"] for worker in workers] == [False, True, False]
    even = view_of(
        tmp_path / "even",
        started(),
        timing(0, (0.1, 0.2, 0.0, 0.0, 0.0), (0.1, 0.21, 0.0, 0.0, 0.0)),
    )
    assert not any(worker["slowest"] for worker in even.summary()["workers"])


@given(st.integers(1, 40), st.data())
def test_lanes_are_those_that_training_gives_a_worker(lanes, data):
    workers = data.draw(st.integers(1, lanes))
    for rank in range(workers):
        own = tree.lanes_of(rank, workers, lanes)
        assert lanes_of(rank, workers, lanes) == (own.start, own.stop)


def test_configuration_sinks_and_what_was_dropped(tmp_path):
    sink = {"event": "sink", "name": "wandb", "behind_bytes": 7, "dropped": 0, "error": None}
    drops = [{"event": "images_dropped", "count": count, "step": 1} for count in (2, 3)]
    view = view_of(
        tmp_path, started(), sink, *drops, {**sink, "behind_bytes": 0, "error": "no disk"}
    )
    told = view.summary()
    assert told["config"] == {"lanes": 8, "timeout": "inf"}
    assert told["sinks"] == [{"name": "wandb", "behind_bytes": 0, "dropped": 0, "error": "no disk"}]
    assert told["dropped_images"] == 5
    assert (told["attempts"], told["torch"], told["devices"]) == (1, "2.13.0", ["cpu"])


def test_images_by_name(tmp_path):
    images = [
        {
            "event": "image",
            "name": name,
            "step": step,
            "path": f"images/{step}.png",
            "width": 3,
            "height": 2,
        }
        for step, name in enumerate("aba")
    ]
    view = view_of(tmp_path, *images)
    size = {"width": 3, "height": 2, "bytes": None}
    assert view.summary()["images"] == [
        {
            "name": "a",
            "items": [{"number": 0, "step": 0, **size}, {"number": 2, "step": 2, **size}],
        },
        {"name": "b", "items": [{"number": 1, "step": 1, **size}]},
    ]
    assert view.image(1).path == "images/1.png"
    with pytest.raises(KeyError):
        view.image(3)


@given(st.integers(0, 60), st.integers(1, 10))
def test_of_many_items_some_with_both_ends(count, most):
    items = list(range(count))
    some = thinned(items, most)
    assert len(some) <= most + 1
    assert some == sorted(set(some))
    assert some[:1] == items[:1]
    assert some[-1:] == items[-1:]
    assert count > most or some == items


ODD = [
    {"event": "scalars", "step": None, "values": {"x": 1}},
    {"event": "scalars", "step": 10**400, "values": {"x": 1}},
    {"event": "scalars", "step": "nan", "values": {"x": 1}},
    {"event": "scalars", "step": 1, "values": [1]},
    {
        "event": "scalars",
        "step": 1,
        "epoch": "x",
        "values": {"x": "text", "<script>": 10**400, "\ud800": True},
        "low": 3,
        "high": {"x": {}},
    },
    {"event": "timing", "step": 1, "workers": []},
    {"event": "timing", "step": 1, "workers": [1]},
    {"event": "timing", "step": 1, "workers": [{"data": "inf"}, {}]},
    {"event": "image", "step": 1},
    {"event": "image", "step": 1, "path": "../../etc/passwd", "name": {}, "width": "x"},
    {"event": "loop"},
    {"event": "sink"},
    {"event": "images_dropped", "count": "many"},
    {"event": "snapshot", "score": "high"},
    {"event": "snapshot", "score": 10**400, "step": 10**400},
    {"event": "stopped", "signal": 999},
    {"event": "stopped", "signal": "KILL"},
    {"event": "failed", "traceback": 3},
    {"event": "started", "workers": 3, "lanes": "x", "config": [], "devices": 1},
    {
        "event": "resumed",
        "workers": [1],
        "step": 10**400,
        "config": {"a": [[[[[[[[]]]]]]]], "b": "nan"},
    },
    {"event": "resumed", "step": "nan"},
    {"event": ["finished"]},
    {"event": "odd_kind", "time": "now"},
    {"event": "odd_failed", "reason": "x" * 99999},
    {"event": "x" * 99999},
    {},
]


@given(st.lists(st.sampled_from(ODD), max_size=8))
def test_what_no_run_writes_does_no_harm(directory, events):
    (directory / "events.jsonl").unlink(missing_ok=True)
    view = view_of(directory, started(), scalars(0, loss=1.0), *events)
    told = view.summary()
    assert all(len(event["text"]) <= 1000 for event in told["events"])
    for scalar in told["scalars"]:
        view.curve(scalar["name"], smooth=0.9)
    view.timing()


def test_events_beyond_many_are_left_out_but_the_first(tmp_path):
    view = view_of(
        tmp_path,
        started(),
        *[{"event": "snapshot", "step": step} for step in range(MOST_ITEMS + 5)],
    )
    events = view.summary()["events"]
    assert [len(events), events[0]["kind"], events[-1]["step"]] == [
        MOST_ITEMS + 1,
        "started",
        MOST_ITEMS + 4,
    ]


def test_a_folder_of_runs(tmp_path):
    write(tmp_path / "one", started())
    (tmp_path / "two").mkdir()
    views = open_views(tmp_path)
    assert list(views) == ["one"]
    kept = views["one"]
    write(tmp_path / "two" / "deep", started())
    assert views.scan(str(tmp_path)) is True
    assert list(views) == ["one", "two/deep"]
    assert views["one"] is kept
    assert views.scan(str(tmp_path)) is False
    (tmp_path / "one" / "events.jsonl").unlink()
    assert views.scan(str(tmp_path)) is True
    assert list(views) == ["two/deep"]
    with pytest.raises(KeyError):
        views["one"]


def test_one_run_and_several_places(tmp_path):
    for name in ("a/run", "b/run", "b/more"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, started())
    one = open_views(tmp_path / "a/run")
    assert [(run, view.name) for run, view in one.items()] == [(".", "run")]
    several = open_views(tmp_path / "a/run", tmp_path / "b/run", tmp_path / "b", tmp_path / "b")
    assert [(run, view.name) for run, view in several.items()] == [
        (run, run) for run in ("run", "run-2", "b/more", "b/run")
    ]
    assert [view.source.location for view in several.at(str(tmp_path / "b"))] == [
        str(tmp_path / "b/more"),
        str(tmp_path / "b/run"),
    ]


def test_a_url(tmp_path):
    write(tmp_path / "one", started(), scalars(0, loss=1.0))
    views = open_views(f"file://{tmp_path}")
    views["one"].refresh()
    assert views["one"].curve("loss")["value"] == [1]


def test_torch_is_not_needed():
    code = "import sys, samestep.watch.command, samestep.watch.serving, samestep.watch.view; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
