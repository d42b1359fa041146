"""The exporter: as a command, and as a child of the process that writes the record."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from samestep.errors import RecordError
from samestep.record import exporter, open_record, read_events
from samestep.record.cursor import lock
from samestep.record.events import parse_events
from samestep.record.exporter import ExporterProcess
from samestep.record.sinks import SinkSpec
from samestep.record.source import open_source
from tests.record.faulty_sinks import Forking, Hanging, Killed, Refusing, Stopping, name_of

SECONDS = 60.0


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, (
            f"the condition did not become true within {SECONDS:.0f} seconds"
        )
        time.sleep(0.01)


def stream(location):
    source, data = open_source(location), b""
    while lines := source.read(len(data)):
        data += lines
    return data


def sinks(*values):
    return [SinkSpec("sinks", value) for value in values]


def run_exporter(directory, *words):
    command = [sys.executable, "-m", "samestep.record.exporter", str(directory), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def waits_for_lock(pid):
    """Whether an exporter has begun: it has lowered its own priority."""
    lowest = 19
    lowered = min(lowest, os.getpriority(os.PRIO_PROCESS, 0) + exporter.NICENESS)
    return pid is not None and os.getpriority(os.PRIO_PROCESS, pid) == lowered


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Let exporters take as long to start and to send as a busy machine needs."""
    for name in ("FINISH_SECONDS", "EXIT_SECONDS"):
        monkeypatch.setattr(exporter, name, SECONDS)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def remote(tmp_path):
    return f"file://{tmp_path}/remote"


@pytest.fixture
def record(run):
    opened = open_record(run, writes=True)
    yield opened
    opened.close()


def written(run):
    return (run / "events.jsonl").read_bytes()


def check_all_sent(run, remote):
    """Each byte was sent once, except for `sink` events written after the end."""
    sent = stream(remote)
    assert written(run).startswith(sent)
    assert {event["event"] for event in parse_events(written(run)[len(sent) :])} <= {"sink"}


def statuses(run):
    """Return the last `sink` event of each sink, by name."""
    return {event["name"]: event for event in read_events(run) if event["event"] == "sink"}


def test_the_command_sends_what_is_missing(record, run, remote):
    record.event("started", step=0)
    record.image(0, "a", memoryview(bytes(4)).cast("B", (2, 2)))
    record.flush()
    assert run_exporter(run, "--to", remote).returncode == 0
    record.event("finished", step=1)
    assert run_exporter(run, "--to", remote).returncode == 0
    assert stream(remote) == written(run)
    assert (
        open_source(remote).open_image("images/a-00000000.png")[0]
        == (run / "images" / "a-00000000.png").stat().st_size
    )


def test_the_command_reports_what_was_not_sent(record, run):
    record.event("started", step=0)
    ended = run_exporter(run, "--to", "file:///proc/none/run", "--to", name_of(Refusing))
    assert ended.returncode == 1
    assert '"error": "ConnectionError: no route"' in ended.stdout
    assert (
        "the record cannot be sent to file:///proc/none/run (StorageError: cannot write"
        in ended.stderr
    )


def test_the_command_rejects_wrong_use_and_a_running_exporter(record, run, remote, tmp_path):
    assert (
        "expected a run's directory with events.jsonl, got"
        in run_exporter(tmp_path, "--to", remote).stderr
    )
    assert "expected a destination; pass --to, --transfer or --on-event" in run_exporter(run).stderr
    assert (
        "sinks must name an importable module:Class, got 'nowhere:Sink'"
        in run_exporter(run, "--to", "nowhere:Sink").stderr
    )
    with lock(run):
        assert f"another exporter uses {run}" in run_exporter(run, "--to", remote).stderr


def test_the_exporter_and_readers_do_not_import_torch():
    modules = "samestep.record.exporter, samestep.record.source, samestep.storage"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_events_are_sent_while_the_record_is_written(record, run, remote):
    process = ExporterProcess(run, sinks(remote), record)
    for step in range(3):
        record.event("scalars", step=step)
        wait_until(lambda step=step: b'"step":%d' % step in stream(remote))
    record.event("finished", step=3)
    process.finish()
    check_all_sent(run, remote)
    assert statuses(run)[remote].items() >= {"behind_bytes": 0, "dropped": 0, "error": None}.items()


