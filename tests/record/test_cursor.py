from __future__ import annotations

import logging
import threading

import pytest

from samestep.errors import RecordError
from samestep.record import cursor as module
from samestep.record.cursor import FILE, Cursor, Sender, lock
from samestep.record.source import open_source
from tests.faults import full_disk

LINES = [b'{"step":%d}\n' % step for step in range(3)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.001)
    (tmp_path / "record").mkdir()
    (tmp_path / "events.jsonl").write_bytes(b"".join(LINES))
    return tmp_path


def test_what_is_kept_is_there_for_the_next(run):
    kept = Cursor(run)
    kept.save("a", 1)
    kept.save("s3://b/c", 2**40)
    kept.save("a", 3)
    again = Cursor(run)
    assert (again.get("a"), again.get("s3://b/c"), again.get("other")) == (3, 2**40, None)
    assert [path.name for path in (run / "record").iterdir()] == ["cursor.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"a": "b"}',
        '{"a": 1.5}',
        '{"a": true}',
        '{"a": null}',
        "\0",
        "\N{SNOWMAN}",
    ],
)
def test_a_file_that_says_something_else_says_nothing(run, text):
    (run / FILE).write_text(text)
    assert Cursor(run).get("a") is None


def test_a_full_disk_stops_nobody():
    with full_disk(4096) as disk:
        (disk / "record").mkdir()
        (disk / "filled").write_bytes(b"x" * 4096)
        kept = Cursor(disk)
        kept.save("a", 1)
        assert kept.get("a") == 1
        assert Cursor(disk).get("a") is None


def test_one_holds_the_lock_until_it_closes_it(tmp_path):
    held = lock(tmp_path)
    assert lock(tmp_path) is None
    held.close()
    lock(tmp_path).close()


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(
        RecordError, match=r"record/lock cannot be written: .*; pass a run's directory"
    ):
        lock(tmp_path / "nowhere")


class Far:
    """A destination of which each call must be let through, or is failed; `calls` counts those that came."""

    name, dropped = "far", 0

    def __init__(self):
        self.pause_seconds, self.taken, self.closed = 0.001, [], False
        self.calls, self.outcomes = threading.Semaphore(0), []
        self.let = threading.Semaphore(0)

    def open(self):
        return self._answer(0)

    def send(self, offset, lines):
        self.taken.append(self._answer((offset, lines)))

    def _answer(self, value):
        self.calls.release()
        self.let.acquire()
        if self.outcomes and (error := self.outcomes.pop(0)) is not None:
            raise error
        return value

    def close(self):
        self.closed = True


def size(run):
    return (run / "events.jsonl").stat().st_size


def test_what_is_there_arrives_and_then_it_ends(run):
    far = Far()
    sender = Sender(open_source(run), far)
    assert not sender.is_open
    far.let.release(100)
    sender.finish()
    assert sender.wait(None)
    assert far.taken == [(0, b"".join(LINES))]
    assert far.closed
    assert sender.status(size(run)) == {
        "name": "far",
        "behind_bytes": 0,
        "dropped": 0,
        "error": None,
    }


def test_what_fails_is_tried_again_and_told_meanwhile(run, caplog):
    far = Far()
    far.outcomes = [
        PermissionError("denied"),
        None,
        ConnectionError("reset"),
        ConnectionError("reset"),
        None,
    ]
    with caplog.at_level(logging.WARNING, "samestep"):
        sender = Sender(open_source(run), far)
        far.let.release(1)
        for _ in range(2):
            far.calls.acquire()
        assert sender.status(size(run)) == {
            "name": "far",
            "behind_bytes": size(run),
            "dropped": 0,
            "error": "PermissionError: denied",
        }
        far.let.release(3)
        for _ in range(3):
            far.calls.acquire()
        assert sender.status(size(run))["error"] == "ConnectionError: reset"
        far.let.release(1)
        sender.finish()
        assert sender.wait(None)
    assert far.taken == [(0, b"".join(LINES))]
    assert sender.status(size(run))["error"] is None
    assert (
        caplog.text.count("the record cannot be sent to far (PermissionError: denied); retrying")
        == 1
    )
    assert "ConnectionError" not in caplog.text  # of the same spell


def test_one_that_never_works_is_given_up_at_the_end(run):
    far = Far()
    far.outcomes = [OSError("no")] * 100
    far.let.release(100)
    sender = Sender(open_source(run), far)
    sender.finish()
    assert not sender.wait(None)
    assert sender.status(size(run)) == {
        "name": "far",
        "behind_bytes": size(run),
        "dropped": 0,
        "error": "OSError: no",
    }


def test_one_that_cannot_be_closed_did_not_get_everything(run, monkeypatch):
    far = Far()
    far.let.release(100)
    monkeypatch.setattr(far, "close", lambda: far._answer(None))
    far.outcomes = [None, None, OSError("full"), OSError("full")]
    sender = Sender(open_source(run), far)
    sender.finish()
    assert not sender.wait(None)
    assert sender.status(size(run))["error"] == "OSError: full"


def test_one_that_hangs_is_left_and_told(run, monkeypatch):
    far = Far()
    sender = Sender(open_source(run), far)
    far.calls.acquire()
    sender.finish()
    assert not sender.wait(0.0)
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.0)
    assert sender.status(size(run))["error"] == "no response for more than 0 seconds"
    far.let.release(100)
    assert sender.wait(None)
