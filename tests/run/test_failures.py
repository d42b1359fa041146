"""A failure during a run stops all workers with a clear error; snapshots stay valid."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import threading
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import samestep as ss
from samestep.record import read_history
from samestep.run import alerts
from tests.bits import bits
from tests.faults import full_disk, kill_at
from tests.jobs import STEPS, events, fit, image_job, left_by, snapshots, train
from tests.workers import run_workers, try_workers

FOREVER = 1e6  # seconds: a wait ends only if the failure is noticed


class Numbers(Dataset):
    """The numbers 0 to 31 as constant images; `bad` is called before each is read."""

    def __init__(self, bad=lambda number: None):
        self.bad = bad

    def __len__(self):
        return 32

    def __getitem__(self, number):
        self.bad(number)
        return torch.full((1, 8, 8), float(number))


def fit_numbers(run, loss_fn=lambda model, numbers: model(numbers).mean(), dataset=None, **options):
    """Train on eight numbers per step, in order.

    With four lanes and two workers, 21 is in lane 2 of step 2, which worker 1 carries.
    """
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
    """Return a loss function that returns `value` for the number 21, and as a metric for 5."""

    def loss_fn(model, numbers):
        loss = model(numbers).mean()
        return loss * value if 21 in numbers else loss, {"odd": value if 5 in numbers else 1.0}

    return loss_fn


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nonfinite_loss_stops_every_worker(value, tmp_path):
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


def test_run_can_continue_after_a_nonfinite_loss(tmp_path):
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


def fail_like_a_gpu(size):
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("use", [allocate, allocate_in_python, fail_like_a_gpu])
def test_out_of_memory_error_suggests_lanes(use, in_backward):
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
        "lane 2 of 4, with 2 samples, does not fit in the memory of cpu on worker 1 at step 2; "
        "lanes=8 would halve it. The number of lanes affects the result"
    )
    assert re.search(
        "memory: you tried to allocate|MemoryError|Tried to allocate", second.traceback
    )
    assert "The above exception was the direct cause" in second.traceback


def test_out_of_memory_error_of_one_sample_suggests_no_lanes():
    (end,) = ends_of(
        1, lambda run: fit_numbers(run, lambda model, numbers: allocate(2**60)), lanes=8
    )
    assert (
        "with 1 sample, does not fit in the memory of cpu on worker 0 at step 0; more lanes would "
        "not make it smaller" in str(end.error)
    )


def test_other_errors_of_a_loss_function_are_raised_unchanged():
    (end,) = ends_of(
        1, lambda run: fit_numbers(run, lambda model, numbers: model(numbers.view(7, -1)))
    )
    assert type(end.error) is RuntimeError
    assert "shape '[7, -1]' is invalid" in str(end.error)


def test_failed_worker_stops_the_others(tmp_path):
    def job(run):
        return fit_numbers(run, after_step=lambda _: 1 // (run.rank != 1 or run.step != 2))

    first, second = ends_of(2, job, tmp_path, timeout=FOREVER)
    assert isinstance(first.error, ss.WorldError)
    assert "worker 0 got no response from other workers while" in str(first.error)
    assert isinstance(second.error, ZeroDivisionError)
    failed = {event["rank"]: event for event in events(tmp_path, "failed")}
    assert (failed[1]["host"], failed[1]["step"]) == (socket.gethostname(), 2)
    assert "ZeroDivisionError" in failed[1]["traceback"]


class Unsaved:
    """State that cannot be saved."""

    def state_dict(self):
        return {"lock": threading.Lock()}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_failed_last_snapshot_fails_the_run(tmp_path):
    ends = ends_of(2, lambda run: run.track(unsaved=Unsaved()), tmp_path)
    assert "unsaved/lock is a _thread.lock, which a snapshot cannot hold" in str(ends[0].error)
    assert {event["event"] for event in events(tmp_path)} - {"system"} == {"started", "failed"}


def test_launch_raises_the_first_failure():
    def body():
        with ss.init() as run:
            fit_numbers(run, after_step=lambda _: 1 // (run.rank != 1 or run.step != 2))

    with pytest.raises(
        ss.WorkerError, match=r"(?s)^worker 1 failed first: ZeroDivisionError.*after_step"
    ) as caught:
        ss.launch(body, workers=2, lanes=4, timeout=FOREVER)
    assert caught.value.rank == 1


def test_leaving_loops_at_different_steps_is_an_error():
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
def test_directory_that_cannot_be_written_is_named(place, workers, tmp_path):
    (tmp_path / "file").touch()
    directory = tmp_path / place
    error = ends_of(workers, image_job, directory)[0].error
    assert isinstance(error, ss.errors.RecordError)
    assert str(directory) in str(error)
    assert "choose a writable directory" in str(error)


class Ballast:
    """State that makes a snapshot large."""

    def state_dict(self):
        return {"values": torch.zeros(100_000)}

    def load_state_dict(self, state):
        assert len(state["values"]) == 100_000


def heavy_job(run):
    run.track(ballast=Ballast())
    return image_job(run)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_full_disk_stops_the_run_and_keeps_the_previous_snapshot(workers, tmp_path):
    with full_disk(700_000) as disk:
        ends = ends_of(workers, heavy_job, disk / "run", lanes=8, keep_last=1)
        messages = [str(end.error) for end in ends if isinstance(end.error, ss.SnapshotError)]
        assert all(isinstance(end.error, (ss.SnapshotError, ss.WorldError)) for end in ends)
        assert messages
        assert "step-00000002 could not be written" in messages[0]
        assert "The newest complete snapshot is step-00000001" in messages[0]
        left = left_by(
            heavy_job, tmp_path / "resumed", 1, lanes=8, resume=disk / "run" / "step-00000001"
        )
    assert left.items() <= left_by(heavy_job, tmp_path / "undisturbed", 1, lanes=8).items()


def fill(disk):
    """Fill a disk up to its last page."""
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_disk_without_space_for_the_record_stops_the_run():
    def job(run):
        return image_job(
            run,
            epochs=20,
            hook=lambda step: fill(run.dir.parent) if (run.rank, step) == (0, 3) else None,
        )

    with full_disk(100_000) as disk:
        first, second = ends_of(2, job, disk / "run", lanes=8, snapshot_every=None)
        assert isinstance(second.error, ss.WorldError)
        assert isinstance(first.error, ss.errors.RecordError)
        assert re.search(r"events\.jsonl: .*disk full|No space left on device", str(first.error))
        assert "Free some space and restart: the run resumes from its newest snapshot" in str(
            first.error
        )


@pytest.mark.parametrize("snapshot_every", [1, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_moved_directory_stops_the_run_which_can_resume_there(
    workers, snapshot_every, undisturbed, tmp_path
):
    directory, elsewhere = tmp_path / "there", tmp_path / "elsewhere"

    def job(run):
        return image_job(
            run,
            hook=lambda step: directory.rename(elsewhere) if (run.rank, step) == (0, 3) else None,
        )

    ends = ends_of(workers, job, directory, lanes=8, snapshot_every=snapshot_every)
    assert all(
        isinstance(end.error, (ss.errors.RecordError, ss.SnapshotError, ss.WorldError))
        for end in ends
    )
    assert re.search(
        "do not move or remove the run's directory|was removed or moved during the run",
        str(ends[0].error),
    )
    assert left_by(image_job, elsewhere, 1, lanes=8) == undisturbed


def test_history_of_a_killed_run_has_each_step_once(tmp_path):
    for attempt, step in enumerate((3, 6)):
        saved = tmp_path / f"step-{2 * ((step - 1) // 2):08d}" / "manifest.json"
        job = partial(image_job, hook=kill_at(step, 1, after=saved))
        ends = ends_of(2, job, tmp_path, lanes=8, snapshot_every=2)
        assert ends[1].exitcode == -signal.SIGKILL, attempt
    train(image_job, tmp_path, {"snapshot_every": 2})
    assert [event["step"] for event in events(tmp_path, "scalars")] != list(range(STEPS))
    for kind in ("scalars", "timing"):
        assert [
            event["step"] for event in read_history(tmp_path) if event["event"] == kind
        ] == list(range(STEPS))
    assert [event["event"] for event in read_history(tmp_path)].count("resumed") == 2


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_sample_that_cannot_be_read_is_named(loader_workers):
    def job(run):
        dataset = Numbers(lambda number: 1 // (21 - number))
        return fit_numbers(run, dataset=dataset, loader_workers=loader_workers)

    (end,) = ends_of(1, job)
    assert isinstance(end.error, ss.errors.LoaderError)
    assert "loading lane 2 of step 2 in epoch 0 failed: ZeroDivisionError" in str(end.error)
    assert "sample indices [20, 21]" in str(end.error)
    assert "lambda number: 1 // (21 - number)" in str(end.error)


def test_killed_loader_process_is_reported():
    def die(number):
        if number == 21:
            os.kill(os.getpid(), signal.SIGKILL)

    (end,) = ends_of(1, lambda run: fit_numbers(run, dataset=Numbers(die), loader_workers=1))
    assert isinstance(end.error, ss.errors.LoaderError)
    assert "a loader process died" in str(end.error)
    assert "use loader_workers=0" in str(end.error)


def skipping_job(run, spoil):
    """Train with BatchNorm; a loss is not finite in step 1. Return the states after each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 1), nn.Linear(1, 1))
    model, data = run.replicate(net), torch.randn(32, 64)

    def loss_fn(model, batch):
        loss = model(batch).square().mean()
        return loss * spoil if run.step == 1 and batch[0, 0] == data[8, 0] else loss

    sharded = run.shard(torch.optim.AdamW(model[2].parameters(), weight_decay=0.5))
    plain = torch.optim.AdamW([*model[1].parameters(), *model[3].parameters()], weight_decay=0.5)
    run.track(model=model, sharded=sharded, plain=plain)
    states = []
    for batch in run.batches(data, 8, epochs=1, shuffle=False):
        means = run.backward(loss_fn, model, batch)
        run.clip_grad_norm(model, 1.0)
        for optimizer in (sharded, plain):
            optimizer.step()
            optimizer.zero_grad()
        states.append([bits(tensor) for tensor in model.state_dict().values()])
        run.log(means)
    assert [before == after for before, after in pairwise(states)] == [True, False, False]
    assert run.step == 4
    return states


