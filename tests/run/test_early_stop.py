"""Runs that stop early, limit their epochs, or go back to their best snapshot."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import nn

import samestep as ss
from tests.run.test_stages import EXAMPLES, fit, loss_fn, start, stopped_at
from tests.workers import run_workers


def early_stop(run, *, leaves=True):
    """Train until the loss of two epochs was no better; return the epochs, in this start."""
    model = run.replicate(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 2.0, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    patience = ss.Patience(2)
    run.track(model=model, optimizer=optimizer, plateau=plateau, patience=patience)
    epochs = []
    for epoch in range(run.epoch, 20):
        fit(run, model, optimizer)
        loss = run.evaluate(loss_fn, model, EXAMPLES, 8)["loss"]
        epochs.append((epoch, loss, optimizer.param_groups[0]["lr"]))
        plateau.step(loss)
        if patience.step(loss):
            run.finish()
            if leaves:
                break
    return epochs, run.step


@pytest.fixture(scope="module")
def undisturbed():
    def body():
        with ss.init(lanes=2) as run:
            return early_stop(run)

    epochs, step = run_workers(body, 2)[0]
    assert 3 <= len(epochs) < 20
    assert len({lr for *_, lr in epochs}) > 1
    return epochs, step


def test_patience_and_schedules_continue_after_a_resume(undisturbed, tmp_path):
    stopped_at(7, early_stop, tmp_path)  # in the second epoch
    stopped_at(9, early_stop, tmp_path)  # in the third
    with start(tmp_path) as run:
        epochs, step = early_stop(run)
    assert (epochs, step) == (undisturbed[0][2:], undisturbed[1])


def test_later_starts_of_a_finished_run_train_nothing(undisturbed, tmp_path, capfd):
    stopped_at(99, early_stop, tmp_path)
    with start(tmp_path) as run:
        assert run.finished
        (epoch,), step = early_stop(run)
        assert step == undisturbed[1]
        assert [*run.streams(lambda lane: iter([lane]), steps=1, name="more")] == []
    assert epoch[:2] == (len(undisturbed[0]), undisturbed[0][-1][1])
    assert "nothing left to do: the run" in capfd.readouterr().err


def test_own_loop_that_goes_on_after_the_end_is_refused():
    with ss.init(lanes=2) as run, pytest.raises(ss.ConfigError, match=r"after run.finish\(\)"):
        early_stop(run, leaves=False)


def test_finish_in_a_loop_is_saved_with_its_step(tmp_path):
    def body(run):
        run.track(state={})
        for _ in run.batches(EXAMPLES, 4, epochs=3):
            if run.step == 5:
                run.finish()
        return run.step, len(run.batches(EXAMPLES, 4, epochs=3))

    for _ in range(2):
        with start(tmp_path) as run:
            assert body(run) == (6, 0)
    with start(tmp_path, resume=str(tmp_path / "step-00000006")) as run:
        assert body(run) == (12, 0)


def test_run_that_trains_on_after_its_end_says_so(tmp_path, capfd):
    def body(epochs):
        with start(tmp_path) as run:
            run.track(state={})
            for _ in run.batches(EXAMPLES, 4, epochs=epochs):
                pass

    run_workers(partial(body, 1), 1)
    assert "trains on" not in capfd.readouterr().err
    run_workers(partial(body, 2), 1)
    text = "the run had ended at step 4 and trains on; if it should have stopped early, call"
    assert capfd.readouterr().err.count(text) == 1


def limited(run, limit=3, **options):
    seen = []
    run.track(seen=seen)
    dataset = [(torch.tensor(index),) for index in range(16)]
    passes = [None] if options else range(run.epoch, 3)
    for _ in passes:
        loop = run.batches(dataset, 2, **options).limit(limit)
        seen.extend((run.epoch, [lane.tolist() for (lane,) in batch]) for batch in loop)
    return seen


@pytest.mark.parametrize("options", [{}, {"epochs": 3}])
def test_limited_epochs_continue_and_have_new_orders(options, tmp_path):
    job = partial(limited, **options)
    stopped_at(4, job, tmp_path)
    with start(tmp_path) as run:
        seen = job(run)
        assert (run.step, run.epoch) == (9, 3)
    assert [epoch for epoch, _ in seen] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with ss.init(lanes=2) as run:
        assert job(run) == seen
    orders = [[samples for at, samples in seen if at == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert len({sample for lanes in orders[0] for lane in lanes for sample in lane}) == 6


def test_limit_that_changes_within_an_epoch_is_refused(tmp_path):
    stopped_at(4, limited, tmp_path)
    with (
        pytest.raises(ss.DataError, match=r"step 1 of epoch 1 expected limit=3, got limit=2"),
        start(tmp_path) as run,
    ):
        limited(run, 2)


def test_limit_must_be_a_number_of_steps():
    with ss.init(lanes=2) as run, pytest.raises(ss.ConfigError, match="limit must be a whole"):
        run.batches(EXAMPLES, 4).limit(0)


def test_break_that_continues_an_epoch_is_noticed(caplog):
    caplog.set_level(logging.WARNING)
    with ss.init(lanes=2) as run:
        model = run.replicate(nn.Linear(4, 2))
        for _ in range(run.epoch, 3):
            for batch in run.batches(EXAMPLES, 4):
                if run.step % 3 == 2:
                    break
                run.backward(loss_fn, model, batch)
    (text,) = (record.getMessage() for record in caplog.records)
    assert "loop 'train' was left after 2 of 4 steps of epoch 0" in text
    assert ".limit(2) instead of break" in text


def with_scores(run, scores):
    model = run.replicate(nn.Linear(4, 2))
    optimizer = run.shard(torch.optim.SGD(model.parameters(), 0.1))
    run.track(model=model, optimizer=optimizer)
    saved = {}
    for _ in range(run.epoch, len(scores)):
        fit(run, model, optimizer)
        saved[run.step] = model.weight.tolist()
        run.snapshot(score=scores[run.epoch - 1])
    return model, saved


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_best_snapshot_is_loaded_into_the_model(workers, tmp_path):
    def body():
        with start(tmp_path, keep_last=1) as run:
            model, saved = with_scores(run, [0.1, 0.7, float("nan"), 0.7, 0.2])
            best = run.best_snapshot()
            model.load_state_dict(best.state["model"])
            assert model.weight.tolist() == saved[best.step]
            return best.step, best.score, saved[run.step]

    steps, scores, (last, *_) = zip(*run_workers(body, workers), strict=True)
    assert {*steps}, {*scores} == ({8}, {0.7})  # the earliest of two
    assert ss.read_snapshot(tmp_path).state["model"]["weight"].tolist() == last
    with start(tmp_path, read_only=True) as run:
        assert run.best_snapshot().step == 8


@pytest.mark.long
def test_best_snapshot_may_be_in_the_remote_storage_only(tmp_path):
    def body(scores, directory):
        with start(tmp_path / directory, remote=f"file://{tmp_path}/remote", keep_last=1) as run:
            with_scores(run, scores)
            return run.best_snapshot().step

    assert run_workers(body, 1, [0.9, 0.1], "first") == [4]
    assert run_workers(body, 2, [0.9, 0.1, 0.8], "second") == [4, 4]


def without_scores(directory):
    with start(directory) as run:
        run.track(state={})
        run.best_snapshot()


def within_a_step(directory):
    with start(directory) as run:
        for _ in run.batches(EXAMPLES, 4):
            run.best_snapshot()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without_scores, r"has a score; call run.snapshot\(score=...\)"),
        (within_a_step, "in a step; call it after the loop"),
    ],
)
def test_best_snapshot_needs_scores_and_the_end_of_a_step(body, message, tmp_path):
    with pytest.raises(ss.SnapshotError, match=message):
        body(tmp_path)


def test_best_snapshot_needs_a_directory():
    with ss.init(lanes=2) as run, pytest.raises(ss.ConfigError, match="requires dir and"):
        run.best_snapshot()
