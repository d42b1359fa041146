"""One lane on one worker gives the same bits as a loop in plain PyTorch."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import repeat

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import samestep as ss
from tests.jobs import Net, classify, fingerprint, images

OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, fused=False),
    "fused-adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
}
ORDERED = images(101)


class Sometimes(nn.Module):
    """A classifier with a frozen layer and a layer that only some batches use."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(64, 20).requires_grad_(requires_grad=False)
        self.always, self.sometimes = (nn.Linear(20, 10) for _ in range(2))
        self.add_module("never", nn.Linear(20, 10))

    def forward(self, pictures):
        features = self.frozen(pictures.flatten(1)).relu()
        return self.always(features) + (self.sometimes(features) if len(pictures) < 32 else 0)


def made(make_model, make_optimizer):
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)


def left(model, optimizer, losses):
    return fingerprint(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    )


def plain(make_model, make_optimizer, max_norm):
    model, optimizer, schedule = made(make_model, make_optimizer)
    losses = []
    for _ in range(2):
        for batch in DataLoader(ORDERED, batch_size=32):
            loss, _ = classify(model, batch)
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    return left(model, optimizer, losses)


def with_samestep(make_model, make_optimizer, max_norm, *, sharded):
    with ss.init(lanes=1) as run:
        model, optimizer, schedule = made(make_model, make_optimizer)
        run.replicate(model)
        if sharded:
            run.shard(optimizer)
        losses = []
        for batch in run.batches(ORDERED, 32, epochs=2, shuffle=False):
            means = run.backward(classify, model, batch)
            if max_norm is not None:
                run.clip_grad_norm(model, max_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(means["loss"])
        saved = run._lanes.optimizers.seals[0].contents if sharded else optimizer
        return left(model, saved, losses)


def without_dropout():
    model = Net()
    model.features[3].p = 0.0  # random numbers differ from those of a plain loop
    return model


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("make_model", [without_dropout, Sometimes])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_lane_equals_the_plain_loop(make_model, optimizer, max_norm, sharded):
    settings = make_model, OPTIMIZERS[optimizer], max_norm
    assert with_samestep(*settings, sharded=sharded) == plain(*settings)


def test_gradients_accumulate_as_in_the_plain_loop():
    def penalty(model, _):
        return model.head.weight.square().mean()

    plain_model, model = (made(without_dropout, torch.optim.SGD)[0] for _ in range(2))
    for batch in DataLoader(ORDERED, batch_size=32):
        classify(plain_model, batch)[0].backward()
        penalty(plain_model, batch).backward()
    with ss.init(lanes=1) as run:
        run.replicate(model)
        for batch in run.batches(ORDERED, 32, shuffle=False):
            run.backward(classify, model, batch)
            run.backward(penalty, model, batch)
    gradients, expected = (
        {name: p.grad for name, p in net.named_parameters()} for net in (model, plain_model)
    )
    assert fingerprint(gradients) == fingerprint(expected)


def test_loop_counts_its_steps_over_resumes(tmp_path):
    def train(stop_after):
        with suppress(SystemExit), ss.init(dir=tmp_path, lanes=1, stop_after=stop_after) as run:
            run.track(model=nn.Linear(1, 1))
            loop = run.batches(ORDERED, 32, epochs=2, shuffle=False)
            assert (loop.steps_per_epoch, loop.steps) == (4, 8)
            for _ in loop:
                assert (loop.step, loop.steps, len(loop)) == (run.step + 1, 8, 8 - run.step)
                numbers.append(loop.step)

    numbers = []
    train(3)
    train(None)
    assert numbers == list(range(1, 9))


def test_loop_of_one_epoch_continues_the_count_of_the_previous_one():
    with ss.init(lanes=1) as run:
        for first in (1, 5):
            loop = run.batches(ORDERED, 32)
            assert [loop.step for _ in loop] == list(range(first, first + 4))


@pytest.mark.parametrize("steps", [3, None])
def test_loop_over_streams_counts_its_steps(steps):
    with ss.init(lanes=1, stop_after=4) as run, suppress(SystemExit):
        loop = run.streams(lambda _: repeat(torch.ones(2)), steps=steps, name="ones")
        assert (loop.steps_per_epoch, loop.steps, loop.step) == (None, steps, 0)
        numbers = []
        for _ in loop:
            numbers.append(loop.step)  # noqa: PERF401  the run stops in the loop
    assert numbers == list(range(1, (steps or 4) + 1))
