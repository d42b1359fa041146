"""Gradients that are not finite although losses are."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.config import Config
from samestep.errors import NonFiniteLossError
from samestep.step.finite import has_nonfinite, size_of_flats, size_of_many
from samestep.step.lane_engine import LaneEngine
from tests.bits import bits
from tests.jobs import events
from tests.step.test_lane_engine import LANES, backward, model_of
from tests.step.test_lane_engine import loss_fn as plain_loss
from tests.workers import run_workers
from tests.worlds import on_hosts

CPU = torch.device("cpu")
BAD = 18  # a sample of lane 1 at step 2
DATA = torch.arange(32.0).view(32, 1) % 31


def spoiled(out, samples):
    """Return 0 with a gradient of 0, but of NaN in the lane of the bad sample."""
    return (out.mean() * (samples != BAD).all()).square().sqrt() * 0


def loss_fn(model, samples):
    out = model(samples)
    return out.square().mean() + spoiled(out, samples)


def net():
    return nn.Sequential(nn.Linear(1, 70), nn.BatchNorm1d(70), nn.ReLU(), nn.Linear(70, 1))


def train(run, *, shards=False, inline=False, calls=(loss_fn,), scaler=None):
    """Return bits of all state after each step, and whether everything is finite."""
    torch.manual_seed(0)
    model = run.replicate(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = run.shard(optimizer) if shards else optimizer
    left = []
    # in the order of the data, so that the bad sample has its place
    for batch in run.batches(DATA, 8, epochs=1, shuffle=False):
        for fn in calls:
            if inline:
                for samples in batch.lanes(model):
                    batch.backward(fn(model, samples))
            else:
                run.backward(fn, model, batch)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        left.append([bits(value) for value in model.state_dict().values()])
    state = run._lanes.optimizers.seals[0].contents.state if shards else optimizer.state
    own = [value for values in state.values() for value in values.values()]
    tensors = [*model.state_dict().values(), *own]
    return left, all(bool(tensor.isfinite().all()) for tensor in tensors)


def scaled(run, **options):
    """Train with a GradScaler, which skips the update itself."""
    scaler = run.grad_scaler(init_scale=4.0)

    def fn(model, samples):
        return scaler.scale(loss_fn(model, samples))

    return train(run, calls=[fn], scaler=scaler, **options)


def own_scaler(run):
    """Train with one that `run.grad_scaler` did not make, in an unsharded optimizer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.track(scaler=scaler)
    fn = partial(lambda model, samples: scaler.scale(loss_fn(model, samples)))
    return train(run, calls=[fn], scaler=scaler)


def finite_first(model, samples):
    return model(samples).mean()


JOBS = {
    "plain": train,
    "sharded": partial(train, shards=True),
    "inline": partial(train, inline=True),
    "two calls": partial(train, shards=True, calls=[finite_first, loss_fn]),
    "scaled": scaled,
    "scaled slices": partial(scaled, shards=True),
    "scaler of torch": own_scaler,
}


def skipped(name, directory=None, **options):
    """Return what is left of a job, and the steps that it has skipped."""
    with ss.init(lanes=4, nonfinite_loss="skip", dir=directory, **options) as run:
        left, is_finite = JOBS[name](run)
        return left, is_finite, run._progress.skipped.steps


def all_skipped():
    jobs = {name: skipped(name) for name in JOBS}
    return {**jobs, "bfloat16": skipped("sharded", exchange_dtype="bfloat16")}


def test_a_gradient_that_is_not_finite_is_skipped_at_any_number_of_workers():
    expected = all_skipped()
    for name, (left, is_finite, steps) in expected.items():
        assert is_finite, name
        assert steps == ([] if "scale" in name else [2]), name
        parameters = slice(0, 2)  # without BatchNorm, whose buffers a scaler does not protect
        are_same = left[1][parameters] == left[2][parameters]
        assert are_same == (name != "two calls"), name
    assert expected["plain"][0][1] == expected["plain"][0][2]  # buffers as well
    assert expected["plain"] == expected["inline"]
    for workers in (2, 3):
        assert run_workers(all_skipped, workers) == [expected] * workers


