"""Failures and hangs of NCCL and of devices: all workers end soon, and the right one is named."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.comm import distributed
from samestep.errors import HangError
from tests.gpu.simulated import FAILS_AT, FAILURE, HANGS_AT, VISIBLE
from tests.jobs import events
from tests.worlds import be_patient

GATHER = "all_gather_single 1"  # of the parameters, in the first step
NCCL_ERROR = """NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error, NCCL version 2.29
ncclSystemError: System call failed or device error.
Last error:
socketStartConnect: Connect to 10.0.0.1 failed"""


def train(after_step=lambda run, model: None, timeout=4.0, directory=None):
    """Train a small model with a sharded optimizer for three steps."""
    be_patient(exit_seconds=10.0)
    with ss.init(lanes=2, timeout=timeout, dir=directory, hot_every=1) as run:
        model = run.replicate(nn.Linear(64, 8))
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches([torch.ones(64)] * 12, 4, steps=3):
            run.backward(lambda model, batch: model(batch).square().mean(), model, batch)
            optimizer.step()
            after_step(run, model)
        return model.weight.sum().item()


def fail_on_worker_one(run, model):
    if run.rank == 1:
        raise ValueError("the program's own")


def failing():
    train(fail_on_worker_one, timeout=30.0)


def test_failed_worker_does_not_wait_for_nccl(gpus):
    first, second = gpus.ends_of(2, failing, **{HANGS_AT: GATHER})
    assert isinstance(second.error, ValueError)
    assert first.exitcode == 1
    assert "failed first, at step 0: ValueError: the program's own" in (
        str(first.error) + gpus.printed
    )


def closing(error, timeout=4.0):
    """Train without a `with` block, and leave the first step by `error` or a break."""
    be_patient(exit_seconds=10.0)
    run = ss.init(lanes=2, timeout=timeout, check_every=None)
    try:
        model = run.replicate(nn.Linear(64, 8))
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches([torch.ones(64)] * 4, 4, steps=1):
            run.backward(lambda model, batch: model(batch).square().mean(), model, batch)
            optimizer.step()
            if error is not None and run.rank == 1:
                raise error
            break
    finally:
        run.close()


@pytest.mark.long
def test_worker_that_failed_closes_its_run_without_waiting_for_nccl(gpus):
    first, second = gpus.ends_of(2, closing, ValueError("its own"), **{HANGS_AT: GATHER})
    assert isinstance(second.error, ValueError)
    assert first.exitcode == 1


def ending(timeout=4.0):
    """Train for one step, after which nothing reads what the device computes."""
    be_patient(exit_seconds=10.0)
    with ss.init(lanes=2, timeout=timeout, check_every=None) as run:
        model = run.replicate(nn.Linear(64, 8))
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches([torch.ones(64)] * 4, 4, steps=1):
            run.backward(lambda model, batch: model(batch).square().mean(), model, batch)
            optimizer.step()


@pytest.mark.parametrize(
    "ends", [ending, pytest.param(partial(closing, None), marks=pytest.mark.long)]
)
def test_hang_in_the_last_step_is_reported(ends, gpus):
    ends = gpus.ends_of(2, ends, **{HANGS_AT: GATHER})
    hang = one_hang(ends, gpus.printed)
    assert "timed out after 4 s: workers 0 and 1 were gathering parameters at step" in hang


def one_hang(ends, printed):
    """Return the only report of a hang, after which all workers exit."""
    hangs = [str(end.error) for end in ends if isinstance(end.error, HangError)]
    assert len(hangs) == 1, [*map(str, ends), printed]
    assert [end.exitcode for end in ends] == [1, 1]
    return hangs[0]


def launched():
    os.environ[HANGS_AT] = GATHER
    with pytest.raises(ss.WorkerError, match=r"(?s)worker 1 failed first: ValueError.*fail_on_wor"):
        ss.launch(failing, workers=2)


@pytest.mark.long
def test_launcher_names_the_worker_that_failed_while_nccl_hangs(gpus):
    gpus.call(launched)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (GATHER, "gathering parameters"),
        pytest.param(
            "all_to_all_single 1", "gathering parameters", marks=pytest.mark.long
        ),  # the last call that waits for it
        pytest.param("broadcast 1", "replicating a model", marks=pytest.mark.long),
    ],
)
def test_hang_of_nccl_is_reported(call, what, gpus):
    ends = gpus.ends_of(2, train, **{HANGS_AT: call})
    hang = one_hang(ends, gpus.printed)
    assert f"timed out after 4 s: workers 0 and 1 were {what} at step" in hang
    assert "the network between them lost data" in hang


def read_late(run, model):
    run._world.barrier("meeting")
    if run.rank == 0:  # notices the hang first
        run._world.status.gpu_calls._enqueued_at -= 61
    model.weight.sum().item()  # waits for the device


def reading():
    train(read_late, timeout=60.0)


@pytest.mark.long
def test_hang_of_nccl_is_reported_while_the_program_waits_for_the_device(gpus):
    ends = gpus.ends_of(2, reading, **{HANGS_AT: GATHER})
    assert [end.exitcode for end in ends] == [1, 1]
    assert (
        "timed out after 60 s: workers 0 and 1 were gathering parameters at step 0" in gpus.printed
    )
    assert "samestep: terminating worker 0 at step 0" in gpus.printed


def watched():
    """Return what a thread notices of a late call, before and after the device completes it."""
    from tests.gpu.simulated import device

    with ss.init(lanes=2, timeout=60) as run:
        model = run.replicate(nn.Linear(64, 8))
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches([torch.ones(64)] * 4, 4, steps=1):
            run.backward(lambda model, batch: model(batch).square().mean(), model, batch)
            optimizer.step()
            run._world.status.gpu_calls._enqueued_at -= 61
            with ThreadPoolExecutor(1) as thread:
                late = thread.submit(run._world.status.gpu_calls.overdue, 60).result()
                torch.cuda.synchronize()
                completed = thread.submit(run._world.status.gpu_calls.overdue, 60).result()
        return late, completed, device.opened


def test_watchdog_notices_late_calls_without_a_call_of_cuda(gpus):
    for rank, notices in enumerate(gpus.workers(2, watched, **{VISIBLE: "0,1"})):
        assert notices == ("gathering parameters", "", {rank})


def aborting(directory):
    distributed.NCCL_EXTRA_SECONDS = -29.0  # NCCL is the first to give up
    if os.environ["SAMESTEP_INTERNAL_ATTEMPT"] == "0":
        os.environ[HANGS_AT] = "all_gather_single 2"
    return train(timeout=30.0, directory=directory)


def undisturbed():
    return train(timeout=30.0)


def restarted(directory):
    after = ss.launch(aborting, directory, workers=2, max_restarts=2)
    return after, ss.launch(undisturbed, workers=2)


@pytest.mark.long
def test_workers_continue_from_memory_after_an_abort_by_nccl(gpus, tmp_path):
    after_restart, expected = gpus.call(restarted, tmp_path)
    assert after_restart == expected
    assert "killed by SIGABRT (perhaps by NCCL" in gpus.printed
    (resumed,) = events(tmp_path, "resumed")
    assert resumed["snapshot"] == "in-memory-snapshot-of-step-1"


def out_of_memory():
    with ss.init(lanes=4, timeout=30.0) as run:
        model = run.replicate(nn.Linear(64, 8))

        def loss(model, batch):
            if run.rank == 1 and run.step == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return model(batch).square().mean()

        for batch in run.batches([torch.ones(64)] * 24, 8, steps=3):
            run.backward(loss, model, batch)


def test_lane_that_does_not_fit_is_named(gpus):
    ends = gpus.ends_of(2, out_of_memory)
    assert (
        "lane 2 of 4, with 2 samples, does not fit in the memory of cuda:1 on worker 1 at step 1"
        in str(ends[1].error)
    )


@pytest.mark.parametrize(
    ("failure", "kind", "expected"),
    [
        ("CUDA error: device-side assert triggered", RuntimeError, "device-side assert"),
        ("CUDA out of memory. Tried to allocate", torch.OutOfMemoryError, "out of memory"),
        (NCCL_ERROR, ss.WorldError, "last error: socketStartConnect: Connect to 10.0.0.1 failed"),
    ],
)
def test_errors_in_a_collective_keep_their_names(failure, kind, expected, gpus):
    ends = gpus.ends_of(2, train, **{FAILS_AT: GATHER, FAILURE: failure, VISIBLE: "0,1"})
    for end in ends:
        if end.error is not None:  # the other one may have been terminated
            assert isinstance(end.error, (kind, ss.WorldError))
    assert expected in "".join(str(end.error) for end in ends if isinstance(end.error, kind))
