"""Gradients that are kept, cleared early or made in nested passes, at any number of workers."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.errors import LossError
from tests.bits import bits
from tests.workers import WorkerFailedError, run_workers

APART = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each worker is a host
WIDTH = 256  # of layers whose gradients are copied during backward


def squared(model, batch):
    return model(batch).square().mean()


def layers(width=16):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def train(step, model, *, shard=True, samples=12, directory=None):
    """Return the bits of the parameters after each step that `step` makes."""
    after = []
    with ss.init(lanes=2, dir=directory) as run:
        width = model[0].in_features
        run.replicate(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if shard:
            run.shard(optimizer)
        scaler = run.grad_scaler(init_scale=4.0)
        run.track(model=model, optimizer=optimizer, scaler=scaler)
        for batch in run.batches(torch.randn(samples, width), 4, epochs=1):
            step(run, model, optimizer, scaler, batch)
            optimizer.zero_grad()
            after.append([scaler.get_scale(), *map(bits, model.parameters())])
    return after


def with_kept_gradients(run, model, optimizer, scaler, batch):
    run.backward(squared, model, batch)
    kept = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad()
    run.backward(lambda net, inputs: 3 * net(inputs).mean(), model, batch)
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad -= gradient
    optimizer.step()


@pytest.mark.parametrize(
    "exchange_dtype", ["none", pytest.param("bfloat16", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("width", [16, pytest.param(WIDTH, marks=pytest.mark.long)])
def test_a_gradient_that_is_kept_stays_as_it_is(width, exchange_dtype):
    def body():
        return train(with_kept_gradients, layers(width), shard=False)

    environment = {} if exchange_dtype == "none" else {"SAMESTEP_EXCHANGE_DTYPE": exchange_dtype}
    (expected,) = run_workers(body, 1, environment=environment)
    assert run_workers(body, 2, environment=environment) == [expected] * 2
    assert run_workers(body, 2, environment=environment | APART) == [expected] * 2


def with_histogram(run, model, optimizer, scaler, batch):
    run.backward(squared, model, batch)
    model[0].weight.grad = model[2].weight.grad = None
    run.log_histogram("gradients", model, grad=True)
    optimizer.step()


@pytest.mark.long
def test_a_histogram_may_be_logged_after_a_gradient_was_cleared(tmp_path):
    (expected,) = run_workers(lambda: train(with_histogram, layers(), directory=tmp_path / "1"), 1)
    outcomes = run_workers(lambda: train(with_histogram, layers(), directory=tmp_path / "2"), 2)
    assert outcomes == [expected] * 2


def with_infinite_gradient(run, model, optimizer, scaler, batch):
    run.backward(lambda net, inputs: scaler.scale(squared(net, inputs)), model, batch)
    model[0].bias.grad = None
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def infinite_layers():
    model = layers()
    model[0].bias.register_hook(lambda gradient: gradient + math.inf)
    return model


@pytest.mark.long
def test_a_cleared_gradient_is_not_checked_for_infinities():
    def body():
        return train(with_infinite_gradient, infinite_layers())

    (expected,) = run_workers(body, 1)
    assert [scale for scale, *_ in expected] == [4.0] * 3
    assert run_workers(body, 2) == [expected] * 2


def with_scaler(run, model, optimizer, scaler, batch):
    run.backward(lambda net, inputs: scaler.scale(squared(net, inputs)), model, batch)
    scaler.step(optimizer)
    scaler.update()


def test_a_worker_may_have_no_samples_to_scale():
    (expected,) = run_workers(lambda: train(with_scaler, layers(), samples=1), 1)
    assert run_workers(lambda: train(with_scaler, layers(), samples=1), 2) == [expected] * 2


class Recomputed(torch.autograd.Function):
    """Computes a layer again in backward, and adds to the gradients of its parameters."""

    @staticmethod
    def forward(context, inputs, layer):
        context.layer = layer
        context.save_for_backward(inputs)
        return layer(inputs)

    @staticmethod
    def backward(context, gradient):
        (saved,) = context.saved_tensors
        inputs = saved.detach().requires_grad_()
        with torch.enable_grad():
            outputs = context.layer(inputs)
        torch.autograd.backward(outputs, gradient)
        return inputs.grad, None


def recomputed_twice(model, batch):
    outputs = model[0](model[1](batch))
    for layer in (model[0], model[2], model[0]):
        outputs = Recomputed.apply(outputs, layer)
    return outputs.square().mean()


@pytest.mark.parametrize("environment", [pytest.param({}, marks=pytest.mark.long), APART])
def test_nested_backward_passes_add_to_a_gradient(environment):
    def step(run, model, optimizer, scaler, batch):
        run.backward(recomputed_twice, model, batch)
        optimizer.step()

    def body():
        return train(step, layers(WIDTH), shard=False)

    (expected,) = run_workers(body, 1)
    assert run_workers(body, 2, environment=environment) == [expected] * 2


def recomputed_before(model, batch):
    return model[2](Recomputed.apply(model[1](batch), model[2])).square().mean()


def test_a_nested_pass_after_a_gradient_was_copied_is_an_error():
    def step(run, model, optimizer, scaler, batch):
        run.backward(recomputed_before, model, batch)

    with pytest.raises(WorkerFailedError, match=r"called backward\(\) itself and added") as caught:
        run_workers(lambda: train(step, layers(WIDTH), shard=False), 2)
    assert isinstance(caught.value.__cause__, LossError)


def test_a_sparse_gradient_is_an_error_with_its_reason_on_several_hosts():
    def body():
        with ss.init(lanes=2, dir=None) as run:
            model = run.replicate(nn.Embedding(9, 2, sparse=True))
            for batch in run.batches(torch.arange(8), 4, epochs=1):
                run.backward(squared, model, batch)

    for environment in ({}, APART):
        with pytest.raises(WorkerFailedError, match=r"has a sparse gradient.*use sparse=False"):
            run_workers(body, 2, environment=environment)


@pytest.mark.parametrize(
    "environment", [{}, pytest.param(APART, marks=pytest.mark.long)], ids=["one host", "two hosts"]
)
def test_a_model_is_freed_after_its_run(environment):
    def body():
        models = []
        for _ in range(2):
            with ss.init(lanes=2, dir=None) as run:
                model = run.replicate(layers(WIDTH))
                optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
                for batch in run.batches(torch.randn(8, WIDTH), 4, epochs=1):
                    run.backward(squared, model, batch)
                    optimizer.step()
                    optimizer.zero_grad()
                models.append(weakref.ref(model))
            del model, optimizer, run, batch
            gc.collect()
        return [model() is None for model in models]

    assert run_workers(body, 2, environment=environment) == 2 * [[True, True]]
