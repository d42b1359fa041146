from __future__ import annotations

import io
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from samestep.errors import RecordError
from samestep.record import read_history
from samestep.watch import run_state
from samestep.watch import view as view_module
from samestep.watch.curves import Curve
from samestep.watch.view import media_type, principals
from tests.watch.writing import (
    START,
    histogram,
    loop,
    scalars,
    snapshot,
    started,
    system,
    timing,
    view_of,
    write,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


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


def test_a_stalled_run_is_silent_after_its_timeout(tmp_path, monkeypatch):
    stalled = {"event": "stalled", "step": 1, "reason": "worker 0 has waited"}
    view = view_of(tmp_path, started(config={"timeout": 100.0}), scalars(0, loss=1.0), stalled)
    states = []
    for seconds in (159, 161):
        monkeypatch.setattr(view_module.time, "time", lambda at=START + 2 + seconds: at)
        states.append((view.row()["state"], view.summary()["stall"]))
    assert states == [("stalled", "worker 0 has waited"), ("silent", None)]


@pytest.mark.parametrize(
    ("seconds", "idle", "state"),
    [(1, 59, "running"), (1, 61, "silent"), (30, 140, "running"), (30, 160, "silent")],
)
def test_a_run_is_silent_after_a_minute_and_several_steps(
    tmp_path, monkeypatch, seconds, idle, state
):
    view = view_of(tmp_path, *[scalars(step, loss=1.0) for step in range(9)], seconds=seconds)
    monkeypatch.setattr(view_module.time, "time", lambda: START + 8 * seconds + idle)
    assert view.row()["state"] == state


def test_progress(tmp_path, monkeypatch):
    sizes = {"steps": 28, "epochs": 4, "steps_per_epoch": 7, "samples": 50, "batch_size": 8}
    events = [
        started(10, kind="resumed"),
        loop(10, epoch=1, done=8, **sizes),
        *[scalars(step, loss=1.0) for step in range(10, 15)],
    ]
    view = view_of(tmp_path, *events, seconds=0.5)
    monkeypatch.setattr(view_module.time, "time", lambda: START + 5)
    assert view.summary()["progress"] == {
        "loop": "train",
        "loops": 1,
        "done": 12,
        "steps": 28,
        "share": pytest.approx(12 / 28),
        "is_of_epoch": False,
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


def test_a_loop_that_ends_with_its_epoch_does_not_say_when_the_run_ends(tmp_path, monkeypatch):
    sizes = {"steps": 14, "steps_per_epoch": 7, "samples": 50, "batch_size": 8, "epochs": None}
    train = loop(7, epoch=1, done=7, ends_with_epoch=True, **sizes)
    steps = [{**scalars(step, loss=1.0), "epoch": 1} for step in range(7, 12)]
    view = view_of(tmp_path, started(7, kind="resumed"), train, *steps, seconds=0.5)
    monkeypatch.setattr(view_module.time, "time", lambda: START + 3)
    progress = view.summary()["progress"]
    assert (progress["steps"], progress["is_of_epoch"]) == (None, True)
    assert progress["share"] == pytest.approx(4 / 7)
    assert progress["seconds_left"] == pytest.approx(1.5)


def test_time_left_includes_evaluations(tmp_path, monkeypatch):
    """Half of the time goes to evaluations of 100 s after every 200 steps."""
    train = loop(0, steps=2000, steps_per_epoch=500, epochs=4)
    events = [{**started(), "time": START}, {**train, "time": START}]
    for step in range(1, 801):
        time = START + 0.5 * step + 100 * ((step - 1) // 200)
        events.append({**scalars(step, loss=1.0), "time": time})
    for steps in (150, 201, 399, 601, 800):
        view = view_of(tmp_path / str(steps), *events[: steps + 2])
        monkeypatch.setattr(view_module.time, "time", lambda at=events[steps + 1]["time"]: at)
        progress = view.summary()["progress"]
        evaluations = 100 * ((steps - 1) // 200) / (steps - 1)
        newest = min(steps - 1, 100)  # with their evaluations
        passed = events[steps + 1]["time"] - events[steps + 1 - newest]["time"]
        assert progress["steps_per_second"] == pytest.approx(newest / passed)
        assert progress["seconds_left"] == pytest.approx((2000 - steps) * (0.5 + evaluations))


def test_time_left_follows_a_loop_that_becomes_slower(tmp_path, monkeypatch):
    steps = [
        {**scalars(step, loss=1.0), "time": START + step + max(0, step - 300)}
        for step in range(1, 500)
    ]
    view = view_of(tmp_path, {**started(), "time": START}, loop(0, steps=1000), *steps)
    monkeypatch.setattr(view_module.time, "time", lambda: START + 700)
    assert view.summary()["progress"]["seconds_left"] == pytest.approx(501 * 2)


def test_loops_are_counted_by_name(tmp_path):
    again = [loop(step, name="a", done=step, steps=9) for step in (0, 1)]
    view = view_of(tmp_path, started(), *again)
    assert view.summary()["progress"]["loops"] == 1
    write(tmp_path, loop(9, name="b", steps=9))
    view.refresh()
    assert view.summary()["progress"]["loops"] == 2


@pytest.mark.parametrize("each", [True, False])
def test_a_finished_run_that_was_started_again_keeps_its_epoch(tmp_path, each):
    """A loop over epochs, in the user's code or its own, then a start that has nothing to do."""
    sizes = {"steps_per_epoch": 4, "ends_with_epoch": each}
    events = [started()]
    for epoch in range(3):
        if each or epoch == 0:
            events.append(loop(4 * epoch, epoch=epoch, done=4 * epoch, **sizes))
        events += [scalars(step, loss=1.0) for step in range(4 * epoch, 4 * epoch + 4)]
    end = {"event": "finished", "step": 12}
    view = view_of(tmp_path, *events, end)
    assert view.row()["epoch"] == 2
    for _ in range(2):
        write(tmp_path, started(12, kind="resumed", epoch=3), end)
        view.refresh()
        assert view.row()["epoch"] == 2


def test_values_after_the_last_epoch_do_not_count_another(tmp_path):
    after = {**scalars(8, accuracy=0.9), "epoch": 8, "between": True}
    view = view_of(tmp_path, started(), {**scalars(7, loss=1.0), "epoch": 7}, after)
    assert view.row()["epoch"] == 7


def settings_of(directory, *events):
    row = view_of(directory, *events).table_row()
    return row["settings"], row["environment"]


def changed(step, lr, kind="resumed", **fields):
    settings = {"optimizer": {"lr": lr, "name": "sgd"}, "epochs": 2}
    environment = {"arguments": f"--lr {lr}", "setting optimizer.lr": str(lr), "torch": "2.13"}
    return started(step, kind=kind, settings=settings, environment=environment, **fields)


def shown(lr, arguments):
    settings = {"optimizer": {"lr": lr, "name": "sgd"}, "epochs": 2}
    return settings, {"arguments": arguments, "torch": "2.13"}


def test_a_setting_that_changed_at_a_resume_has_both_values(tmp_path):
    events = [changed(0, 0.1, "started"), loop(0), changed(8, 0.5), loop(8), changed(9, 0.5)]
    both = shown("0.1 → 0.5", "--lr 0.1 → --lr 0.5")  # the optimizer's state has the old one
    assert settings_of(tmp_path / "a", *events[:1]) == shown(0.1, "--lr 0.1")
    assert settings_of(tmp_path / "b", *events) == both
    back = [*events, loop(9), changed(4, 0.1)]  # before the change
    assert settings_of(tmp_path / "c", *back) == shown(0.1, "--lr 0.1")
    thrice = [*events, loop(9), changed(12, 1)]
    assert settings_of(tmp_path / "d", *thrice)[0] == shown("0.1 → 0.5 → 1", "")[0]
    for number, fields in enumerate(({"kind": "started"}, {"continues": False})):
        anew = [*events, changed(8, 0.5, **fields)]
        assert settings_of(tmp_path / f"e{number}", *anew) == shown(0.5, "--lr 0.5")


def test_a_start_without_a_step_changes_no_setting(tmp_path):
    events = [changed(0, 0.1, "started"), loop(0), {"event": "finished", "step": 8}]
    events += [changed(8, 0.5), {"event": "finished", "step": 8}]
    assert settings_of(tmp_path, *events) == shown(0.1, "--lr 0.1")


def test_elapsed_leaves_out_the_time_between_two_starts(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0), scalars(1, loss=1.0))
    write(tmp_path, started(1, kind="resumed"), scalars(1, loss=1.0), start=START + 9000)
    view.refresh()
    assert view.row()["elapsed"] == 3


def test_a_fork_has_the_time_of_its_trunk_and_its_own_and_waits_to_be_started(tmp_path):
    view = view_of(tmp_path, started(run="trunk"), scalars(0, loss=1.0), scalars(1, loss=1.0))
    forked = {"event": "forked", "step": 2, "run": "trunk", "trunk": "/runs/trunk"}
    write(tmp_path, forked, start=START + 9000)
    view.refresh()
    row = view.row()
    assert (row["state"], row["elapsed"]) == ("stopped", 2)
    assert row["forked"] == {"run": "trunk", "step": 2, "trunk": "/runs/trunk"}
    resumed = started(2, kind="resumed", run="fork")
    write(tmp_path, resumed, scalars(2, loss=1.0), start=START + 9100)
    view.refresh()
    assert view.row()["elapsed"] == 3


def test_elapsed_is_never_negative_if_a_clock_is_set_back(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))
    write(tmp_path, scalars(1, loss=1.0), start=START - 60)
    view.refresh()
    assert view.row()["elapsed"] == 0
    write(tmp_path, started(1, kind="resumed"), scalars(1, loss=1.0), start=START - 50)
    view.refresh()
    assert view.row()["elapsed"] == 1


def test_lines_that_are_skipped_are_counted(tmp_path):
    view = view_of(tmp_path, started())
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "sca\n[]\n')
    write(tmp_path, scalars(0, loss=1.0))
    view.refresh()
    assert view.summary()["skipped_lines"] == 2


def test_scalars_that_are_not_finite_now(tmp_path):
    values = [1.0, "nan", "inf", "nan"]
    view = view_of(tmp_path, started(), *[scalars(n, loss=v, x=1.0) for n, v in enumerate(values)])
    assert view.row()["nonfinite"] == [{"name": "loss", "step": 1}]
    write(tmp_path, scalars(4, loss=2.0))
    view.refresh()
    assert view.row()["nonfinite"] == []


def failed(rank, error, **fields):
    trace = f"Traceback of worker {rank}"
    base = {"event": "failed", "step": 3, "rank": rank, "host": "h", "traceback": trace}
    return {**base, "error": error, **fields}


@pytest.mark.parametrize(
    ("failures", "text", "rank"),
    [
        (
            [
                failed(0, "WorldError: worker 1 left", is_secondary=True),
                failed(1, "KeyError: 'x'", is_secondary=False),
            ],
            "KeyError: 'x' (worker 1 on h)",
            1,
        ),
        (
            [failed(0, "WorldError('worker 1 left')"), failed(1, "KeyError('x')")],
            "KeyError('x') (worker 1 on h)",
            1,
        ),
        (
            [
                failed(1, "LossError: NaN\nmore", is_secondary=False),
                failed(0, "LossError: NaN\nmore"),
            ],
            "LossError: NaN",
            1,
        ),
        (
            [failed(0, "HangError: worker 1 does not respond\nstack")],
            "HangError: worker 1 does not respond",
            0,
        ),
        (
            [failed(0, "WorldError: no network", is_secondary=True)],
            "WorldError: no network (worker 0 on h)",
            0,
        ),
    ],
)
def test_a_failure_is_the_first_that_no_other_caused(tmp_path, failures, text, rank):
    earlier = [failed(0, "ValueError: before"), started(2, kind="resumed")]
    view = view_of(tmp_path, started(), *earlier, *failures)
    assert view.summary()["failure"] == {"text": text, "detail": f"Traceback of worker {rank}"}


def test_a_run_that_was_evaluated_later_shows_how_it_was_trained(tmp_path):
    events = [
        started(workers=2),
        loop(0, steps=8, epochs=2, steps_per_epoch=4),
        *[scalars(step, loss=1.0) for step in range(8)],
        timing(7, *[(0.0, 1.0, 0.0, 0.0, 0.0)] * 2),
        {"event": "finished", "step": 8},
    ]
    view = view_of(tmp_path, *events, started(8, kind="resumed", workers=1, epoch=2))
    row = view.row()
    assert (row["workers"], row["epoch"], row["step"]) == (1, 2, 8)  # while it is running
    assert view.summary()["progress"]["epochs"] is None
    for again in ([], [loop(8, epoch=2, done=8, steps=8)]):  # only evaluates, or has no step left
        write(tmp_path, *again, {"event": "finished", "step": 8})
        view.refresh()
        row, progress = view.row(), view.summary()["progress"]
        assert (row["workers"], row["epoch"], row["step"], row["state"]) == (2, 1, 8, "finished")
        assert (progress["epochs"], progress["done"]) == (2, 8)
        workers = view.summary()["workers"]
        assert [worker["lanes"] for worker in workers] == [(0, 4, 1), (4, 8, 1)]
        assert [worker["seconds"] for worker in workers] == [1.0, 1.0]
        write(tmp_path, started(8, kind="resumed", workers=3, epoch=2))
        view.refresh()
        assert view.row()["workers"] == 3


def test_progress_without_a_loop(tmp_path):
    view = view_of(tmp_path, started(), scalars(3, loss=1.0))
    progress = view.summary()["progress"]
    position = [progress.pop(name) for name in ("done", "is_of_epoch", "loops")]
    assert position == [3, False, 0]
    assert set(progress.values()) == {None}


def test_configuration_sinks_and_dropped_images(tmp_path):
    sink = {"event": "sink", "name": "wandb", "behind_bytes": 7, "dropped": 0, "error": None}
    drops = [{"event": "images_dropped", "count": count, "step": 1} for count in (2, 3)]
    view = view_of(
        tmp_path, started(), sink, *drops, {**sink, "behind_bytes": 0, "error": "no disk"}
    )
    run = view.summary()
    assert run["config"] == {"lanes": 8, "timeout": "inf"}
    assert run["sinks"] == [{"name": "wandb", "behind_bytes": 0, "dropped": 0, "error": "no disk"}]
    assert run["dropped_images"] == 5
    assert run["attempts"] == 1


def test_images_by_name(tmp_path):
    image = {"event": "image", "width": 3, "height": 2}
    events = [
        {**image, "name": name, "step": step, "path": f"images/{step}.png"}
        for step, name in enumerate("aba")
    ]
    view = view_of(tmp_path, *events)
    size = {"width": 3, "height": 2, "bytes": None}
    assert view.summary()["images"] == [
        {
            "name": "a",
            "items": [{"number": 0, "step": 0, **size}, {"number": 2, "step": 2, **size}],
        },
        {"name": "b", "items": [{"number": 1, "step": 1, **size}]},
    ]
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(data := b"\x89PNG\r\n\x1a\nxx")
    kind, size, chunks = view.open_image(1)
    assert (kind, size, b"".join(chunks)) == ("image/png", len(data), data)
    with pytest.raises(RecordError):
        view.open_image(2)
    with pytest.raises(KeyError):
        view.open_image(3)


def test_histograms_by_name_without_those_that_a_resume_replaced(tmp_path):
    late = histogram(3, "w", [1.0, 5])
    events = [histogram(step, "w", [-0.5, step], [0.0, 2], nan=step) for step in (1, 2)]
    view = view_of(tmp_path, started(), *events, late, histogram(3, "v", [1.0, 5]))
    assert view.summary()["histograms"] == [{"name": "w", "step": 3}, {"name": "v", "step": 3}]
    write(tmp_path, started(2, kind="resumed"), {**late, "bins": []})
    view.refresh()
    run = view.summary()
    assert run["histograms"] == [{"name": "w", "step": 3}]
    assert [event["kind"] for event in run["events"]] == ["started", "resumed"]
    assert view.histogram("w") == {
        "items": [
            {"step": 1, "bins": [[-0.5, 1.0], [0.0, 2.0]], "nan": 1, "inf": 0, "-inf": 0},
            {"step": 3, "bins": [], "nan": 0, "inf": 0, "-inf": 0},
        ]
    }
    with pytest.raises(KeyError):
        view.histogram("v")
    left = [e["bins"] for e in read_history(tmp_path) if e["event"] == "histogram"]
    assert left == [[[-0.5, 1], [0.0, 2]], []]


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
    {"event": "histogram", "step": 1},
    {"event": "histogram", "step": 1, "bins": [[1, 2], [3]], "name": {}},
    {"event": "histogram", "step": 1, "bins": [[10**400, 2]]},
    {"event": "histogram", "step": 1, "bins": [["nan", 1]]},
    {"event": "histogram", "step": "nan", "bins": [[1, 2]]},
    {"event": "histogram", "step": 1, "bins": {"a": 1}, "nan": "many"},
    {"event": "histogram", "step": 1, "bins": [[1, 2]], "nan": "many", "name": []},
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
def test_events_that_no_run_writes_do_no_harm(directory, events):
    (directory / "events.jsonl").unlink(missing_ok=True)
    view = view_of(directory, started(), scalars(0, loss=1.0), *events)
    run = view.summary()
    assert all(len(event["text"]) <= 1000 for event in run["events"])
    for scalar in run["scalars"]:
        view.curve(scalar["name"], smooth=0.9)
    for series in run["histograms"]:
        view.histogram(series["name"])
    view.timing()


def test_the_first_the_rare_and_the_newest_events_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "MOST_EVENTS", 100)
    steps = [{"event": "snapshot", "step": step} for step in range(500)]
    alert = {"event": "loss_alert", "step": 7, "reason": "the loss is nan"}
    summary = view_of(tmp_path, started(), *steps[:7], alert, *steps[7:]).summary()
    kinds = [event["kind"] for event in summary["events"]]
    assert kinds[:2] == ["started", "loss_alert"]
    newest = [event["step"] for event in summary["events"][2:]]
    assert newest == list(range(500 - len(newest), 500))
    assert 50 <= len(newest) <= 100
    assert summary["dropped_events"] == 500 - len(newest)


def test_events_of_any_number_of_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(run_state, "MOST_EVENTS", 100)
    run = run_state.RunState()
    for step in range(500):
        run.apply({"event": f"kind {step}", "time": 0.0, "step": step})
    assert 50 <= len(run.timeline) <= 100
    assert (run.timeline[0].kind, run.timeline[-1].kind) == ("kind 0", "kind 499")


def test_images_of_many_steps_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "MOST_IMAGES", 20)
    logged = [
        {"event": "image", "name": f"image {step % 2}", "step": step, "path": f"images/{step}.png"}
        for step in range(200)
    ]
    view = view_of(tmp_path, started(), *logged)
    for number, series in enumerate(view.summary()["images"]):
        steps = [image["step"] for image in series["items"]]
        assert 10 <= len(steps) <= 21
        assert (steps[0], steps[-1]) == (number, 198 + number)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "images/199.png")
    assert view.open_image(199)[0] == "image/png"
    with pytest.raises(KeyError):
        view.open_image(3)


