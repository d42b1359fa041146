"""Calls that need the gradient or the means of a whole batch are refused in a lane."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import samestep as ss
from samestep.errors import LossError
from tests.jobs import Net, images

AFTER = [
    "Optimizer.zero_grad",
    "Module.zero_grad",
    "clip_grad_norm_",
    "clip_grad_value_",
    "LRScheduler.step",
    "CosineAnnealingWarmRestarts.step",
    "ReduceLROnPlateau.step",
    "GradScaler.update",
    "GradScaler.unscale_",
    "AveragedModel.update_parameters",
    "run.log",
    "run.snapshot",
    "run.evaluate",
    "run.finish",
]


def calls_of(run, model, optimizer):
    """Return by name what belongs behind a loop over lanes, as scripts write it."""
    schedule = lr_scheduler.StepLR(optimizer, 2)
    restarts = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    average, scaler = AveragedModel(model), run.grad_scaler()
    return {
        "Optimizer.zero_grad": lambda: optimizer.zero_grad(set_to_none=False),
        "Module.zero_grad": model.zero_grad,
        "clip_grad_norm_": lambda: clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        "clip_grad_value_": lambda: clip_grad_value_(list(model.parameters()), clip_value=1.0),
        "LRScheduler.step": schedule.step,
        "CosineAnnealingWarmRestarts.step": lambda: restarts.step(0.5),
        "ReduceLROnPlateau.step": lambda: plateau.step(1.0),
        "GradScaler.update": lambda: scaler.update(1.0),
        "GradScaler.unscale_": lambda: scaler.unscale_(optimizer),
        "AveragedModel.update_parameters": lambda: average.update_parameters(model),
        "run.log": lambda: run.log(loss=1.0),
        "run.snapshot": lambda: run.snapshot(score=1.0),
        "run.evaluate": lambda: run.evaluate(loss_fn, model, images(4), 4),
        "run.finish": run.finish,
    }


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def started(lanes=2):
    run = ss.init(lanes=lanes)
    model = run.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return run, model, optimizer, next(iter(run.batches(images(8), 8, steps=1)))


@pytest.mark.parametrize("place", ["before the loss", "after the loss", "in a function"])
@pytest.mark.parametrize("name", AFTER)
def test_a_call_in_a_lane_is_refused(name, place):
    with suppress(LossError):  # a loop over lanes that was left is an error at the end
        run, model, optimizer, batch = started()
        with run:
            call = calls_of(run, model, optimizer)[name]

            def calling(model, batch):
                call()
                return loss_fn(model, batch)

            def train():
                if place == "in a function":
                    run.backward(calling, model, batch)
                for lane_batch in batch.lanes(model):
                    if place == "before the loss":
                        call()
                    batch.backward(loss_fn(model, lane_batch))
                    call()

            with pytest.raises(LossError, match=rf"{name} was called in a lane, .* Move it behind"):
                train()


@pytest.mark.parametrize("name", AFTER)
def test_the_same_call_behind_the_loop_works(name):
    run, model, optimizer, batch = started()
    with run:
        call = calls_of(run, model, optimizer)[name]
        for lane_batch in batch.lanes(model):
            batch.backward(loss_fn(model, lane_batch))
        optimizer.step()
        call()


def test_gradients_of_an_earlier_call_are_not_clipped_in_a_lane():
    run, model, _, batch = started()
    with run:
        run.backward(loss_fn, model, batch)

        def clipping(model, batch):
            clip_grad_norm_(model.parameters(), 1.0)
            return loss_fn(model, batch)

        with pytest.raises(LossError, match="clip_grad_norm_"):
            run.backward(clipping, model, batch)


def test_a_lane_may_train_a_model_of_its_own():
    """As an inner loop of meta learning, or a fit of a probe."""

    def adapted(model, batch):
        probe = nn.Linear(10, 10)
        optimizer = torch.optim.SGD(probe.parameters(), 0.1)
        schedule = lr_scheduler.StepLR(optimizer, 1)
        features = model(batch[0])
        for _ in range(2):
            optimizer.zero_grad()
            probe.zero_grad()
            F.cross_entropy(probe(features.detach()), batch[1]).backward()
            clip_grad_norm_(probe.parameters(), 1.0)
            clip_grad_value_(probe.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return F.cross_entropy(features, batch[1])

    run, model, _, batch = started()
    with run:
        run.backward(adapted, model, batch)


def test_what_all_workers_do_alike_may_be_recorded():
    """With one lane, and where the body sees the embeddings of all lanes."""
    run, model, _, batch = started(lanes=1)
    with run:
        for lane_batch in batch.lanes(model):
            loss = loss_fn(model, lane_batch)
            run.log(loss=loss.item())
            batch.backward(loss)
    run, model, _, batch = started()
    with run:
        for embeddings in batch.lanes(model, embed=lambda model, batch: model(batch[0])):
            loss = embeddings.square().mean()
            run.log(loss=loss.item())
            batch.backward(loss)
