"""What fails in the middle of a run stops all workers soon, says what and where, and harms nothing that was kept."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import samestep as ss
from samestep.record import read_history
from tests.faults import full_disk, kill_at
from tests.jobs import STEPS, events, fit, image_job, left_by, snapshots, train
from tests.workers import try_workers

SOON_SECONDS = 60.0


class Numbers(Dataset):
    """The numbers 0 to 31, as images that are all of one value; `bad` is called before one is read."""

    def __init__(self, bad=lambda number: None):
        self.bad = bad

    def __len__(self):
        return 32

    def __getitem__(self, number):
        self.bad(number)
        return torch.full((1, 8, 8), float(number))


def fit_numbers(run, loss_fn=lambda model, numbers: model(numbers).mean(), dataset=None, **options):
    """Train a step on each eight numbers in their order; with four lanes, 21 is in lane 2 of step 2, which is worker 1's of two."""
    model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return fit(
        run,
        model,
        optimizer,
        dataset or Numbers(),
        loss_fn=loss_fn,
        batch_size=8,
        epochs=1,
        shuffle=False,
        **options,
    )


def ends_of(workers, job, directory=None, **options):
    return try_workers(train, workers, job, directory, {"lanes": 4, **options})


def made(value):
    """Return a loss function that gives `value` for the number 21, and as a metric for 5."""

    def loss_fn(model, numbers):
        loss = model(numbers).mean()
        return loss * value if 21 in numbers else loss, {"odd": value if 5 in numbers else 1.0}

    return loss_fn


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_loss_that_is_not_finite_stops_every_worker(value, tmp_path):
    ends = ends_of(2, lambda run: fit_numbers(run, made(value)), tmp_path)
    assert [type(end.error) for end in ends] == [ss.NonFiniteLossError] * 2
    for end in ends:
        assert re.match(
            r"the loss is (nan|-?inf) at step 2 in lane 2 \(worker 1\); lower the learning rate",
            str(end.error),
        )
    assert snapshots(tmp_path) == ["step-00000001", "step-00000002"]
    failed = events(tmp_path, "failed")
    assert sorted(event["rank"] for event in failed) == [0, 1]
    assert all(event["step"] == 2 and "NonFiniteLossError" in event["error"] for event in failed)


def test_a_run_may_go_on_after_a_loss_that_is_not_finite(tmp_path):
    ends = ends_of(
        2, lambda run: fit_numbers(run, made(float("nan"))), tmp_path, nonfinite_loss="continue"
    )
    assert [end.exitcode for end in ends] == [0, 0]
    losses = [event["values"]["loss"] for event in events(tmp_path, "scalars")]
    assert [math.isnan(loss) for loss in losses] == [False, False, True, True]
    odd, *others = [event["values"]["odd"] for event in events(tmp_path, "scalars")]
    assert math.isnan(odd)
    assert others == [1.0, 1.0, 1.0]


def allocate(size):
    return torch.empty(size)


def allocate_in_python(size):
    return bytearray(size)


def as_a_gpu_does(size):
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("use", [allocate, allocate_in_python, as_a_gpu_does])
def test_a_lane_without_enough_memory_says_which_lanes_to_use(use, in_backward):
    def loss_fn(model, numbers):
        outputs = model(numbers)
        if 21 in numbers and in_backward:
            outputs.register_hook(lambda _: use(2**60))
        elif 21 in numbers:
            use(2**60)
        return outputs.mean()

    first, second = ends_of(2, lambda run: fit_numbers(run, loss_fn))
    assert isinstance(first.error, ss.WorldError)
    assert isinstance(second.error, ss.OutOfMemoryError)
    assert str(second.error).startswith(
        "lane 2 of 4, with 2 samples, does not fit the memory of cpu on worker 1 at step 2; lanes=8 would halve it."
        " The number of lanes affects the result"
    )
    assert re.search(
        "memory: you tried to allocate|MemoryError|Tried to allocate", second.traceback
    )
    assert "The above exception was the direct cause" in second.traceback