def test_a_killed_exporter_is_restarted_and_sends_nothing_twice(
    record, run, remote, caplog, monkeypatch
):
    monkeypatch.setattr(exporter, "FIRST_PAUSE_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING, "samestep"):
        process = ExporterProcess(run, sinks(remote), record)
        for step in range(3):
            record.event("scalars", step=step)
            wait_until(lambda step=step: b'"step":%d' % step in stream(remote))
            os.kill(process.pid, signal.SIGKILL)
            record.event("scalars", step=step + 100)
            wait_until(
                lambda step=step: (
                    caplog.text.count("exited with status -9; restarting it") == step + 1
                )
            )
        process.finish()
    check_all_sent(run, remote)


def test_a_stopped_exporter_is_replaced_and_sends_the_rest(record, run, remote, caplog):
    with caplog.at_level(logging.WARNING, "samestep"):
        process = ExporterProcess(run, sinks(remote), record)
        record.event("scalars", step=0)
        wait_until(lambda: b'"step":0' in stream(remote))
        stopped = process.pid
        os.kill(stopped, signal.SIGSTOP)
        record.event("scalars", step=1)
        process.finish()
    check_all_sent(run, remote)
    assert b'"step":1' in stream(remote)
    assert process.pid != stopped
    assert f"the exporter was stopped by signal {signal.SIGSTOP.value}" in caplog.text


def test_sinks_of_an_exporter_that_stops_again_and_again_are_reported(
    record, run, caplog, monkeypatch
):
    for name, seconds in [("FINISH", 1.0), ("EXIT", 0.2), ("FIRST_PAUSE", 0.2)]:
        monkeypatch.setattr(exporter, f"{name}_SECONDS", seconds)
    stopping = name_of(Stopping)
    with caplog.at_level(logging.WARNING, "samestep"):
        process = ExporterProcess(run, sinks(stopping), record)
        record.event("finished", step=1)
        size = len(written(run))
        wait_until(lambda: "the exporter was stopped" in caplog.text)
        process.finish()
    assert statuses(run)[stopping]["behind_bytes"] >= size
    assert statuses(run)[stopping]["error"] == "the exporter did not respond"
    assert f"bytes of the record were not sent to {stopping}" in caplog.text


def test_an_exporter_that_was_killed_before_it_was_asked_to_finish_is_replaced(record, run):
    process = ExporterProcess(run, sinks(name_of(Killed)), record)
    record.event("finished", step=1)
    wait_until((run / "hanging").exists)
    killed = process.pid
    wait_until(lambda: os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT | os.WNOHANG))
    process._request_finish()
    (run / "released").touch()
    process.finish()
    assert process.pid != killed
    assert statuses(run)[name_of(Killed)]["behind_bytes"] == 0


def ends_in_time(process, run):
    """Let an exporter finish, and then what its sink left; return whether that was in time."""
    finish = threading.Thread(target=process.finish)
    finish.start()
    finish.join(3 * SECONDS)
    is_in_time = not finish.is_alive()
    (run / "released").touch()
    finish.join(SECONDS)
    return is_in_time


def test_a_process_that_a_sink_leaves_behind_is_not_waited_for(record, run):
    process = ExporterProcess(run, sinks(name_of(Forking)), record)
    record.event("finished", step=1)
    wait_until((run / "forked").exists)
    assert ends_in_time(process, run)
    status = statuses(run)[name_of(Forking)]
    assert (status["behind_bytes"], status["error"]) == (0, None)


def test_a_pipe_that_stays_open_after_the_exporter_is_not_waited_for(record, run, monkeypatch):
    for name in ("FINISH_SECONDS", "EXIT_SECONDS"):
        monkeypatch.setattr(exporter, name, 0.2)
    process = ExporterProcess(run, sinks(name_of(Killed)), record)
    record.event("finished", step=1)
    wait_until((run / "hanging").exists)
    assert ends_in_time(process, run)
    assert statuses(run)[name_of(Killed)]["error"] == "the exporter did not respond"


WRITER = """
import sys, time
from pathlib import Path
from samestep.record import open_record
from samestep.record.exporter import ExporterProcess
from samestep.record.sinks import SinkSpec
record = open_record(Path(sys.argv[1]), writes=True)
ExporterProcess(Path(sys.argv[1]), [SinkSpec("sinks", sys.argv[2])], record)
step = 0
while True:
    record.event("scalars", step=step)
    step += 1
    time.sleep(0.001)
"""


