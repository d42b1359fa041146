from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading

import pytest

from samestep.step import exchange
from tests import leaks
from tests.leaks import SHARED_MEMORY, LeakError, nothing_left
from tests.needs import needs


def test_everything_cleaned_up_is_no_leak(monkeypatch):
    with nothing_left(grace_seconds=0), monkeypatch.context() as patch:
        patch.setenv("SAMESTEP_SEED", "1")
        subprocess.run(["true"], check=True)
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


def test_a_constant_left_changed_is_found(monkeypatch):
    with (
        pytest.raises(LeakError, match=r"constant samestep\.step\.exchange\.BUCKETS"),
        nothing_left(grace_seconds=0),
    ):
        monkeypatch.setattr(exchange, "BUCKETS", 9)


def test_a_constant_is_compared_with_its_value_at_the_start(monkeypatch):
    monkeypatch.setattr(exchange, "BUCKETS", 9)
    with nothing_left(grace_seconds=0):
        pass
    with (
        pytest.raises(LeakError, match=r"constant samestep\.step\.exchange\.BUCKETS"),
        nothing_left(grace_seconds=0),
    ):
        monkeypatch.undo()


@pytest.mark.parametrize("kernel_lists_children", [True, False])
def test_a_process_left_behind_is_found_and_killed(kernel_lists_children, monkeypatch):
    if not kernel_lists_children:
        monkeypatch.setattr(leaks, "THREADS", leaks.THREADS / "missing")
    sleeper = None
    with pytest.raises(LeakError, match=r"process \d+: sleep 30"), nothing_left(grace_seconds=0.1):
        sleeper = subprocess.Popen(["sleep", "30"])
    assert sleeper.wait() == -9


def test_an_orphan_is_found():
    with (
        pytest.raises(LeakError, match=r"process \d+: .*sleep 31"),
        nothing_left(grace_seconds=0.1),
    ):
        subprocess.run(["sh", "-c", "sleep 31 &"], check=True)


def test_a_process_that_exits_in_time_is_no_leak():
    with nothing_left(grace_seconds=20):
        late = subprocess.Popen([sys.executable, "-c", "pass"])
    late.wait()


def test_a_thread_left_behind_is_found():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with pytest.raises(LeakError, match="thread forgotten"), nothing_left(grace_seconds=0):
        thread.start()
    stop.set()
    thread.join()


def test_a_file_in_shared_memory_left_behind_is_found():
    needs("/dev/shm", is_present=SHARED_MEMORY.is_dir())
    file = SHARED_MEMORY / f"samestep-test-{secrets.token_hex(8)}"
    with pytest.raises(LeakError, match=f"file {file}"), nothing_left(grace_seconds=0):
        file.touch()
    file.unlink()


def test_a_file_of_torch_whose_process_was_killed_is_deleted():
    needs("/dev/shm", is_present=SHARED_MEMORY.is_dir())
    exited = subprocess.Popen(["true"])
    exited.wait()
    file = SHARED_MEMORY / f"torch_{exited.pid}_{secrets.token_hex(8)}_0"
    with nothing_left(grace_seconds=0):
        file.touch()
    assert not file.exists()


@pytest.mark.parametrize(
    "change", [lambda: os.environ.update(SAMESTEP_A="2"), lambda: os.environ.pop("SAMESTEP_A")]
)
def test_a_changed_environment_variable_is_found(monkeypatch, change):
    monkeypatch.setenv("SAMESTEP_A", "1")
    with (
        pytest.raises(LeakError, match="environment variable SAMESTEP_A"),
        nothing_left(grace_seconds=0),
    ):
        change()


def test_every_test_is_checked(request):
    assert "_nothing_left" in request.fixturenames