def test_a_lane_of_one_sample_gets_no_smaller_by_more_lanes():
    (end,) = ends_of(
        1, lambda run: fit_numbers(run, lambda model, numbers: allocate(2**60)), lanes=8
    )
    assert (
        "with 1 sample, does not fit the memory of cpu on worker 0 at step 0; more lanes would not make it smaller"
        in str(end.error)
    )


def test_other_errors_of_a_loss_function_stay_what_they_are():
    (end,) = ends_of(
        1, lambda run: fit_numbers(run, lambda model, numbers: model(numbers.view(7, -1)))
    )
    assert type(end.error) is RuntimeError
    assert "shape '[7, -1]' is invalid" in str(end.error)


def test_a_worker_that_fails_stops_the_others(tmp_path):
    def job(run):
        return fit_numbers(run, after_step=lambda _: 1 // (run.rank != 1 or run.step != 2))

    first, second = ends_of(2, job, tmp_path)
    assert isinstance(first.error, ss.WorldError)
    assert "worker 0 got no response from other workers while" in str(first.error)
    assert isinstance(second.error, ZeroDivisionError)
    assert first.failed_at - second.failed_at < SOON_SECONDS
    failed = {event["rank"]: event for event in events(tmp_path, "failed")}
    assert (failed[1]["host"], failed[1]["step"]) == (socket.gethostname(), 2)
    assert "ZeroDivisionError" in failed[1]["traceback"]


class Unsaved:
    """What cannot be saved."""

    def state_dict(self):
        return {"lock": threading.Lock()}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_a_snapshot_that_fails_at_the_end_is_a_failure_of_the_run(tmp_path):
    ends = ends_of(2, lambda run: run.track(unsaved=Unsaved()), tmp_path)
    assert "unsaved/lock is a _thread.lock, which a snapshot cannot hold" in str(ends[0].error)
    assert {event["event"] for event in events(tmp_path)} == {"started", "failed"}


def test_a_launch_tells_the_first_failure_soon():
    def body():
        with ss.init() as run:
            fit_numbers(run, after_step=lambda _: 1 // (run.rank != 1 or run.step != 2))

    started = time.monotonic()
    with pytest.raises(
        ss.WorkerError, match=r"(?s)^worker 1 failed first: ZeroDivisionError.*after_step"
    ) as caught:
        ss.launch(body, workers=2, lanes=4)
    assert caught.value.rank == 1
    assert time.monotonic() - started < SOON_SECONDS


def test_workers_that_leave_their_loops_at_different_steps_are_told():
    def job(run):
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)))
        for batch in run.batches(Numbers(), 8):
            if run.rank == 1 and run.step == 2:
                break
            run.backward(lambda model, numbers: model(numbers).mean(), model, batch)

    ends = ends_of(2, job)
    assert [type(end.error) for end in ends] == [ss.WorldError] * 2
    assert (
        "calls: worker 0 was exchanging losses while worker 1 was ending the run; likely cause"
        in str(ends[0].error)
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/samestep"])
def test_a_directory_that_cannot_be_written_is_named(place, workers, tmp_path):
    (tmp_path / "file").touch()
    directory = tmp_path / place
    error = ends_of(workers, image_job, directory)[0].error
    assert isinstance(error, ss.RecordError)
    assert str(directory) in str(error)
    assert "choose a directory that can be written" in str(error)


class Ballast:
    """What makes a snapshot large."""

    def state_dict(self):
        return {"values": torch.zeros(100_000)}

    def load_state_dict(self, state):
        assert len(state["values"]) == 100_000


def heavy_job(run):
    run.track(ballast=Ballast())
    return image_job(run)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_stops_the_run_and_spares_the_snapshot_before(workers, tmp_path):
    with full_disk(700_000) as disk:
        ends = ends_of(workers, heavy_job, disk / "run", lanes=8, keep_last=1)
        told = [str(end.error) for end in ends if isinstance(end.error, ss.SnapshotError)]
        assert all(isinstance(end.error, (ss.SnapshotError, ss.WorldError)) for end in ends)
        assert told
        assert "step-00000002 could not be written" in told[0]
        assert "The newest complete snapshot is step-00000001" in told[0]
        left = left_by(
            heavy_job, tmp_path / "resumed", 1, lanes=8, resume=disk / "run" / "step-00000001"
        )
    assert left.items() <= left_by(heavy_job, tmp_path / "undisturbed", 1, lanes=8).items()


def fill(disk):
    """Leave no whole page free on a disk."""
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_disk_that_is_full_for_the_record_stops_the_run():
    def job(run):
        return image_job(
            run,
            epochs=20,
            hook=lambda step: fill(run.dir.parent) if (run.rank, step) == (0, 3) else None,
        )

    with full_disk(100_000) as disk:
        first, second = ends_of(2, job, disk / "run", lanes=8, snapshot_every=None)
        assert isinstance(second.error, ss.WorldError)
        assert isinstance(first.error, ss.RecordError)
        assert re.search(r"events\.jsonl .*full|No space left on device", str(first.error))
        assert (
            "Free some space there and start again: the run resumes from its newest snapshot"
            in str(first.error)
        )


@pytest.mark.parametrize("snapshot_every", [1, None])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_directory_that_is_moved_stops_the_run_and_resumes_where_it_is(
    workers, snapshot_every, tmp_path
):
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"

    def job(run):
        return image_job(
            run, hook=lambda step: there.rename(elsewhere) if (run.rank, step) == (0, 3) else None
        )

    ends = ends_of(workers, job, there, lanes=8, snapshot_every=snapshot_every)
    assert all(
        isinstance(end.error, (ss.RecordError, ss.SnapshotError, ss.WorldError)) for end in ends
    )
    assert re.search("run's directory (to stay )?in place", str(ends[0].error))
    assert left_by(image_job, elsewhere, 1, lanes=8) == left_by(
        image_job, tmp_path / "undisturbed", 1, lanes=8
    )


def test_the_history_of_a_run_that_was_killed_has_each_step_once(tmp_path):
    for attempt, step in enumerate((3, 6)):
        ends = ends_of(
            2, partial(image_job, hook=kill_at(step, rank=1)), tmp_path, lanes=8, snapshot_every=2
        )
        assert ends[1].exitcode == -signal.SIGKILL, attempt
    train(image_job, tmp_path, {"snapshot_every": 2})
    assert [event["step"] for event in events(tmp_path, "scalars")] != list(range(STEPS))
    for kind in ("scalars", "timing"):
        assert [
            event["step"] for event in read_history(tmp_path) if event["event"] == kind
        ] == list(range(STEPS))
    assert [event["event"] for event in read_history(tmp_path)].count("resumed") == 2


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(loader_workers):
    def job(run):
        dataset = Numbers(lambda number: 1 // (21 - number))
        return fit_numbers(run, dataset=dataset, loader_workers=loader_workers)

    (end,) = ends_of(1, job)
    assert isinstance(end.error, ss.LoaderError)
    assert "loading lane 2 of step 2 in epoch 0 failed: ZeroDivisionError" in str(end.error)
    assert "sample indices [20, 21]" in str(end.error)
    assert "lambda number: 1 // (21 - number)" in str(end.error)


def test_a_loader_process_that_dies_is_told():
    def die(number):
        if number == 21:
            os.kill(os.getpid(), signal.SIGKILL)

    (end,) = ends_of(1, lambda run: fit_numbers(run, dataset=Numbers(die), loader_workers=1))
    assert isinstance(end.error, ss.LoaderError)
    assert "a loader process died" in str(end.error)
    assert "use loader_workers=0" in str(end.error)
