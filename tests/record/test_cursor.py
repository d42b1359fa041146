from __future__ import annotations

import json
import logging
import threading
import time

import pytest

from samestep.errors import RecordError
from samestep.record import cursor as module
from samestep.record import sinks
from samestep.record.cursor import FILE, Cursor, Sender, lock
from samestep.record.events import FILE_NAME
from samestep.record.source import open_source
from tests.faults import full_disk

LINES = [b'{"step":%d}\n' % step for step in range(3)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.001)
    (tmp_path / "record").mkdir()
    (tmp_path / "events.jsonl").write_bytes(b"".join(LINES))
    return tmp_path


def test_saved_positions_are_loaded(run):
    cursor = Cursor(run)
    cursor.save("a", 1)
    cursor.save("s3://b/c", 2**40)
    cursor.save("a", 3)
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
def test_an_invalid_file_is_ignored(run, text):
    (run / FILE).write_text(text)
    assert Cursor(run).get("a") is None


def test_a_full_disk_is_ignored():
    with full_disk(4096) as disk:
        (disk / "record").mkdir()
        (disk / "filled").write_bytes(b"x" * 4096)
        cursor = Cursor(disk)
        cursor.save("a", 1)
        assert cursor.get("a") == 1
        assert Cursor(disk).get("a") is None


def test_the_lock_is_held_until_it_is_closed(tmp_path):
    held = lock(tmp_path)
    assert lock(tmp_path) is None
    held.close()
    lock(tmp_path).close()


def test_an_unwritable_directory_raises(tmp_path):
    with pytest.raises(
        RecordError, match=r"record/lock cannot be written: .*; pass a run's directory"
    ):
        lock(tmp_path / "nowhere")


class Remote:
    """A destination whose calls block until `allowed`, then return or fail; counts its calls."""

    is_slow, waits_until = False, 0.0
    name, dropped = "remote", 0

    def __init__(self):
        self.pause_seconds, self.received, self.closed = 0.001, [], False
        self.calls, self.outcomes = threading.Semaphore(0), []
        self.allowed = threading.Semaphore(0)

    def open(self):
        return self._answer(0)

    def send(self, offset, lines):
        self.received.append(self._answer((offset, lines)))

    def _answer(self, value):
        self.calls.release()
        self.allowed.acquire()
        if self.outcomes and (error := self.outcomes.pop(0)) is not None:
            raise error
        return value

    def close(self):
        self.closed = True


def size(run):
    return (run / "events.jsonl").stat().st_size


def test_everything_present_is_sent_before_the_thread_ends(run):
    remote = Remote()
    sender = Sender(open_source(run), remote)
    assert not sender.is_open
    remote.allowed.release(100)
    sender.finish()
    assert sender.wait(None)
    assert remote.received == [(0, b"".join(LINES))]
    assert remote.closed
    assert sender.status(size(run)) == {
        "name": "remote",
        "behind_bytes": 0,
        "dropped": 0,
        "error": None,
    }


def test_failures_are_retried_and_reported(run, caplog):
    remote = Remote()
    remote.outcomes = [
        PermissionError("denied"),
        None,
        ConnectionError("reset"),
        ConnectionError("reset"),
        None,
    ]
    with caplog.at_level(logging.WARNING, "samestep"):
        sender = Sender(open_source(run), remote)
        remote.allowed.release(1)
        for _ in range(2):
            remote.calls.acquire()
        assert sender.status(size(run)) == {
            "name": "remote",
            "behind_bytes": size(run),
            "dropped": 0,
            "error": "PermissionError: denied",
        }
        remote.allowed.release(3)
        for _ in range(3):
            remote.calls.acquire()
        assert sender.status(size(run))["error"] == "ConnectionError: reset"
        remote.allowed.release(1)
        sender.finish()
        assert sender.wait(None)
    assert remote.received == [(0, b"".join(LINES))]
    assert sender.status(size(run))["error"] is None
    assert (
        caplog.text.count("the record cannot be sent to remote (PermissionError: denied); retrying")
        == 1
    )
    assert "ConnectionError" not in caplog.text  # part of the same outage


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_destination_that_exits_is_retried_and_reported(run, caplog, error):
    remote = Remote()
    remote.outcomes = [None, error, None]
    remote.allowed.release(2)
    with caplog.at_level(logging.WARNING, "samestep"):
        sender = Sender(open_source(run), remote)
        for _ in range(2):
            remote.calls.acquire()
        remote.allowed.release(10)
        sender.finish()
        assert sender.wait(None)
    assert remote.received == [(0, b"".join(LINES))]
    assert f"cannot be sent to remote ({type(error).__name__}: {error}); retrying" in caplog.text


