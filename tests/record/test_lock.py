"""One run at a time in a directory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial

import pytest

import samestep as ss
from samestep.errors import RecordError
from samestep.record import files as module
from samestep.record import read_events
from samestep.record.files import NAME, DirectoryLock
from tests.faults import stalling_disk
from tests.jobs import image_job, train
from tests.python import start_python

SECONDS = 60.0

HOLD = """
import sys, time
from pathlib import Path
from samestep.record.files import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), None)
for name in ("run.lock", "events.jsonl"):  # a POSIX lock would be lost now
    (Path(sys.argv[1]) / name).open("ab").close()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(module, "EXIT_SECONDS", 0.1)
    message = rf"another run \(process {holder.pid} on host .*, since .*\) writes to {tmp_path}: .*"
    with pytest.raises(RecordError, match=rf"{message}remove {tmp_path / NAME}"):
        DirectoryLock(tmp_path, None)
    with pytest.raises(RecordError, match=message), ss.init(dir=tmp_path):
        pass
    holder.kill()
    holder.wait()
    with ss.init(dir=tmp_path):
        pass
    with closing(DirectoryLock(tmp_path, None)):
        pass


FORK = """
import multiprocessing, os, sys, time
from pathlib import Path
import samestep

def linger():
    Path("pid").write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    with samestep.init(dir="run"):
        multiprocessing.get_context("fork").Process(target=linger, daemon=True).start()
        time.sleep(600)
"""


def is_free(directory):
    try:
        DirectoryLock(directory, None).close()
    except RecordError:
        return False
    return True


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("words", [(), ("-m", "samestep", "run")], ids=["alone", "launched"])
def test_a_process_that_outlives_its_killed_run_does_not_lock_the_directory(
    tmp_path, monkeypatch, words
):
    monkeypatch.setattr(module, "EXIT_SECONDS", 0.1)
    (tmp_path / "fork.py").write_text(FORK)
    file = tmp_path / "pid"
    with start_python(*words, "fork.py", cwd=tmp_path) as program:
        wait_until(lambda: file.exists() and file.read_text())
        try:
            assert not is_free(tmp_path / "run")
            program.kill()
            program.wait()
            wait_until(lambda: is_free(tmp_path / "run"))
            os.kill(int(file.read_text()), 0)  # it lives
        finally:
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_removing_the_file_overrides_the_lock(tmp_path, holder):
    (tmp_path / NAME).unlink()
    DirectoryLock(tmp_path, None).close()
    assert holder.poll() is None


@pytest.mark.parametrize("lives", [True, False])
def test_a_run_on_another_host_is_awaited_for_a_heartbeat(tmp_path, monkeypatch, caplog, lives):
    monkeypatch.setattr(module, "LOST_SECONDS", 1.0)
    file = tmp_path / NAME
    file.write_text(json.dumps({"host": "far", "pid": 7, "boot": "other", "started": "today"}))
    beat = threading.Timer(0.3, file.touch)
    if lives:
        beat.start()
        with pytest.raises(RecordError, match=r"process 7 on host far, since today"):
            DirectoryLock(tmp_path, None)
        beat.join()
    else:
        DirectoryLock(tmp_path, None).close()
        assert file.read_text() == ""
    assert "was on host far and did not end properly; waiting 1 s" in caplog.text


def test_a_run_touches_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.01)
    file = tmp_path / NAME
    with closing(DirectoryLock(tmp_path, None)):
        os.utime(file, (0, 0))
        deadline = time.monotonic() + 300
        while file.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_run_whose_lock_is_removed_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.01)

    def remove_lock(step):
        if step == 2:
            (tmp_path / NAME).unlink()
        if step >= 2:
            time.sleep(0.2)

    with pytest.raises(RecordError, match="was removed or replaced during the run, so another run"):
        train(partial(image_job, hook=remove_lock, epochs=20), tmp_path)
    train(image_job, tmp_path)


def test_the_launcher_keeps_the_lock_while_it_restarts_workers(tmp_path):
    """The killed worker's lock is not free, not even before the next attempt starts."""

    def train():
        with ss.init(dir=tmp_path / "run") as run:
            if (tmp_path / "killed").exists():
                assert refused(tmp_path / "run")
                return os.getpid()
            (tmp_path / "killed").touch()
            for _ in run.batches([1, 2], 2, steps=2):
                before = json.loads((tmp_path / "run" / NAME).read_text())["pid"]
                (tmp_path / "pid").write_text(str(before))
                os.kill(os.getpid(), signal.SIGKILL)
        return None

    pid = ss.launch(train, workers=1)
    assert int((tmp_path / "pid").read_text()) != pid
    assert [event["event"] for event in read_events(tmp_path / "run")].count("restarting") == 1
    assert not refused(tmp_path / "run")


def refused(directory):
    """Return whether another process cannot lock the directory."""
    script = re.sub(r"time.sleep\(60\)", "lock.close()", HOLD).replace(
        "lock = ", "import samestep.record.files as m; m.EXIT_SECONDS = 0.1\nlock = "
    )
    command = [sys.executable, "-c", script, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ("another run" in done.stderr) == (done.returncode != 0)
    return done.returncode != 0


def test_heartbeats_continue_after_one_fails(tmp_path, monkeypatch):
    calls, repeated = [], threading.Event()

    def utime(file):
        calls.append(file)
        if len(calls) > 1:
            repeated.set()
        raise OSError(5, "the storage is busy")

    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(module.os, "utime", utime)
    with closing(DirectoryLock(tmp_path, None)):
        assert repeated.wait(300)


def test_closing_does_not_wait_for_a_disk_that_stalls(monkeypatch, caplog):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    with stalling_disk() as (folder, stall, recover):
        lock = DirectoryLock(folder, None)
        stall()
        lock.close()
        assert f"the storage of {folder / NAME} did not respond for 0.2 s" in caplog.text
        recover()
        lock._thread.join(300)
        assert not refused(folder)
