"""float16 with a GradScaler: all workers agree on overflows, also of slices."""

from __future__ import annotations

import pytest
import torch

import samestep as ss
from tests.gpu.test_same_bits import moved
from tests.jobs import Net, classify, fingerprint, images


def trained(options, *, fused, shards=True, steps=4):
    """Train with an overflow in one element of the gradient in the second of the steps."""
    with ss.init(lanes=4, timeout=60, precision="float16", **options) as run:
        torch.manual_seed(0)
        model = run.replicate(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        if shards:
            run.shard(optimizer)
        scaler = run.grad_scaler(init_scale=1024.0, growth_interval=2)
        run.track(model=model, optimizer=optimizer, scaler=scaler)

        def loss_fn(model, batch):
            loss, metrics = classify(model, batch)
            # one element, which is in the slice of one worker
            return scaler.scale(loss + poisoned(model.head.bias, run.step == 1)), metrics

        scales = []
        for batch in run.batches(images(64), 16, steps=steps):
            run.backward(loss_fn, model, batch)
            if not fused:
                scaler.unscale_(optimizer)
                run.clip_grad_norm(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return fingerprint(moved(model.state_dict())), scales


class Poison(torch.autograd.Function):
    """Zero, with an infinite gradient of the last element."""

    @staticmethod
    def forward(ctx, bias, is_on):
        ctx.is_on = is_on
        return bias.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        values = torch.zeros(10, device=gradient.device)
        if ctx.is_on:
            values[-1:].fill_(torch.inf)  # an assignment waits for the device
        return values, None


def poisoned(bias, is_on):
    return Poison.apply(bias, is_on)


def trained_unfused(options):
    return trained(options, fused=False)


def trained_fused(options):
    return trained(options, fused=True)


def trained_unsharded(options):
    return trained(options, fused=True, shards=False)


@pytest.mark.parametrize(
    "job",
    [
        trained_fused,
        pytest.param(trained_unfused, marks=pytest.mark.long),
        pytest.param(trained_unsharded, marks=pytest.mark.long),
    ],
)
def test_workers_agree_on_overflows(job, gpus):
    expected = gpus.call(job, {})
    assert expected[1] == [1024.0, 512.0, 512.0, 1024.0]
    assert gpus.workers(2, job, {}) == [expected] * 2