def test_after_the_writer_is_killed_the_exporter_sends_the_rest_and_exits(run, remote):
    for _ in range(2):
        before = len(stream(remote))
        with subprocess.Popen([sys.executable, "-c", WRITER, str(run), remote]) as writer:
            try:
                wait_until(lambda before=before: len(stream(remote)) > before)
            finally:
                writer.kill()
        assert writer.returncode == -signal.SIGKILL
        # the exporter has exited
        wait_until(lambda: (held := lock(run)) is not None and not held.close())
        check_all_sent(run, remote)


def test_an_exporter_that_must_finish_waits_for_the_previous_one_to_exit(record, run, remote):
    with lock(run) as locked:
        process = ExporterProcess(run, sinks(remote), record)
        record.event("finished", step=1)
        finish = threading.Thread(target=process.finish)
        finish.start()
        wait_until(lambda: waits_for_lock(process.pid))
        time.sleep(1.0)  # the request to finish is read
        assert not stream(remote)
        locked.close()
        finish.join(SECONDS)
        assert not finish.is_alive()
    check_all_sent(run, remote)


def test_sinks_that_another_exporter_kept_from_receiving_are_reported(
    record, run, remote, caplog, monkeypatch
):
    monkeypatch.setattr(exporter, "FINISH_SECONDS", 0.2)
    with lock(run), caplog.at_level(logging.WARNING, "samestep"):
        process = ExporterProcess(run, sinks(remote), record)
        record.event("finished", step=1)
        size = len(written(run))
        wait_until(lambda: waits_for_lock(process.pid))
        process.finish()
    assert statuses(run)[remote]["behind_bytes"] == size
    assert "another exporter of this run did not exit" in statuses(run)[remote]["error"]
    assert f"{size} bytes of the record were not sent to {remote}" in caplog.text


def test_a_hanging_sink_delays_neither_other_sinks_nor_the_end(
    record, run, remote, caplog, monkeypatch
):
    monkeypatch.setattr(exporter, "FINISH_SECONDS", 3.0)
    hanging = name_of(Hanging)
    with caplog.at_level(logging.WARNING, "samestep"):
        process = ExporterProcess(run, sinks(hanging, remote), record)
        record.event("started", step=0)
        wait_until(lambda: (run / "hanging").exists() and stream(remote))
        record.event("finished", step=1)
        size = len(written(run))
        process.finish()
    assert b"finished" in stream(remote)
    assert statuses(run)[hanging]["error"] == "the rest was not sent before the run ended"
    assert statuses(run)[hanging]["behind_bytes"] >= size
    assert (
        f"bytes of the record were not sent to {hanging}. They will be sent when the run starts"
        in caplog.text
    )


def test_the_end_waits_for_a_slow_function_but_for_no_other_sink(
    record, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(exporter, "FINISH_SECONDS", 0.5)
    (tmp_path / "slow.py").write_text(
        "import time\ndef send(path):\n    time.sleep(3)\n    open('sent', 'a').write(path)\n"
    )
    monkeypatch.chdir(tmp_path)
    hanging = name_of(Hanging)
    both = [SinkSpec("transfer", "slow:send"), *sinks(hanging)]
    process = ExporterProcess(run, both, record)
    record.event("started", step=0)
    process.finish()
    assert "record/" in (tmp_path / "sent").read_text()
    assert statuses(run)["slow:send"]["error"] is None
    assert statuses(run)[hanging]["error"] is not None


def test_output_of_a_users_function_goes_to_stderr(record, run, tmp_path, monkeypatch, capfd):
    (tmp_path / "chatty.py").write_text(
        "def send(path):\n    print('sending', path.split('/')[-1])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    process = ExporterProcess(run, [SinkSpec("transfer", "chatty:send")], record)
    record.event("started", step=0)
    process.finish()
    assert "sending 00000000000000000000-" in capfd.readouterr().err
    assert statuses(run)["chatty:send"]["error"] is None


def test_a_function_that_never_worked_is_an_error_at_the_end(record, run, tmp_path, monkeypatch):
    (tmp_path / "wrong.py").write_text("def send(path):\n    path.no_such_method()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    process = ExporterProcess(run, [SinkSpec("transfer", "wrong:send")], record)
    record.event("started", step=0)
    command = f"python -m samestep.record.exporter {run} --transfer wrong:send"
    process.finish()
    with pytest.raises(RecordError, match="transfer='wrong:send' failed at every call") as caught:
        process.raise_if_failed()
    assert "AttributeError: 'str' object has no attribute 'no_such_method'" in str(caught.value)
    assert str(caught.value).endswith(command)
    assert statuses(run)["wrong:send"]["behind_bytes"] > 0