def test_torch_is_not_needed():
    modules = "samestep.watch, samestep.watch.report, samestep.watch.server"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_media_types_of_images(kind):
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, kind)
    assert media_type(file.getvalue()) == f"image/{kind}"
    assert media_type(file.getvalue()[1:]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'>",
        b"<html>",
        b"RIFF1234WAVE",
        b"GIF",
        b"%PDF-1.7",
    ],
)
def test_other_files_have_no_media_type(data):
    assert media_type(data) is None


def test_samples_of_hosts_become_curves(tmp_path):
    odd = {"event": "system", "host": 3, "cpu": "x", "memory": 1e300, "gpus": [None, {"use": "y"}]}
    late = system("a", cpu=0.5, gpus=[{"memory": 1, "memory_total": 0}])
    view = view_of(tmp_path, started(), system("a"), late, odd, system("b", cpu="nan", gpus=None))
    curves = {(curve["host"], curve["name"]): curve for curve in view.system()["curves"]}
    assert curves["a", "cpu"]["x"] == [START + 1, START + 2]
    assert {key: curve["value"] for key, curve in curves.items()} == {
        ("a", "cpu"): [25.0, 50.0],
        ("a", "memory"): [50.0, 50.0],
        ("a", "disk_read"): [2e6, 2e6],
        ("a", "gpu 0"): [50.0],
        ("a", "gpu_memory 0"): [25.0],
        ("b", "memory"): [50.0],
        ("b", "disk_read"): [2e6],
    }
    assert view.summary()["samples"] == 4


