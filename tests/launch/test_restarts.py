from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import subprocess
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from samestep.errors import LoaderError, SnapshotError, WorkerError, WorldError
from samestep.handoff import LauncherState
from samestep.launch import launch, worker_group
from samestep.launch.supervisor import POLL_SECONDS, LocalCoordinator
from samestep.record.events import read_events
from tests.launch.processes import end_soon, for_ever, kernel_state, rank

FORK = get_context("fork")


def attempt():
    """Return the number of this worker's attempt."""
    return int(os.environ["SAMESTEP_INTERNAL_ATTEMPT"])


def begin(step=0, directory=""):
    """Report that the run began, as ss.init does."""
    LauncherState.from_environment(os.environ).report_start(str(directory), step)


def end_by(number):
    faulthandler.disable()  # crashes on purpose need no dump
    os.kill(os.getpid(), number)


def failing(fault, ready=lambda: None):
    """Return a body in which worker 1 fails in the first attempt, after the run began on both."""
    both = FORK.Barrier(2)

    def body():
        if attempt() > 0:
            return attempt()
        begin()
        ready()
        both.wait()
        return fault() if rank() == 1 else for_ever()

    return body


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGRTMIN])
def test_workers_restart_after_one_was_killed(number):
    assert launch(failing(lambda: end_by(number))) == 1


def test_replaced_workers_leave_no_process():
    pids = FORK.Array("i", 4)

    def ready():
        pids[rank()] = os.getpid()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for_ever()
        pids[2 + rank()] = child

    launch(failing(lambda: end_by(signal.SIGKILL), ready))
    assert all(pids)
    assert end_soon(list(pids))


def test_a_stopped_worker_is_replaced_when_others_time_out():
    stopped = FORK.Value("i")

    def body():
        if attempt() > 0:
            return "continued"
        begin()
        if rank() == 1:
            stopped.value = 1
            end_by(signal.SIGSTOP)
        while not stopped.value:
            pass
        raise WorldError("timed out waiting for worker 1")

    assert launch(body) == "continued"


def test_workers_that_the_launcher_kills_are_not_named(monkeypatch, capfd):
    report, seen = LocalCoordinator.report, []

    def slow_report(self, what, **fields):
        if what == "failed":
            seen.append(fields["failure"]["summary"])
            time.sleep(0.1)  # the delay of a busy machine
        report(self, what, **fields)

    def body():
        if attempt() > 0:
            return "continued"
        begin()
        return end_by(signal.SIGSTOP) if rank() == 2 else for_ever()

    monkeypatch.setattr(LocalCoordinator, "report", slow_report)
    assert launch(body, workers=3, timeout=0.3) == "continued"
    assert seen == ["stopped by SIGSTOP", "killed by SIGKILL", "killed by SIGKILL"]
    assert "worker 2: stopped by SIGSTOP" in capfd.readouterr().err


def test_a_stopped_worker_is_replaced_after_the_timeout():
    def body():
        if attempt() == 0:
            begin()
            end_by(signal.SIGSTOP)
        return attempt()

    assert launch(body, workers=1, timeout=0.3) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(lambda: end_by(signal.SIGSEGV), "killed by SIGSEGV", marks=pytest.mark.long),
        pytest.param(lambda: end_by(signal.SIGABRT), "killed by SIGABRT", marks=pytest.mark.long),
        pytest.param(lambda: os._exit(7), "exited with status 7", marks=pytest.mark.long),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_failure_of_the_program_is_not_retried(fault, message):
    with pytest.raises(WorkerError, match=f"worker 1 failed first: {message}"):
        launch(failing(fault))


@pytest.mark.long
def test_a_failure_before_the_run_began_is_not_retried():
    with pytest.raises(WorkerError, match="worker 1 failed first: killed by SIGKILL"):
        launch(lambda: end_by(signal.SIGKILL) if rank() == 1 else for_ever())


@pytest.mark.parametrize("restarts", [0, 2])
def test_restarts_without_a_new_step_are_limited(restarts):
    attempts = FORK.Value("i")

    def body():
        attempts.value = attempt()
        begin(step=5)
        end_by(signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"killed by SIGKILL \[step 5, host .*\]$") as caught:
        launch(body, workers=1, max_restarts=restarts)
    assert attempts.value == restarts
    assert caught.value.status == 128 + signal.SIGKILL


def test_new_steps_allow_new_restarts():
    def body():
        if attempt() == 5:
            return "continued"
        begin(step=attempt())
        return end_by(signal.SIGKILL)

    assert launch(body, workers=1, max_restarts=1) == "continued"


def test_the_record_has_the_restart(tmp_path):
    def body():
        if attempt() == 0:
            begin(step=3, directory=tmp_path)
            end_by(signal.SIGKILL)

    launch(body, workers=1)
    (event,) = read_events(tmp_path)
    assert (event["event"], event["rank"], event["step"]) == ("restarting", 0, 3)
    assert event["reason"].startswith("killed by SIGKILL")