@pytest.mark.parametrize(
    "value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.long)]
)
def test_a_batch_with_a_nonfinite_loss_is_skipped_on_all_workers(value, tmp_path):
    def body(directory):
        with ss.init(lanes=4, dir=directory, nonfinite_loss="skip") as run:
            return skipping_job(run, value)

    expected = body(None)
    for workers in (2, 4):
        directory = tmp_path / str(workers)
        assert run_workers(partial(body, directory), workers) == [expected] * workers
        (event,) = events(directory, "batch_skipped")
        assert event["step"] == 1
        assert event["reason"] == f"the loss is {value} at step 1 in lane 0 (worker 0)"


def test_a_resumed_run_knows_what_was_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts, "MOST_SKIPPED", 3)

    def job(run):
        return fit_numbers(run, lambda model, numbers: model(numbers).mean() * math.inf)

    options = {"nonfinite_loss": "skip", "snapshot_every": "1"}
    (end,) = ends_of(1, job, tmp_path, **options, stop_after=2)
    assert end.exitcode == 0
    (end,) = ends_of(1, job, tmp_path, **options)
    assert type(end.error) is ss.NonFiniteLossError
    assert str(end.error).startswith("3 steps in a row were skipped, the last one because the loss")
    assert [event["step"] for event in events(tmp_path, "batch_skipped")] == [0, 1, 2]


def test_a_skipped_batch_leaves_earlier_gradients():
    with ss.init(lanes=2, nonfinite_loss="skip") as run:
        model = run.replicate(nn.Linear(1, 1))

        def loss_fn(model, batch):
            return model(batch).mean() * (math.nan if run.step else 1.0)

        for batch in run.batches(torch.ones(4, 1), 2, epochs=1):
            run.backward(loss_fn, model, batch)
        assert [parameter.grad.item() for parameter in model.parameters()] == [1.0, 1.0]