@pytest.mark.parametrize("error", [OSError("no"), SystemExit("no"), KeyboardInterrupt("no")])
def test_a_destination_that_always_fails_is_abandoned_at_the_end(run, error):
    remote = Remote()
    remote.outcomes = [error] * 100
    remote.allowed.release(100)
    sender = Sender(open_source(run), remote)
    sender.finish()
    assert not sender.wait(None)
    assert sender.status(size(run)) == {
        "name": "remote",
        "behind_bytes": size(run),
        "dropped": 0,
        "error": f"{type(error).__name__}: no",
    }


def test_a_failing_close_counts_as_unsent(run, monkeypatch):
    remote = Remote()
    remote.allowed.release(100)
    monkeypatch.setattr(remote, "close", lambda: remote._answer(None))
    remote.outcomes = [None, None, OSError("full"), OSError("full")]
    sender = Sender(open_source(run), remote)
    sender.finish()
    assert not sender.wait(None)
    assert sender.status(size(run))["error"] == "OSError: full"


def test_a_hanging_destination_is_abandoned_and_reported(run, monkeypatch):
    remote = Remote()
    sender = Sender(open_source(run), remote)
    remote.calls.acquire()
    sender.finish()
    assert not sender.wait(0.0)
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.0)
    assert sender.status(size(run))["error"] == "no response for more than 0 seconds"
    remote.allowed.release(100)
    assert sender.wait(None)


class LateSource:
    """A source whose last event is written after it was found to be empty during `finish`."""

    def __init__(self, directory, last):
        self._source, self._file, self._last = open_source(directory), directory / FILE_NAME, last
        self.sender = None
        self.empty_reads = 0

    def read(self, offset):
        lines = self._source.read(offset)
        if not lines and self.sender is not None and self.sender._finishing.is_set():
            self.empty_reads += 1
            if self._last is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps(self._last) + "\n")
                self._last = None
        return lines


def failed(error, *, is_secondary):
    fields = {"error": error, "is_secondary": is_secondary, "time": time.time()}
    return {"event": "failed", **fields}


@pytest.mark.parametrize("cause", [failed("ValueError: no data", is_secondary=False), None])
def test_a_hook_gets_the_failure_that_another_worker_has_named(tmp_path, monkeypatch, cause):
    """Worker 0 has recorded its own error and ended the run; worker 1 records its error later."""
    errors = []
    monkeypatch.setattr(
        sinks, "find_hook", lambda name: lambda event: errors.append(event["error"])
    )
    if cause is None:  # it never comes: the wait is limited
        monkeypatch.setattr(sinks, "CAUSE_SECONDS", 0.2)
    named = "WorldError: worker 1 (host a) failed first, at step 3: ValueError: no data"
    (tmp_path / "record").mkdir()
    line = json.dumps(failed(named, is_secondary=True)) + "\n"
    (tmp_path / FILE_NAME).write_text(line)
    source = LateSource(tmp_path, cause)
    sender = source.sender = Sender(
        source, sinks.HookAdapter("m:f", tmp_path, source, Cursor(tmp_path))
    )
    sender.finish()
    assert sender.wait(None)
    assert errors == [named, "ValueError: no data"][: 1 if cause is None else 2]
    assert source.empty_reads > 0