def test_the_exit_status_of_a_script_is_that_of_the_launch(tmp_path):
    with pytest.raises(WorkerError) as caught:
        launch(lambda: os._exit(7))
    assert caught.value.status == 7


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [(3, 4, r"killed by SIGKILL \(the kernel ran out of memory"), (3, 3, "killed by SIGKILL$")],
)
def test_a_kill_by_the_oom_killer_is_named(monkeypatch, before, after, message):
    counts = iter([before, after])
    monkeypatch.setattr(worker_group, "_oom_kills", lambda: next(counts))
    with pytest.raises(WorkerError, match=message):
        launch(lambda: end_by(signal.SIGKILL), workers=1)


def test_the_kernel_counts_its_oom_kills():
    assert f"oom_kill {worker_group._oom_kills()}\n" in Path("/proc/vmstat").read_text()


def test_a_signal_to_restarted_workers_waits_until_the_run_has_resumed():
    order = FORK.SimpleQueue()

    def body():
        if attempt() == 0:
            begin()
            end_by(signal.SIGKILL)
        arrived = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: (order.put("signal"), arrived.set()))
        os.kill(os.getppid(), signal.SIGTERM)
        # the signal must not arrive in this time, which is enough for it
        time.sleep(3 * POLL_SECONDS)
        order.put("begin")
        begin()
        arrived.wait()

    launcher = FORK.Process(target=launch, args=(body,), kwargs={"workers": 1})
    launcher.start()
    launcher.join()
    assert launcher.exitcode == -signal.SIGTERM
    assert [order.get(), order.get()] == ["begin", "signal"]


def test_an_error_after_a_signal_is_not_a_clean_stop():
    both_handle_it = FORK.Barrier(2)

    def body():
        arrived = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: arrived.set())
        both_handle_it.wait()  # or the signal ends worker 0 in another way, or comes too early
        if rank() == 1:
            os.kill(os.getppid(), signal.SIGTERM)
        arrived.wait()
        if rank() == 1:
            raise SnapshotError("the disk is full")

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(WorkerError, match="worker 1 failed first: SnapshotError: the disk is"):
            launch(body, workers=2)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_kill_after_the_grace_period_is_printed(capfd):
    def body():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        for_ever()

    launcher = FORK.Process(target=launch, args=(body,), kwargs={"workers": 1, "grace_period": 0.2})
    launcher.start()
    launcher.join()
    assert "workers did not exit within grace_period=0.2 s; killing them" in capfd.readouterr().err


def test_a_killed_loader_process_is_replaced_with_its_worker():
    def lose_a_loader():
        raise LoaderError("a loader process died", is_retryable=True)

    assert launch(failing(lose_a_loader)) == 1


def test_a_group_is_killed_unless_another_process_has_its_leader_s_id(tmp_path):
    pids = tmp_path / "pids"
    leave_one = 'sleep 600 & echo $! > "$1.new"; mv "$1.new" "$1"; read line'
    leader = subprocess.Popen(
        ["sh", "-c", leave_one, "sh", pids], stdin=subprocess.PIPE, start_new_session=True
    )
    while not pids.exists():
        time.sleep(0.01)
    member, started = int(pids.read_text()), worker_group._started(leader.pid)
    worker_group.kill_group(leader.pid, str(int(started) - 1))  # of an earlier process with this id
    assert leader.poll() is None
    assert kernel_state(member) in {"R", "S"}
    leader.communicate(b"\n")
    assert kernel_state(leader.pid) is None  # only a member is left
    worker_group.kill_group(leader.pid, started)
    assert end_soon([member])


PTRACE_SEIZE = 0x4206


@pytest.mark.long
def test_a_worker_that_the_kernel_does_not_end_is_left_behind(monkeypatch, capfd):
    monkeypatch.setattr(worker_group, "KILL_SECONDS", 0.5)
    tracer = FORK.Value("i", 0)

    def ready():
        """Have another process trace worker 0, so that its parent does not see its exit."""
        if rank() == 1:
            return
        traced, (reading, writing) = os.getpid(), os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            if ctypes.CDLL(None).ptrace(PTRACE_SEIZE, traced, None, None) != 0:
                os._exit(1)
            os.write(writing, b"x")
            os.close(writing)
            for_ever()
        os.close(writing)
        if os.read(reading, 1):
            tracer.value = child

    try:
        assert launch(failing(lambda: end_by(signal.SIGKILL), ready)) == 1
        if not tracer.value:
            pytest.skip("this system does not allow ptrace")
        text = r"worker 0 \(process \d+\) did not exit within 0.5 s of SIGKILL: it waits in the"
        assert re.search(text, capfd.readouterr().err)
    finally:
        if tracer.value:
            os.kill(tracer.value, signal.SIGKILL)
