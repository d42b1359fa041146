"""What a script does after the steps of an epoch is done once, wherever it was interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.launch import launch
from tests.run.test_stages import EXAMPLES, fit, loss_fn, start

PLACES = ["loop", "evaluation", "schedule", "snapshot", "patience"]
EPOCHS, STEPS = 3, 4


class InterruptionError(Exception):
    """As a kill: the process saves nothing after it."""


class Job:
    """Trains epochs with an evaluation, a schedule and patience after each."""

    def __init__(self, epoch=None, place=None, interrupt=None, *, is_counted=False):
        self.epoch, self.place, self.is_counted = epoch, place, is_counted
        self.interrupt = interrupt

    def reach(self, epoch, place):
        if (epoch, place) == (self.epoch, self.place):
            self.interrupt()

    def __call__(self, run):
        torch.manual_seed(0)
        model = run.replicate(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        patience, done = ss.Patience(9), {"epochs": []}
        run.track(model=model, optimizer=optimizer, schedule=schedule, patience=patience, done=done)

        def evaluate(model, batch):
            self.reach(epoch, "evaluation")
            return loss_fn(model, batch)

        for epoch in self.epochs(run):
            fit(run, model, optimizer)
            self.reach(epoch, "loop")
            loss = run.evaluate(evaluate, model, EXAMPLES, 8)["loss"]
            schedule.step()
            self.reach(epoch, "schedule")
            run.snapshot(score=-loss)
            self.reach(epoch, "snapshot")
            patience.step(1.0)
            done["epochs"].append((epoch, loss))
            self.reach(epoch, "patience")
        rate = optimizer.param_groups[0]["lr"]
        return rate, patience.count, done["epochs"], model.weight.tolist(), run.step, run.epoch

    def epochs(self, run):
        if not self.is_counted:
            yield from range(run.epoch, EPOCHS)
            return
        while run.epoch < EPOCHS:
            yield run.epoch


@pytest.fixture(scope="module")
def undisturbed():
    with start(None) as run:
        rate, waited, epochs, *rest = Job()(run)
    assert (rate, waited, [epoch for epoch, _ in epochs]) == (0.5**4, 2, [0, 1, 2])
    return rate, waited, epochs, *rest


def interrupted(job, directory, **options):
    def interrupt():
        raise InterruptionError

    job.interrupt = interrupt
    with pytest.raises(InterruptionError), start(directory, **options) as run:
        job(run)


@pytest.mark.parametrize("every", ["1", str(STEPS), "3"])
@pytest.mark.parametrize("place", PLACES)
def test_the_rest_of_an_interrupted_epoch_is_done_once(undisturbed, tmp_path, place, every):
    for epoch in (1, 1, EPOCHS - 1):  # twice in the same one
        interrupted(Job(epoch, place), tmp_path, snapshot_every=every)
    with start(tmp_path) as run:
        assert run.epoch == EPOCHS - 1
        assert Job()(run) == undisturbed
    with start(tmp_path) as run:  # a finished run
        assert run.epoch == EPOCHS
        assert Job()(run) == undisturbed


def test_a_loop_that_counts_by_the_runs_epoch_ends_in_time(undisturbed, tmp_path):
    interrupted(Job(1, "schedule", is_counted=True), tmp_path, snapshot_every="1")
    with start(tmp_path) as run:
        assert Job(is_counted=True)(run) == undisturbed


def test_a_stop_at_the_end_of_an_epoch_leaves_the_rest_to_the_next_start(undisturbed, tmp_path):
    with pytest.raises(SystemExit), start(tmp_path, 2 * STEPS) as run:
        Job()(run)
    with start(tmp_path) as run:
        assert Job()(run) == undisturbed


def test_replacements_of_a_killed_worker_do_the_rest_of_the_epoch(undisturbed, tmp_path):
    marker = Path(tmp_path, "killed")

    def body():
        def kill():
            if run.rank == 1 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        with start(tmp_path / "run", hot_every=1) as run:
            return Job(2, "evaluation", kill)(run)

    assert launch(body, workers=2) == undisturbed
    assert marker.exists()


def test_the_snapshot_of_an_epoch_holds_what_follows_its_score(tmp_path):
    """It is taken when the next loop begins, and is that of the epoch's last step."""
    with start(tmp_path, keep_last=9) as run:
        Job()(run)
    for epoch in range(EPOCHS):
        saved = ss.read_snapshot(tmp_path / f"step-{(epoch + 1) * STEPS:08d}")
        assert saved.state["patience"]["count"] == epoch
        assert saved.state["schedule"]["last_epoch"] == epoch + 1
        assert saved.score == -saved.state["done"]["epochs"][epoch][1]


def test_the_best_snapshot_may_be_that_of_the_epoch_that_has_just_ended(tmp_path):
    with start(tmp_path) as run:
        model = run.replicate(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.track(model=model, optimizer=optimizer)
        for epoch in range(run.epoch, 3):
            fit(run, model, optimizer)
            run.snapshot(score=float(epoch))
        assert run.best_snapshot().score == 2.0
        run.snapshot(now=True)
    assert ss.read_snapshot(tmp_path).score == 2.0


def test_each_of_two_loops_in_an_epoch_continues_in_it(tmp_path):
    def job(run, stop_at=None):
        model = run.replicate(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps = {"first": [], "second": []}
        run.track(model=model, optimizer=optimizer, steps=steps)
        for epoch in range(run.epoch, 3):
            for name, taken in steps.items():
                for batch in run.batches(EXAMPLES, 8, name=name):
                    run.backward(loss_fn, model, batch)
                    optimizer.step()
                    optimizer.zero_grad()
                    taken.append((epoch, batch.epoch))
                    if run.step == stop_at:
                        raise InterruptionError
        return steps

    with start(None) as run:
        undisturbed = job(run)
    expected = [(epoch, epoch) for epoch in range(3) for _ in range(2)]
    assert undisturbed == {"first": expected, "second": expected}
    for step in (6, 7, 8):  # in the second loop of an epoch, before the next epoch, and in it
        with pytest.raises(InterruptionError), start(tmp_path, snapshot_every="1") as run:
            job(run, step)
    with start(tmp_path) as run:
        assert job(run) == undisturbed
