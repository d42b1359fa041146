from __future__ import annotations

import logging

import pytest

from samestep.errors import RecordError
from samestep.watch.changes import REMOTE, Follower, Rhythm
from samestep.watch.view import open_views
from tests.watch.writing import scalars, started, write


@pytest.fixture
def views(tmp_path):
    for name in ("bad", "good"):
        write(tmp_path / name, started())
    return open_views(tmp_path)


def test_a_run_that_cannot_be_read_is_told_once_and_none_of_the_others_business(views, caplog):
    def fail():
        raise RecordError("the storage did not answer")

    told = []
    follower = Follower(views, views.locations[0], told.append)
    version, views["bad"].source.version = views["bad"].source.version, fail
    follower._rhythm = Rhythm(0.0, 0.0)
    with caplog.at_level(logging.WARNING, "samestep"):
        assert [
            follower._look(views["bad"]),
            follower._look(views["bad"]),
            follower._look(views["good"]),
        ] == [False, False, True]
    assert [
        record.getMessage().endswith("RecordError: the storage did not answer")
        for record in caplog.records
    ] == [True]
    assert (told, follower.faults) == (
        [set()],
        {views["bad"].source.location: "RecordError: the storage did not answer"},
    )
    views["bad"].source.version = version
    assert follower._look(views["bad"]) is True
    assert (told, follower.faults) == ([set(), set()], {})


def test_runs_that_came_or_went_are_told(views, tmp_path):
    told = []
    follower = Follower(views, views.locations[0], told.append)
    follower._scan()
    write(tmp_path / "new", started())
    (tmp_path / "bad" / "events.jsonl").unlink()
    follower._scan()
    assert told == [{"new", "bad"}]


def test_a_remote_run_at_rest_is_looked_at_less_often(views, tmp_path, monkeypatch):
    clock, view, looked = [0], views["good"], []
    monkeypatch.setattr("samestep.watch.changes.time.monotonic", lambda: clock[0])
    follower = Follower(views, views.locations[0], lambda ids: None)
    follower._rhythm = REMOTE
    view.refresh()
    advance, view.advance = view.advance, lambda: looked.append(clock[0]) or advance()

    def pass_seconds(start, end):
        for clock[0] in range(start, end):
            follower._look(view)

    pass_seconds(0, 1000)
    assert looked[:5] == [0, 1, 2, 3, 4]
    assert looked[-1] - looked[-2] == REMOTE.longest
    write(tmp_path / "good", scalars(0, loss=1.0))
    looked.clear()
    pass_seconds(1000, 1100)
    assert looked[1] == looked[0] + 1