def test_samples_do_not_hide_that_a_run_makes_no_progress(tmp_path, monkeypatch):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))
    before = view.row()
    write(tmp_path, *[system("a")] * 10, start=START + 100)
    view.refresh()
    monkeypatch.setattr(view_module.time, "time", lambda: START + 110)
    assert {**before, "state": "silent"} == view.row()


def test_many_samples_are_thinned_and_keep_their_extremes(tmp_path):
    samples = [system("a", cpu=0.9 if number == 700 else 0.1) for number in range(2000)]
    view = view_of(tmp_path, started(), *samples)
    cpu = next(curve for curve in view.system()["curves"] if curve["name"] == "cpu")
    assert len(cpu["x"]) <= 500
    assert max(cpu["value"]) == 90.0


def test_the_principal_scalars_of_a_run():
    def curve(count):
        points = Curve()
        for step in range(count):
            points.append((step, 1), 0.0, 0.5, math.nan, math.nan)
        return points

    def principal(score=None, /, **points):
        return principals({name: curve(count) for name, count in points.items()}, score)

    train = {"train/loss": 100, "train/accuracy": 100, "lr": 100}
    assert principal(**train) == {"loss": "train/loss"}
    evaluated = {"val/accuracy": 10, "val/loss": 10}
    assert principal(**train, **evaluated) == principal(**evaluated, **train)
    assert principal(**train, **evaluated) == {"loss": "val/loss"}
    assert principal(**{**evaluated, "val/loss": 100}, **train) == {"loss": "val/loss"}
    scored = principal(("val/accuracy", "highest"), **train, **evaluated)
    assert scored == {"score": "val/accuracy", "loss": "val/loss"}
    assert principal(("val/loss", "lowest"), **train, **evaluated) == {
        "score": "val/loss",
        "loss": "train/loss",
    }
    assert principal(loss=100, error=49) == {"loss": "error"}  # it is rarer
    assert principal(loss=100, error=50) == {"loss": "loss"}
    trained = {"loss": 100, "top1": 100, "train/loss": 10, "train/top1": 10}  # as the ViT recipe
    for evaluations in (5, 10):
        scores = dict.fromkeys(("model_loss", "model_top1", "ema_loss", "ema_top1"), evaluations)
        assert principal(**trained, **scores) == {"loss": "model_loss"}
    for name in ("loss/test", "ema_val-loss", "held_out/loss", "evaluation loss", "Valid.loss"):
        assert principal(**trained, **{name: 100})["loss"] == name
    for name in ("latest_loss", "value_loss", "contest/loss"):
        assert principal(**trained, **{name: 100})["loss"] == "loss"
    assert principal(lr=100) == principal(reward=1, accuracy=2) == principal() == {}


