from __future__ import annotations

import logging
import sys

import pytest

from samestep.config import SINKS, merge
from samestep.errors import ConfigError
from samestep.record import open_record
from samestep.record.cursor import Cursor
from samestep.record.sinks import NAMED, SinkAdapter, SinkSpec, check_sinks, open_sink, sinks_of
from samestep.record.source import open_source
from tests.record.faulty_sinks import name_of


class OwnSink:
    def __init__(self, directory):
        self.directory = directory


def test_a_users_class_is_called_with_the_directory(tmp_path):
    check_sinks([SinkSpec("sinks", name_of(OwnSink))])
    assert open_sink(name_of(OwnSink), tmp_path).directory == tmp_path


def test_all_options_that_name_sinks_are_one_list():
    options = {"sinks": "wandb,s3://b/one", "remote": "s3://b/one", "on_event": "m:f"}
    sinks = sinks_of(merge({"dir": "runs", "transfer": "m:g", **options}, {}))
    assert sinks == [
        ("sinks", "s3://b/one"), ("sinks", "wandb"), ("transfer", "m:g"), ("on_event", "m:f")
    ]  # fmt: skip
    assert [sink.flag for sink in sinks[1:]] == [
        "--to wandb", "--transfer m:g", "--on-event VALUE"
    ]  # fmt: skip


def test_every_sink_name_has_a_class():
    assert tuple(NAMED) == SINKS


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_raises_with_the_install_command(name, monkeypatch):
    check_sinks([SinkSpec("sinks", name)])
    monkeypatch.setitem(sys.modules, NAMED[name][1], None)
    with pytest.raises(
        ConfigError,
        match=rf'sinks=.{name}. requires the package {name}: pip install "samestep\[{name}\]"',
    ):
        check_sinks([SinkSpec("sinks", name)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere:Sink",
            "sinks must name an importable module:Class, got 'nowhere:Sink': ModuleNotFoundError",
        ),
        (
            "math:pi",
            "sinks must name a class that takes the run's directory, got 'math:pi'",
        ),
        (
            "s4://bucket/run",
            "expected a URL that fsspec knows, such as s3://bucket/runs/one, got s4://bucket/run",
        ),
    ],
)
def test_sinks_that_cannot_work_raise(name, message):
    with pytest.raises(ConfigError, match=message):
        check_sinks([SinkSpec("sinks", name)])


PIXELS = memoryview(bytes(6)).cast("B", (2, 3))


class Notes:
    """A sink that records its calls, and raises the exception that `fault` returns."""

    def __init__(self, directory):
        self.calls = []
        Notes.last = self

    @staticmethod
    def fault(call):
        return None

    def note(self, *call):
        error = Notes.fault(call)
        if error is not None:
            raise error
        self.calls.append(call)

    def take(self, event):
        self.note("take", event.get("step"))

    def image(self, event, data):
        self.note("image", event["step"], data[:4])

    def flush(self):
        self.note("flush")

    def close(self):
        self.note("close")


@pytest.fixture
def run(tmp_path):
    record = open_record(tmp_path, writes=True)
    record.event("started", step=0)
    record.image(1, "a", PIXELS)
    record.flush()
    record.event("finished", step=2)
    record.close()
    (tmp_path / "record").mkdir()
    return tmp_path


@pytest.fixture
def adapter(run, monkeypatch):
    monkeypatch.setattr(Notes, "fault", Notes.fault)
    return SinkAdapter(f"{__name__}:Notes", run, open_source(run), Cursor(run))


ALL = [("take", 0), ("take", 1), ("image", 1, b"\x89PNG"), ("take", 2), ("flush",)]


def lines(run):
    return (run / "events.jsonl").read_bytes()


def test_each_event_is_sent_and_each_image_after_its_event(adapter, run):
    assert adapter.open() == 0
    adapter.send(0, lines(run))
    adapter.close()
    assert Notes.last.calls == [*ALL, ("close",)]


def test_another_process_continues_after_the_last_flush(adapter, run):
    adapter.open()
    adapter.send(0, lines(run))
    again = SinkAdapter(adapter.name, run, open_source(run), Cursor(run))
    assert again.open() == len(lines(run))


def test_another_process_sends_unflushed_events_again(adapter, run):
    adapter.open()
    Notes.fault = staticmethod(
        lambda call: ConnectionError("reset") if call == ("flush",) else None
    )
    with pytest.raises(ConnectionError):
        adapter.send(0, lines(run))
    assert SinkAdapter(adapter.name, run, open_source(run), Cursor(run)).open() == 0


@pytest.mark.parametrize("failing", ALL)
def test_after_a_failure_it_continues_with_the_failed_call(adapter, run, failing):
    adapter.open()
    errors = [ConnectionError("reset")]
    Notes.fault = staticmethod(lambda call: errors.pop() if call == failing and errors else None)
    first = lines(run)
    with pytest.raises(ConnectionError):
        adapter.send(0, first)
    record = open_record(run, writes=True)
    record.event("more", step=3)
    record.close()
    adapter.send(0, lines(run))
    assert Notes.last.calls == [*ALL[:-1], ("take", 3), ("flush",)]


def test_a_rejected_event_is_skipped_and_counted(adapter, run, caplog):
    adapter.open()
    Notes.fault = staticmethod(
        lambda call: KeyError("epoch") if call[0] in {"image", "take"} and call[1] == 1 else None
    )
    with caplog.at_level(logging.WARNING, "samestep"):
        adapter.send(0, lines(run))
    assert Notes.last.calls == [("take", 0), ("take", 2), ("flush",)]
    assert adapter.dropped == 2
    assert (
        caplog.text.count(
            "cannot store an event (KeyError: 'epoch'); such events are skipped and counted"
        )
        == 1
    )


def test_a_missing_image_is_counted(adapter, run):
    for file in (run / "images").iterdir():
        file.unlink()
    adapter.open()
    adapter.send(0, lines(run))
    assert adapter.dropped == 1
    assert Notes.last.calls == [call for call in ALL if call[0] != "image"]


def test_a_new_record_is_sent_from_its_start(adapter, run):
    adapter.open()
    adapter.send(0, lines(run))
    (run / "events.jsonl").write_bytes(b"")
    assert SinkAdapter(adapter.name, run, open_source(run), Cursor(run)).open() == 0
