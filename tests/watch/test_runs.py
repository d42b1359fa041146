from __future__ import annotations

import json
import logging
import shutil

import pytest

from samestep.errors import RecordError
from samestep.watch.runs import REMOTE, Follower, PollInterval, open_views, read_all
from tests.watch.serving import serving, until
from tests.watch.writing import scalars, started, write


def test_a_folder_of_runs(tmp_path):
    write(tmp_path / "one", started())
    (tmp_path / "two").mkdir()
    views = open_views(tmp_path)
    assert list(views) == ["one"]
    view = views["one"]
    write(tmp_path / "two" / "deep", started())
    assert views.scan(str(tmp_path)) is True
    assert list(views) == ["one", "two/deep"]
    assert views["one"] is view
    assert views.scan(str(tmp_path)) is False
    (tmp_path / "one" / "events.jsonl").unlink()
    assert views.scan(str(tmp_path)) is True
    assert list(views) == ["two/deep"]
    with pytest.raises(KeyError):
        views["one"]


def test_curves_are_thinned_if_all_together_have_too_many_points(tmp_path, monkeypatch):
    for module in ("runs", "view"):
        monkeypatch.setattr(f"samestep.watch.{module}.MOST_BYTES", 25_000)
        monkeypatch.setattr(f"samestep.watch.{module}.FEWEST_ROWS", 64)
    for name in ("one", "two"):
        losses = (scalars(step, loss=float(-step), top1=float(step)) for step in range(400))
        write(tmp_path / name, started(), *losses)
    views = open_views(tmp_path)
    for view in read_all(views):
        assert view.bytes_held >= 800 * 25
    views.bound()
    assert 5_000 < sum(view.bytes_held for view in views.values()) <= 25_000
    for view in views.values():
        curve = view.curve("loss")
        assert not curve["exact"]
        assert (curve["x"][0], curve["x"][-1]) == (0, 399)
    write(tmp_path / "one", *(scalars(step, loss=1.0) for step in range(400, 900)))
    views["one"].refresh()  # the limit of each curve stays
    bounded = views["one"].bytes_held
    assert bounded <= 2 * 256 * 25 * 1.5  # with spare room
    write(tmp_path / "three", started(), *(scalars(step, loss=1.0) for step in range(1900)))
    views.scan(str(tmp_path))
    views["three"].refresh()
    assert views["three"].bytes_held <= 256 * 25 * 1.5


def test_ids_with_several_locations(tmp_path):
    for name in ("a/run", "b/run", "b/more"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, started())
    single = open_views(tmp_path / "a/run")
    assert [(run, view.name) for run, view in single.items()] == [(".", "run")]
    several = open_views(tmp_path / "a/run", tmp_path / "b/run", tmp_path / "b", tmp_path / "b")
    assert [(run, view.name) for run, view in several.items()] == [
        (run, run) for run in ("run", "run-2", "b/more", "b/run")
    ]
    assert [view.source.location for view in several.at(str(tmp_path / "b"))] == [
        str(tmp_path / "b/more"),
        str(tmp_path / "b/run"),
    ]


def test_the_folders_of_a_run_hide_no_other_run(tmp_path, monkeypatch, caplog):
    for name in ("a", "b"):
        write(tmp_path / name, started())
    for number in range(9):
        (tmp_path / "a" / str(number)).mkdir()
        write(tmp_path / "a" / str(number) / "run", started())
    for module in ("samestep.record.source", "samestep.watch.runs"):
        monkeypatch.setattr(f"{module}.MAX_FOLDERS", 9)
    with caplog.at_level(logging.WARNING, "samestep"):
        views = open_views(tmp_path)
    assert list(views) == ["a", "b"]
    assert "has more than 9 folders" in caplog.text
    follower = Follower(views, views.locations[0], lambda _: None)
    follower._scan()
    assert "has more than 9 folders" in follower.faults[str(tmp_path)]


def test_a_url(tmp_path):
    write(tmp_path / "one", started(), scalars(0, loss=1.0))
    views = open_views(f"file://{tmp_path}")
    views["one"].refresh()
    assert views["one"].curve("loss")["value"] == [1]


