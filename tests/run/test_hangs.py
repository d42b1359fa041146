"""Workers that time out report the missing worker, where it is and why, and all exit soon."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import samestep as ss
from samestep.comm import watchdog as watch
from samestep.errors import HangError
from tests.jobs import fit
from tests.launch.processes import kernel_state
from tests.namespaces import hosts
from tests.workers import try_workers
from tests.worlds import be_patient, limit_waits

TIMEOUT = 3.0
WAITED = (
    f"timed out after {TIMEOUT:g} s waiting for worker 1: worker 0 was exchanging losses at step 2"
)
GONE_SECONDS = 60.0  # after the report
START_SECONDS = 30.0  # also the limit of calls of a store that does not respond


class Numbers(Dataset):
    """The numbers 0 to 31 as constant images; `read` is called with each."""

    def __init__(self, read=lambda number: None):
        self.read = read

    def __len__(self):
        return 32

    def __getitem__(self, number):
        self.read(number)
        return torch.full((1, 8, 8), float(number))


def hanging(reached):
    """Return what never returns for 21, which worker 1 of two reads in step 2.

    Worker 0, which reads 16 there, waits until worker 1 hangs, also on a busy machine.
    """

    def never_return(number):
        if number == 16:
            reached.wait()
        if number == 21:
            reached.set()
            time.sleep(3600)

    return never_return


def loss_fn(model, numbers):
    return model(numbers).mean()


def train(run, dataset=None, at_step_two=lambda: None, timeout=None, **options):
    """Train on eight numbers per step, in order; worker 1 calls `at_step_two` in step 2.

    After step 1, waits time out after `timeout`.
    """
    model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def after_step(_):
        if timeout and run.step == 1:
            limit_waits(run._world, timeout)
        if run.rank == 1 and run.step == 2:
            at_step_two()

    fit(
        run,
        model,
        optimizer,
        dataset or Numbers(),
        loss_fn=loss_fn,
        batch_size=8,
        shuffle=False,
        after_step=after_step,
        **{"epochs": 1, **options},
    )


def ends_of(job, *, hung=1, alone_on_hosts=False):
    """Return the outcomes of two workers; `alone_on_hosts` makes them use torch.distributed.

    The worker `hung` is ended soon after the other one has failed.
    """

    def body():
        be_patient(hung)
        with ss.init(lanes=4) as run:
            job(run)

    environment = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if alone_on_hosts else {}
    return try_workers(body, 2, environment=environment)


@pytest.fixture
def reached():
    """Return the event that worker 1 is where it hangs."""
    return get_context("fork").Event()


@pytest.fixture
def unanswered(monkeypatch):
    """Shorten the time that a worker waits for responses."""
    monkeypatch.setattr(watch, "RESPONSE_SECONDS", 0.5)
    monkeypatch.setattr(watch, "DIAGNOSIS_SECONDS", 5.0)  # of which the other one needs some


@contextmanager
def soon():
    """Fail unless the block, which waits for all workers, ends soon after the first report."""
    reported = []
    yield reported.append
    (report,) = reported
    assert time.monotonic() - report.failed_at < GONE_SECONDS


@pytest.mark.parametrize("alone_on_hosts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_data_set_that_never_returns(alone_on_hosts, reached, capfd):
    with soon() as reported:
        first, second = ends_of(
            lambda run: train(run, Numbers(hanging(reached)), timeout=TIMEOUT),
            alone_on_hosts=alone_on_hosts,
        )
        reported(first)
    headline, *lines = str(first.error).splitlines()
    assert isinstance(first.error, HangError)
    assert not first.error.is_retryable
    assert headline == WAITED
    assert lines[0].startswith("worker 1 (host ")
    assert ": at step 2 for " in lines[0]
    assert ": loading data; its stack:" in lines[0]
    stack = lines[lines.index(lines[0]) + 1 : -2]
    assert stack[-2].endswith("in never_return")
    assert stack[-1].strip() == "time.sleep(3600)"
    assert not any("/samestep/data/" in line for line in stack)
    assert lines[-2].startswith("worker 0 (host ")
    assert lines[-1].startswith("likely cause: the dataset does not return")
    assert (second.exitcode, second.error) == (1, None)
    printed = capfd.readouterr().err
    assert "samestep: terminating worker 1 at step 2 (loading data): timed out after " in printed
    assert "frame #" not in printed  # of C++


def test_loader_process_that_never_returns(reached):
    dataset = Numbers(hanging(reached))
    first, _ = ends_of(lambda run: train(run, dataset, timeout=TIMEOUT, loader_workers=1))
    assert "try loader_workers=0 to see where" in str(first.error)


@pytest.mark.parametrize("alone_on_hosts", [False, True])
@pytest.mark.parametrize(
    ("leave", "printed"),
    [
        (
            lambda: sys.exit(0),
            "s ago, at step 2: outside of loops; likely cause: a return, break or exit",
        ),
        (lambda: os._exit(0), "its process has exited; last seen"),
    ],
)
def test_worker_that_exits_early(leave, printed, alone_on_hosts):
    first, second = ends_of(
        lambda run: train(run, at_step_two=leave), alone_on_hosts=alone_on_hosts
    )
    assert isinstance(first.error, ss.WorldError)
    # a slow worker 0 notices in backward that the connection is lost
    start = "worker 0 got no response from other workers while exchanging (losses|gradients); "
    assert re.match(f"{start}worker 1 \\(host ", str(first.error))
    assert printed in str(first.error)
    assert second.exitcode == 0


@pytest.mark.parametrize("alone_on_hosts", [False, True])
@pytest.mark.parametrize(
    ("job", "call", "cause"),
    [
        (
            lambda run: train(run, epochs=2 - run.rank),
            "ending a loop",
            "a worker has fewer batches",
        ),
        (
            lambda run: train(run, at_step_two=lambda: run.gather(1)),
            "gathering an object",
            "a condition that depends on the rank",
        ),
    ],
)
def test_worker_that_makes_a_different_call(job, call, cause, alone_on_hosts):
    ends = ends_of(job, alone_on_hosts=alone_on_hosts)
    assert [type(end.error) for end in ends] == [ss.WorldError] * 2
    assert (
        f"make the same calls: worker 0 was exchanging losses while worker 1 was {call}; "
        in str(ends[0].error)
    )
    assert f"likely cause: {cause}" in str(ends[0].error)


@pytest.mark.usefixtures("unanswered")
@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.long), 1])
def test_stopped_worker(stopped):
    """Worker 0 runs the store, so no reports arrive while it is stopped."""

    def body():
        with ss.init(lanes=4, timeout=START_SECONDS) as run:
            pids = run.all_gather(os.getpid())

            def stop(number):
                if number == 16 + 4 * stopped:  # the first of step 2 that this worker reads
                    os.kill(os.getpid(), signal.SIGSTOP)
                while number == 20 - 4 * stopped and kernel_state(pids[stopped]) != "T":
                    time.sleep(0.01)

            try:
                train(run, Numbers(stop), timeout=TIMEOUT)
            finally:
                if run.rank != stopped:
                    os.kill(pids[stopped], signal.SIGCONT)

    with soon() as reported:
        ends = try_workers(body, 2)
        reported(ends[1 - stopped])
    error = ends[1 - stopped].error
    assert isinstance(error, HangError)
    assert error.is_retryable
    if stopped:
        assert WAITED in str(error)
        assert "its process is stopped (state T)" in str(error)
        assert "likely cause: SIGSTOP" in str(error)
    else:
        assert "waiting for worker 0 (process " in str(error)
        assert "is not responding either" in str(error)
    assert ends[stopped].exitcode == 1


@pytest.mark.long
def test_workers_that_were_all_suspended_for_longer_than_the_timeout_go_on():
    timeout, suspended = 5.0, 6.0

    def suspend_all(pids):
        """Suspend the workers, and resume the one that waits before the one it waits for."""
        started = time.monotonic()  # the fork may stop this process before it runs again
        if (pid := os.fork()) == 0:
            for worker in pids:
                os.kill(worker, signal.SIGSTOP)
            time.sleep(suspended)
            for worker in pids:
                os.kill(worker, signal.SIGCONT)
                time.sleep(0.5)
            os._exit(0)
        os.waitpid(pid, 0)
        assert time.monotonic() - started > timeout

    def body():
        be_patient()
        with ss.init(lanes=4) as run:
            pids = run.all_gather(os.getpid())
            train(run, at_step_two=lambda: suspend_all(pids), timeout=timeout)

    assert [end.error for end in try_workers(body, 2)] == [None, None]


@pytest.mark.usefixtures("unanswered")
def test_broken_network_link_between_two_hosts():
    with hosts(2) as (first_host, second_host):

        def body():
            host = (first_host, second_host)[int(os.environ["RANK"])]
            host.enter()
            with ss.init(lanes=4, timeout=START_SECONDS) as run:
                unplug = partial(second_host.plug, into=False)
                train(run, at_step_two=unplug, timeout=TIMEOUT)

        place = {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": first_host.address,
            "GLOO_SOCKET_IFNAME": first_host.device,
        }
        with soon() as reported:
            first, second = try_workers(body, 2, environment=place)
            reported(first)
    assert isinstance(first.error, HangError)
    assert first.error.is_retryable
    assert "waiting for worker 1" in str(first.error)
    assert ": it does not respond; last seen " in str(first.error)
    assert "the network to it is cut" in str(first.error)
    assert isinstance(second.error, HangError)
    assert "is not responding either" in str(second.error)


def test_failure_stops_a_worker_that_does_not_respond():
    def fail_or_sleep(number):
        if number == 21:
            raise LookupError("no such number")
        if number == 16:
            time.sleep(3600)

    with soon() as reported:
        first, second = ends_of(lambda run: train(run, Numbers(fail_or_sleep)), hung=0)
        reported(second)
    assert isinstance(second.error, ss.errors.LoaderError)
    assert (first.exitcode, first.error) == (1, None)


def test_loss_of_the_store_stops_a_worker_that_does_not_respond(reached, capfd):
    """Worker 1 waits for no other worker, so only the loss of the store stops it."""

    def die_or_sleep(number):
        hanging(reached)(number)
        if number == 16:
            os.kill(os.getpid(), signal.SIGKILL)

    ends = ends_of(lambda run: train(run, Numbers(die_or_sleep)))
    assert [end.exitcode for end in ends] == [-signal.SIGKILL, 1]
    printed = capfd.readouterr().err
    assert "terminating worker 1 at step 2 (loading data): lost connection to the store" in printed
    # If the store is lost during a call, torch prints a C++ stack, which cannot be prevented.
    assert "frame #" not in printed or "recvValue failed" in printed
