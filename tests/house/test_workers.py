from __future__ import annotations

import os
import signal
import threading
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from tests.faults import kill_at
from tests.workers import WorkerFailedError, run_workers, try_workers


class TooManyArgumentsError(Exception):
    """An error that pickle cannot make again."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def rank_of_worker():
    return int(os.environ["RANK"])


def on_rank_one(action):
    """Return a body that does `action` on rank 1 and waits for ever on the others."""

    def body():
        if rank_of_worker() == 1:
            action()
        else:
            threading.Event().wait()

    return body


def test_values_come_back_by_rank():
    big = "x" * 1_000_000
    assert run_workers(lambda text: (rank_of_worker(), text), 3, big) == [
        (0, big),
        (1, big),
        (2, big),
    ]


def test_workers_can_form_a_process_group_as_under_torchrun():
    def body():
        dist.init_process_group("gloo")
        total = torch.tensor(rank_of_worker() + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return (
            int(total),
            torch.get_num_threads(),
            os.environ["LOCAL_RANK"],
            os.environ["LOCAL_WORLD_SIZE"],
        )

    assert run_workers(body, 2) == [(3, 1, "0", "2"), (3, 1, "1", "2")]


def test_environment_is_added_in_the_workers_only():
    assert run_workers(
        lambda: os.environ["SAMESTEP_LANES"], 2, environment={"SAMESTEP_LANES": "8"}
    ) == ["8", "8"]
    assert "SAMESTEP_LANES" not in os.environ
    assert "RANK" not in os.environ


def test_first_error_is_raised_with_the_workers_traceback_and_stops_the_others():
    def give_up():
        raise KeyError("lost")

    with pytest.raises(
        WorkerFailedError, match=r"worker 1 ended with KeyError\('lost'\)[^$]*in give_up"
    ) as caught:
        run_workers(on_rank_one(give_up), 3)
    assert isinstance(caught.value.__cause__, KeyError)


def test_of_several_failures_the_earliest_is_raised():
    failed = get_context("fork").Event()

    class FirstError(Exception):
        def __reduce__(self):
            failed.set()
            return super().__reduce__()

    def body():
        if rank_of_worker() == 1:
            raise FirstError
        failed.wait()
        raise ValueError("only then")

    with pytest.raises(WorkerFailedError, match=r"worker 1 ended with .*FirstError"):
        run_workers(body, 3)


def test_failures_of_pytest_and_errors_that_cannot_travel_are_told():
    with pytest.raises(WorkerFailedError, match="not this way"):
        run_workers(lambda: pytest.fail("not this way"), 1)

    def body():
        raise TooManyArgumentsError("a", "b")

    with pytest.raises(WorkerFailedError, match=r"TooManyArgumentsError\('a and b'\)"):
        run_workers(body, 1)


def test_a_value_that_cannot_travel_is_an_error():
    with pytest.raises(WorkerFailedError, match="pickle"):
        run_workers(threading.Lock, 1)


def test_a_kill_is_seen_as_minus_nine_and_the_others_go_on():
    hook = kill_at(step=3, rank=1)

    def body():
        steps = []
        for step in range(5):
            hook(step)
            steps.append(step)
        return steps

    survivor, killed = try_workers(body, 2)
    assert (survivor.exitcode, survivor.value, survivor.failed) == (0, [0, 1, 2, 3, 4], False)
    assert (killed.exitcode, killed.value, killed.error, killed.failed) == (
        -signal.SIGKILL,
        None,
        None,
        True,
    )
    with pytest.raises(WorkerFailedError, match="worker 1 ended with exit code -9"):
        run_workers(body, 2)


def test_a_crash_comes_with_its_stack():
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    (outcome,) = try_workers(crash, 1)
    assert outcome.exitcode == -signal.SIGSEGV
    assert "in crash" in outcome.traceback


def test_an_exit_status_is_seen():
    def leave():
        raise SystemExit(3)

    (outcome,) = try_workers(leave, 1)
    assert (outcome.exitcode, outcome.error) == (3, None)


@pytest.mark.parametrize("run", [run_workers, try_workers])
def test_a_hang_is_reported_with_rank_and_stack_and_stopped(run):
    def stuck():
        threading.Event().wait()

    def body():
        if rank_of_worker() == 1:
            stuck()

    with pytest.raises(
        TimeoutError, match=r"worker 1 still ran after 0.5 s[^$]*in stuck"
    ) as caught:
        run(body, 2, timeout=0.5)
    assert "worker 0" not in str(caught.value)


def test_a_hang_after_a_failure_tells_of_both():
    def give_up():
        raise KeyError("lost")

    with pytest.raises(
        TimeoutError, match=r"worker 0 still ran after [^$]*worker 1 ended with KeyError"
    ):
        try_workers(on_rank_one(give_up), 2, timeout=0.5)
