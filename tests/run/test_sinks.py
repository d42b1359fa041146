"""Complete runs whose record is exported to S3, and to sinks that fail."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import samestep as ss
from samestep.errors import ConfigError, RecordError
from samestep.record import exporter
from samestep.record.events import parse_events
from samestep.record.source import RunLocation, open_source
from tests.jobs import STEPS, events, image_job, train
from tests.record.faulty_sinks import Hanging, Refusing, name_of
from tests.s3 import s3_server
from tests.snapshot import functions
from tests.workers import run_workers, try_workers

SECONDS = 240.0
URL = "s3://bucket/runs/one"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def stream(url):
    source, data = open_source(url), b""
    while lines := source.read(len(data)):
        data += lines
    return data


def job(run, at, action):
    """Train with an image at every step, and call `action` at step `at`."""

    def hook(step):
        run.log_image("sample", np.full((4, 4), step, np.uint8))
        if step == at:
            action()

    return image_job(run, hook=hook)


def wait_for(url, kind, **values):
    """Wait until an event with these values can be read at a URL."""
    source, deadline = open_source(url), time.monotonic() + SECONDS
    offset, wanted = 0, {"event": kind, **values}
    while True:
        lines = source.read(offset)
        if any({**event, **wanted} == event for event in parse_events(lines)):
            return
        assert time.monotonic() < deadline, f"{kind} was not sent"
        offset += len(lines)
        time.sleep(0.02)


def wait_and_die(url, step):
    wait_for(url, "scalars", step=step)
    os.kill(os.getpid(), signal.SIGKILL)


def seen(url):
    size, pieces = open_source(url).open_image(f"images/sample-{STEPS - 1:08d}.png")
    return stream(url), RunLocation("s3://bucket").find(), size == len(b"".join(pieces))


@pytest.mark.long
def test_record_on_s3_is_readable_during_the_run_and_complete_after_a_kill(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr(exporter, "FINISH_SECONDS", SECONDS)  # all is sent on a busy machine, too
    options = {"remote": URL, "snapshot_every": 2}
    killed = try_workers(
        train,
        1,
        lambda run: job(run, 5, lambda: wait_and_die(URL, 3)),
        tmp_path,
        options,
        environment=server.environment,
    )
    assert killed[0].exitcode == -signal.SIGKILL
    run_workers(
        train,
        1,
        lambda run: job(run, 0, lambda: None),
        tmp_path,
        options,
        environment=server.environment,
    )
    sent, runs, has_image = run_workers(seen, 1, URL, environment=server.environment)[0]
    written = (tmp_path / "events.jsonl").read_bytes()
    assert written.startswith(sent)
    assert {event["event"] for event in parse_events(written[len(sent) :])} <= {"sink"}
    assert [
        event["event"]
        for event in parse_events(sent)
        if event["event"] in {"started", "resumed", "finished"}
    ] == [
        "started",
        "resumed",
        "finished",
    ]
    assert runs == ["runs/one"]
    assert has_image


@pytest.mark.parametrize(
    ("sink", "error"),
    [
        (Hanging, "the rest was not sent before the run ended"),
        (Refusing, "ConnectionError: no route"),
    ],
)
def test_failing_sink_does_not_stop_training(tmp_path, monkeypatch, sink, error):
    name, far = name_of(sink), f"file://{tmp_path}/far"
    finish = exporter.ExporterProcess.finish

    def finish_after_the_other_sink(process):
        wait_for(far, "finished")
        finish(process)

    monkeypatch.setattr(exporter, "FINISH_SECONDS", 0.5)
    monkeypatch.setattr(exporter.ExporterProcess, "finish", finish_after_the_other_sink)
    train(image_job, tmp_path, {"sinks": [name, far]})
    assert [event["step"] for event in events(tmp_path, "finished")] == [STEPS]
    last = {event["name"]: event for event in events(tmp_path, "sink")}[name]
    assert last["error"] == error
    assert last["behind_bytes"] > 0
    assert b'"finished"' in stream(far)


def test_failure_of_a_run_is_exported(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        ss.init(dir=tmp_path / "run", sinks=f"file://{tmp_path}/far"),
    ):
        raise ZeroDivisionError
    assert [event["event"] for event in parse_events(stream(f"file://{tmp_path}/far"))] == [
        "started",
        "failed",
    ]


@pytest.mark.parametrize("error", [RecordError, ZeroDivisionError])
def test_a_function_that_never_worked_is_the_error_of_a_run_that_has_no_other(tmp_path, error):
    run = ss.init(dir=tmp_path / "run", transfer=f"{functions.__name__}:refuse")

    def job():
        with run:
            run.log(loss=1.0)
            if error is ZeroDivisionError:
                raise ZeroDivisionError

    with pytest.raises(error):
        job()
    end = "failed" if error is ZeroDivisionError else "finished"
    assert len(events(tmp_path / "run", end)) == 1


def test_invalid_sink_is_an_error_at_the_start(tmp_path):
    with pytest.raises(
        ConfigError, match="sinks must name an importable module:Class, got 'nowhere:Sink'"
    ):
        train(image_job, tmp_path, {"sinks": "nowhere:Sink"})