def test_what_is_skipped_is_recorded(tmp_path):
    run_workers(partial(skipped, "plain", tmp_path), 3)
    (event,) = events(tmp_path, "batch_skipped")
    reason = "the gradient is not finite at step 2 in lane 1 (worker 1), although the loss is"
    assert (event["step"], event["reason"]) == (2, reason)
    (alert,) = events(tmp_path, "loss_alert")
    assert (alert["step"], alert["lane"], alert["samples"]) == (2, 1, ["18", "19"])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_step_lane_and_samples_are_named(workers):
    def body(name):
        with ss.init(lanes=4) as run, pytest.raises(NonFiniteLossError) as raised:
            JOBS[name](run)
        return str(raised.value)

    for text in run_workers(body, workers, "sharded"):
        rank = [0, 0, 1][workers - 1]
        start = f"the gradient is not finite at step 2 in lane 1 (worker {rank}), although the loss"
        assert text.startswith(start)
        assert text.endswith("its samples are 18, 19")
    # a loop cannot be computed again, so that all lanes of the worker are named
    (text, *_) = run_workers(body, workers, "inline")
    place = ["one of the lanes 0, 1, 2, 3", "one of the lanes 0, 1", "lane 1"][workers - 1]
    assert f"step 2 in {place} (worker {rank}), although" in text
    assert ("samples are" in text) == (workers == 3)


@pytest.mark.parametrize(("hosts", "workers"), [(2, 2), (2, 4), (3, 3)])
def test_gradients_that_are_sent_during_backward(hosts, workers):
    def spoiled_loss(model, batch):
        loss, scalars = plain_loss(model, batch)
        is_bad = len(batch) == 2  # lane 2
        return loss + (model["head"].weight.sum() * 0).square().sqrt() * is_bad, scalars

    def body(world):
        engine = LaneEngine(world, Config(nonfinite_loss="skip"), LANES, [CPU])
        model = model_of(engine)
        skipped = []
        for step, fn in enumerate([plain_loss, spoiled_loss, plain_loss]):
            skipped.append(backward(engine, model, step=step, loss_fn=fn).skipped)
            gradients = [parameter.grad for parameter in model.parameters()]
            assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
            assert (gradients[0] is None) == (step == 1)
            model.zero_grad()
        return [reason and reason[:36] for reason in skipped]

    expected = [None, "the gradient is not finite at step 1", None]
    assert on_hosts(hosts, workers, body) == [expected] * workers


def test_a_sum_of_finite_gradients_may_be_too_large():
    """Workers cannot tell before the exchange whether their sums cancel out."""

    def body():
        with ss.init(lanes=2) as run:
            model = run.replicate(nn.Linear(1, 1, bias=False))
            for batch in run.batches(torch.ones(2, 1), 2, epochs=1):
                with pytest.raises(NonFiniteLossError) as raised:
                    run.backward(lambda model, samples: large(model(samples)), model, batch)
            return str(raised.value)

    def large(out):
        return (out * 3e38).mean() * 2 - (out.detach() * 3e38).mean() * 2

    assert body().startswith("the gradient is not finite at step 0")
    for text in run_workers(body, 2):
        assert text.startswith("the gradient at step 0 is too large: the sum over all workers may")


def test_sizes_of_tensors():
    values = torch.tensor([1.0, -3.0])
    for bad in (math.nan, math.inf, -math.inf):
        other = torch.tensor([0.0, bad])
        assert not has_nonfinite([values, None, other]).isfinite()
        assert not has_nonfinite([values.double(), other, values.bfloat16()]).isfinite()
        assert not has_nonfinite([torch.complex(values, other)]).isfinite()
        assert not size_of_flats([values, other]).isfinite()
        assert not size_of_flats([torch.complex(values, other)]).isfinite()
        assert not size_of_many([values, None, other]).isfinite()
    assert has_nonfinite([None, values, torch.complex(values, values)]) == has_nonfinite([]) == 0
    assert size_of_many([None]) == 0
    largest = torch.finfo(torch.float32).max
    for size in (size_of_flats, size_of_many):
        assert size([values * 1e38 / 3, values]) == torch.tensor(1e38).double() / largest
    before = bits(values)
    has_nonfinite([values])
    assert bits(values) == before