@pytest.fixture
def views(tmp_path):
    for name in ("bad", "good"):
        write(tmp_path / name, started())
    return open_views(tmp_path)


def test_a_run_that_cannot_be_read_is_reported_once_and_does_not_affect_others(views, caplog):
    def fail():
        raise RecordError("the storage did not respond")

    changes = []
    follower = Follower(views, views.locations[0], changes.append)
    version, views["bad"].source.version = views["bad"].source.version, fail
    follower._interval = PollInterval(0.0, 0.0)
    with caplog.at_level(logging.WARNING, "samestep"):
        assert [
            follower._poll(views["bad"]),
            follower._poll(views["bad"]),
            follower._poll(views["good"]),
        ] == [False, False, True]
    assert [
        record.getMessage().endswith("RecordError: the storage did not respond")
        for record in caplog.records
    ] == [True]
    assert (changes, follower.faults) == (
        [set()],
        {views["bad"].source.location: "RecordError: the storage did not respond"},
    )
    views["bad"].source.version = version
    assert follower._poll(views["bad"]) is True
    assert (changes, follower.faults) == ([set(), set()], {})


def test_the_fault_of_a_removed_run_is_forgotten(views, tmp_path):
    follower = Follower(views, views.locations[0], lambda _: None)
    follower.faults = {views["bad"].source.location: "RecordError: the storage did not respond"}
    shutil.rmtree(tmp_path / "bad")
    follower._scan()
    assert follower.faults == {}


def test_new_and_removed_runs_are_announced(views, tmp_path):
    changes = []
    follower = Follower(views, views.locations[0], changes.append)
    follower._scan()
    write(tmp_path / "new", started())
    (tmp_path / "bad" / "events.jsonl").unlink()
    follower._scan()
    assert changes == [{"new", "bad"}]


def test_a_remote_run_without_news_is_polled_less_often(views, tmp_path, monkeypatch):
    clock, view, polled = [0], views["good"], []
    monkeypatch.setattr("samestep.watch.runs.time.monotonic", lambda: clock[0])
    follower = Follower(views, views.locations[0], lambda ids: None)
    follower._interval = REMOTE
    view.refresh()
    advance, view.advance = view.advance, lambda: polled.append(clock[0]) or advance()

    def pass_seconds(start, end):
        for clock[0] in range(start, end):
            follower._poll(view)

    pass_seconds(0, 1000)
    assert polled[:5] == [0, 1, 2, 3, 4]
    assert polled[-1] - polled[-2] == REMOTE.longest
    write(tmp_path / "good", scalars(0, loss=1.0))
    polled.clear()
    pass_seconds(1000, 1100)
    assert polled[1] == polled[0] + 1


def test_the_stream_announces_new_events_new_runs_and_replaced_records(tmp_path):
    write(tmp_path / "one", started(), scalars(0, loss=1.0))
    with serving(tmp_path) as served:
        until(
            lambda: (
                served.get("/api/curve", params={"id": "one", "name": "loss"}).status_code == 200
            )
        )
        with served.client.stream("GET", "/api/changes") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            news = messages(response)
            write(tmp_path / "one", scalars(1, loss=0.5))
            assert next(news) == ["one"]
            assert served.json("/api/curve", id="one", name="loss")["value"] == [1, 0.5]
            (tmp_path / "one" / "events.jsonl").unlink()
            write(tmp_path / "one", started(), scalars(0, score=1.0))
            next(
                ids
                for ids in news
                if served.get("/api/curve", params={"id": "one", "name": "score"}).status_code
                == 200
            )
            write(tmp_path / "two", started())
            next(ids for ids in news if "two" in ids)
            assert [run["id"] for run in served.json("/api/runs")["runs"]] == ["one", "two"]


def messages(response):
    """Yield the ids in each message."""
    return (
        json.loads(line.removeprefix("data: "))["ids"]
        for line in response.iter_lines()
        if line.startswith("data: ")
    )
