from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from samestep.errors import LoaderError, WorkerError, WorldError
from samestep.handoff import LauncherState
from samestep.launch import launch
from samestep.launch import worker_group as crew
from samestep.launch.supervisor import POLL_SECONDS
from samestep.record.events import read_events
from tests.launch.processes import end_soon, for_ever, rank

FORK = get_context("fork")


def attempt():
    """Return which start of the run this worker belongs to."""
    return int(os.environ["SAMESTEP_INTERNAL_ATTEMPT"])


def begin(step=0, directory=""):
    """Say that the run began, as ss.init does."""
    LauncherState.from_environment(os.environ).report_start(str(directory), step)


def end_by(number):
    faulthandler.disable()  # crashes on purpose need no dump
    os.kill(os.getpid(), number)


def failing(fault, ready=lambda: None):
    """Return a body in which worker 1 suffers a fault in the first attempt, when the run has begun on both; the second ends well."""
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
def test_workers_start_again_where_one_was_killed(number):
    assert launch(failing(lambda: end_by(number))) == 1


def test_nothing_is_left_of_workers_that_were_replaced():
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


def test_a_stopped_worker_is_replaced_when_others_have_waited_in_vain():
    stopped = FORK.Value("i")

    def body():
        if attempt() > 0:
            return "went on"
        begin()
        if rank() == 1:
            stopped.value = 1
            end_by(signal.SIGSTOP)
        while not stopped.value:
            pass
        raise WorldError("worker 1 did not come")

    assert launch(body) == "went on"


def test_a_stopped_worker_for_whom_nobody_waits_is_replaced_after_all_timeout():
    def body():
        if attempt() == 0:
            begin()
            end_by(signal.SIGSTOP)
        return attempt()

    assert launch(body, workers=1, timeout=0.3) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda: end_by(signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda: end_by(signal.SIGABRT), "killed by SIGABRT"),
        (lambda: os._exit(7), "exited with status 7"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_a_program_did_itself_is_not_tried_again(fault, told):
    with pytest.raises(WorkerError, match=f"worker 1 failed first: {told}"):
        launch(failing(fault))


def test_a_run_that_had_not_begun_is_not_tried_again():
    with pytest.raises(WorkerError, match="worker 1 failed first: killed by SIGKILL"):
        launch(lambda: end_by(signal.SIGKILL) if rank() == 1 else for_ever())


@pytest.mark.parametrize("restarts", [0, 2])
def test_without_a_new_step_workers_are_replaced_so_many_times(restarts):
    attempts = FORK.Value("i")

    def body():
        attempts.value = attempt()
        begin(step=5)
        end_by(signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"killed by SIGKILL \[step 5, host .*\]$") as caught:
        launch(body, workers=1, max_restarts=restarts)
    assert attempts.value == restarts
    assert caught.value.status == 128 + signal.SIGKILL


def test_new_steps_give_new_attempts():
    def body():
        if attempt() == 5:
            return "went on"
        begin(step=attempt())
        return end_by(signal.SIGKILL)

    assert launch(body, workers=1, max_restarts=1) == "went on"


def test_the_record_tells_of_a_restart(tmp_path):
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
    ("before", "after", "told"),
    [(3, 4, r"killed by SIGKILL \(the kernel ran out of memory"), (3, 3, "killed by SIGKILL$")],
)
def test_a_kill_for_want_of_memory_is_told_as_such(monkeypatch, before, after, told):
    counts = iter([before, after])
    monkeypatch.setattr(crew, "_killed_for_memory", lambda: next(counts))
    with pytest.raises(WorkerError, match=told):
        launch(lambda: end_by(signal.SIGKILL), workers=1)


def test_the_kernel_counts_whom_it_ended_for_want_of_memory():
    assert f"oom_kill {crew._killed_for_memory()}\n" in Path("/proc/vmstat").read_text()


def test_a_signal_to_workers_that_start_again_waits_until_they_have_come_to_the_run():
    order = FORK.SimpleQueue()

    def body():
        if attempt() == 0:
            begin()
            end_by(signal.SIGKILL)
        arrived = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: (order.put("signal"), arrived.set()))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(3 * POLL_SECONDS)  # in which it would come
        order.put("begin")
        begin()
        arrived.wait()

    launcher = FORK.Process(target=launch, args=(body,), kwargs={"workers": 1})
    launcher.start()
    launcher.join()
    assert launcher.exitcode == -signal.SIGTERM
    assert [order.get(), order.get()] == ["begin", "signal"]


def test_workers_that_outlast_their_grace_are_killed_with_a_word(capfd):
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
