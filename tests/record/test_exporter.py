"""The process that forwards a record: by hand, and beside the one that writes it, where each of the two may be killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from samestep.record import exporter as beside
from samestep.record import open_record, read_events
from samestep.record.cursor import lock
from samestep.record.events import parse_events
from samestep.record.exporter import ExporterProcess
from samestep.record.source import open_source
from tests.record.far_sinks import Hanging, Refusing, name_of

SECONDS = 60.0


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def stream(place):
    source, data = open_source(place), b""
    while lines := source.read(len(data)):
        data += lines
    return data


def by_hand(directory, *words):
    command = [sys.executable, "-m", "samestep.record.exporter", str(directory), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def far(tmp_path):
    return f"file://{tmp_path}/far"


@pytest.fixture
def record(run):
    opened = open_record(run, writes=True)
    yield opened
    opened.close()


def written(run):
    return (run / "events.jsonl").read_bytes()


def check_that_all_arrived(run, far):
    """Each byte is there once, but for what was told of sinks when they had ended."""
    there = stream(far)
    assert written(run).startswith(there)
    assert {event["event"] for event in parse_events(written(run)[len(there) :])} <= {"sink"}


def told(run):
    """Return what was told of sinks at last, by name."""
    return {event["name"]: event for event in read_events(run) if event["event"] == "sink"}


def test_by_hand_it_sends_what_is_missing(record, run, far):
    record.event("started", step=0)
    record.image(0, "a", memoryview(bytes(4)).cast("B", (2, 2)))
    record.flush()
    assert by_hand(run, "--to", far).returncode == 0
    record.event("finished", step=1)
    assert by_hand(run, "--to", far).returncode == 0
    assert stream(far) == written(run)
    assert (
        open_source(far).open_image("images/a-00000000.png")[0]
        == (run / "images" / "a-00000000.png").stat().st_size
    )


def test_by_hand_it_says_what_did_not_arrive(record, run):
    record.event("started", step=0)
    ended = by_hand(run, "--to", "file:///proc/none/run", "--to", name_of(Refusing))
    assert ended.returncode == 1
    assert '"error": "ConnectionError: no route"' in ended.stdout
    assert "the record does not reach file:///proc/none/run: StorageError: cannot" in ended.stderr


def test_by_hand_it_refuses_what_is_no_run_or_has_a_process_beside_it(record, run, far, tmp_path):
    assert (
        "holds no events.jsonl; expected the directory of a run"
        in by_hand(tmp_path, "--to", far).stderr
    )
    assert "nothing was given to send to; expected --to or --transfer" in by_hand(run).stderr
    assert (
        "sinks='nowhere:Sink' was given; expected the module:Class"
        in by_hand(run, "--to", "nowhere:Sink").stderr
    )
    with lock(run):
        assert f"another process forwards the record of {run}" in by_hand(run, "--to", far).stderr


def test_neither_it_nor_what_reads_records_needs_torch():
    modules = "samestep.record.exporter, samestep.record.source, samestep.record.exporter, samestep.storage"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_beside_the_writer_events_arrive_while_it_goes_on(record, run, far):
    forwarder = ExporterProcess(run, [far], None, record)
    for step in range(3):
        record.event("scalars", step=step)
        wait_until(lambda step=step: b'"step":%d' % step in stream(far))
    record.event("finished", step=3)
    forwarder.finish()
    check_that_all_arrived(run, far)
    assert told(run)[far].items() >= {"behind_bytes": 0, "dropped": 0, "error": None}.items()


def test_a_killed_forwarder_is_replaced_and_nothing_comes_twice(
    record, run, far, caplog, monkeypatch
):
    monkeypatch.setattr(beside, "FIRST_PAUSE_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING, "samestep"):
        forwarder = ExporterProcess(run, [far], None, record)
        for step in range(3):
            record.event("scalars", step=step)
            wait_until(lambda step=step: b'"step":%d' % step in stream(far))
            os.kill(forwarder.pid, signal.SIGKILL)
            record.event("scalars", step=step + 100)
            wait_until(
                lambda step=step: (
                    caplog.text.count("ended with status -9; it is started again") == step + 1
                )
            )
        forwarder.finish()
    check_that_all_arrived(run, far)


WRITER = """
import sys, time
from pathlib import Path
from samestep.record import open_record
from samestep.record.exporter import Beside
record = open_record(Path(sys.argv[1]), writes=True)
Beside(Path(sys.argv[1]), [sys.argv[2]], None, record)
step = 0
while True:
    record.event("scalars", step=step)
    step += 1
    time.sleep(0.001)
"""


def test_after_the_writer_was_killed_the_rest_is_sent_and_nothing_stays_behind(run, far):
    for _ in range(2):
        before = len(stream(far))
        with subprocess.Popen([sys.executable, "-c", WRITER, str(run), far]) as writer:
            wait_until(lambda before=before: len(stream(far)) > before)
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        # the forwarder has ended by itself
        wait_until(lambda: (held := lock(run)) is not None and not held.close())
        check_that_all_arrived(run, far)


def test_one_that_hangs_delays_neither_the_others_nor_the_end_for_long(
    record, run, far, caplog, monkeypatch
):
    monkeypatch.setattr(beside, "FINISH_SECONDS", 0.5)
    hanging = name_of(Hanging)
    with caplog.at_level(logging.WARNING, "samestep"):
        forwarder = ExporterProcess(run, [hanging, far], None, record)
        record.event("started", step=0)
        wait_until(lambda: (run / "hanging").exists() and stream(far))
        record.event("finished", step=1)
        size = len(written(run))
        forwarder.finish()
    assert b"finished" in stream(far)
    assert told(run)[hanging]["error"] == "the rest did not arrive before the run ended"
    assert told(run)[hanging]["behind_bytes"] >= size
    assert f"bytes of the record did not reach {hanging}; the next start sends them" in caplog.text


def test_what_a_users_function_prints_goes_to_stderr(record, run, tmp_path, monkeypatch, capfd):
    (tmp_path / "chatty.py").write_text("def send(path):\n    print('sending', path.name)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forwarder = ExporterProcess(run, [], "chatty:send", record)
    record.event("started", step=0)
    forwarder.finish()
    assert "sending 00000000000000000000-" in capfd.readouterr().err
    assert told(run)["chatty:send"]["error"] is None