def test_the_score_of_a_run_is_that_of_its_snapshots(tmp_path):
    evaluated = {"train/top1": 0.9, "val/top1": 0.5, "val/loss": 2.0}
    view = view_of(tmp_path, started(), scalars(0, **evaluated), snapshot(1, 0.5))
    assert view.row()["principal"] == {
        "role": "score",
        "name": "val/top1",
        "last": 0.5,
        "goal": "highest",
    }
    row = view.table_row()
    assert row["principals"] == {"score": "val/top1", "loss": "val/loss"}
    assert {name: score["goal"] for name, score in row["scores"].items()} == {
        "train/top1": None,
        "val/top1": "highest",
        "val/loss": "lowest",
    }


def test_a_score_that_no_scalar_has_is_a_curve_of_its_own(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, a=1.0), snapshot(1, 7.5), scalars(1, a=2.0))
    assert [each["name"] for each in view.summary()["scalars"]] == ["a", "snapshot score"]
    assert view.row()["principal"]["name"] == "snapshot score"
    write(tmp_path, snapshot(2, 8.5))
    view.refresh()
    assert view.curve("snapshot score")["x"] == [1, 2]
    assert view.curve("snapshot score")["value"] == [7.5, 8.5]


def test_runs_with_the_same_values_have_the_same_digests(tmp_path):
    def digests(name, *events):
        summary = view_of(tmp_path / name, started(), *events).summary()
        return [scalar["digest"] for scalar in summary["scalars"]]

    steps = [scalars(step, loss=1.0 / (step + 1), b=0.5) for step in range(5)]
    same = digests("one", *steps)
    assert same == digests("other", *steps)
    resumed = started(3, kind="resumed")
    assert same == digests("resumed", *steps[:4], resumed, *steps[3:])
    changed = scalars(2, loss=math.nextafter(1 / 3, 1), b=0.5)
    different = digests("changed", *steps[:2], changed, *steps[3:])
    assert (different[0] != same[0], different[1] == same[1]) == (True, True)
    assert digests("shorter", *steps[:4])[0] != same[0]
    between = {**steps[2], "between": True}
    assert digests("between", *steps[:2], between, *steps[3:])[0] != same[0]
