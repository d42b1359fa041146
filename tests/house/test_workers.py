from __future__ import annotations

import math
import os
import signal
import threading
import time
from itertools import count
from multiprocessing import active_children, get_context
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests import workers
from tests.faults import kill_at
from tests.workers import WorkerFailedError, run_workers, try_workers


class TooManyArgumentsError(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def rank_of_worker():
    return int(os.environ["RANK"])


def wait_forever():
    threading.Event().wait()


def on_rank_one(action, others=wait_forever):
    """Return a body that does `action` on rank 1 and `others` on the other ranks."""
    return lambda: (action if rank_of_worker() == 1 else others)() and None


def lost():
    raise KeyError("lost")


def test_values_are_returned_by_rank():
    big = "x" * 1_000_000
    values = run_workers(lambda text: (rank_of_worker(), text), 3, big)
    assert values == [(0, big), (1, big), (2, big)]


def test_workers_can_form_a_process_group_as_under_torchrun():
    def body():
        dist.init_process_group("gloo")
        total = torch.tensor(rank_of_worker() + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        local = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
        return int(total), torch.get_num_threads(), *local

    assert run_workers(body, 2) == [(3, 1, "0", "2"), (3, 1, "1", "2")]


def test_environment_variables_are_set_only_in_the_workers():
    environment = {"SAMESTEP_LANES": "8"}
    values = run_workers(lambda: os.environ["SAMESTEP_LANES"], 2, environment=environment)
    assert values == ["8", "8"]
    assert "SAMESTEP_LANES" not in os.environ
    assert "RANK" not in os.environ


def test_the_first_error_is_raised_with_its_traceback_and_stops_the_others():
    text = r"worker 1 ended with KeyError\('lost'\)[^$]*in lost"
    with pytest.raises(WorkerFailedError, match=text) as caught:
        run_workers(on_rank_one(lost), 3)
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_earliest_of_several_failures_is_raised(monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", math.inf)  # all workers end
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


def test_failures_of_pytest_and_errors_that_cannot_be_pickled_are_reported():
    with pytest.raises(WorkerFailedError, match="not this way"):
        run_workers(lambda: pytest.fail("not this way"), 1)

    def body():
        raise TooManyArgumentsError("a", "b")

    with pytest.raises(WorkerFailedError, match=r"TooManyArgumentsError\('a and b'\)"):
        run_workers(body, 1)


def test_a_value_that_cannot_be_pickled_is_an_error():
    with pytest.raises(WorkerFailedError, match="pickle"):
        run_workers(threading.Lock, 1)


def test_a_killed_worker_has_exit_code_minus_nine_and_the_others_continue():
    hook = kill_at(step=3, rank=1)

    def body():
        steps = []
        for step in range(5):
            hook(step)
            steps.append(step)
        return steps

    survivor, killed = try_workers(body, 2)
    assert (survivor.exitcode, survivor.value, survivor.failed) == (0, [0, 1, 2, 3, 4], False)
    assert (killed.exitcode, killed.failed) == (-signal.SIGKILL, True)
    assert killed.value is killed.error is None
    with pytest.raises(WorkerFailedError, match="worker 1 ended with exit code -9"):
        run_workers(body, 2)


def test_a_crash_is_reported_with_its_stack():
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    (outcome,) = try_workers(crash, 1)
    assert outcome.exitcode == -signal.SIGSEGV
    assert "in crash" in outcome.traceback


def test_an_exit_status_is_reported():
    def leave():
        raise SystemExit(3)

    (outcome,) = try_workers(leave, 1)
    assert (outcome.exitcode, outcome.error) == (3, None)


@pytest.fixture
def hang(monkeypatch):
    """A function that hangs. The timeout passes as soon as no other worker is left."""
    hangs = get_context("fork").Event()

    def hang():
        hangs.set()
        threading.Event().wait()

    calls = count()  # the first one computes the deadline

    def monotonic():
        is_late = next(calls) > 0 and hangs.is_set() and len(active_children()) == 1
        return math.inf if is_late else 0.0

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(workers, "time", clock)
    return hang


@pytest.mark.parametrize("run", [run_workers, try_workers])
def test_a_hang_is_reported_with_rank_and_stack_and_stopped(run, hang):
    text = r"worker 1 still ran after 0.5 s[^$]*in hang"
    with pytest.raises(TimeoutError, match=text) as caught:
        run(on_rank_one(hang, others=int), 2, timeout=0.5)
    assert "worker 0" not in str(caught.value)


def test_a_hang_after_a_failure_is_reported_with_the_failure(hang):
    text = r"worker 0 still ran after [^$]*worker 1 ended with KeyError"
    with pytest.raises(TimeoutError, match=text):
        try_workers(on_rank_one(lost, others=hang), 2, timeout=0.5)
