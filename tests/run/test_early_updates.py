"""Between two hosts, parameters are updated while the gradients of others arrive."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.step import exchange
from tests.bits import bits
from tests.workers import run_workers

APART = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each worker is a host


def nothing(run, model, optimizer, again):
    optimizer.step()


def clipped(run, model, optimizer, again):
    run.clip_grad_norm(model, 0.01)
    optimizer.step()


def accumulated(run, model, optimizer, again):
    again()
    optimizer.step()


def discarded(run, model, optimizer, again):
    optimizer.zero_grad()
    again()
    optimizer.step()


def zeroed(run, model, optimizer, again):
    optimizer.zero_grad(set_to_none=False)
    again()
    optimizer.step()


def partly_cleared(run, model, optimizer, again):
    model[0].weight.grad = None
    optimizer.step()


def partly_accumulated(run, model, optimizer, again):
    optimizer.zero_grad()
    again(model[4])
    again()
    model[4].weight.grad = None  # the only gradient that does not arrive in the step
    optimizer.step()


def read(run, model, optimizer, again):
    run.log_histogram("gradients", model, grad=True)
    optimizer.step()


def skipped(run, model, optimizer, again):
    if run.step == 1:
        optimizer.zero_grad()
    else:
        optimizer.step()


def with_closure(run, model, optimizer, again):
    optimizer.zero_grad()
    optimizer.step(lambda: (again(), 0.0)[1])


def with_hook(run, model, optimizer, again):
    def halve(optimizer, *_):
        for group in optimizer.param_groups:
            group["lr"] /= 2

    handle = optimizer.register_step_pre_hook(halve)
    optimizer.step()
    handle.remove()


def scaled(run, model, optimizer, again):
    scaler = run.grad_scaler(init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def frozen_later(run, model, optimizer, again):
    optimizer.step()
    model[1].requires_grad_(requires_grad=False)


# buckets in the first step that are updated one by one
EARLY = dict.fromkeys(
    [nothing, discarded, zeroed, partly_cleared, skipped, with_hook, frozen_later], 5
)
EARLY[partly_accumulated] = 4


def train(between, exchange_dtype):
    """Return the bits of the parameters after each step, and the updates made in each."""
    limit = 350 if exchange_dtype else 700  # a weight and a bias
    exchange.LEAST_BUCKET_BYTES = exchange.BUCKET_BYTES = limit
    torch.manual_seed(0)
    with ss.init(lanes=2, dir=None, exchange_dtype=exchange_dtype) as run:
        model = run.replicate(nn.Sequential(*(nn.Linear(12, 12) for _ in range(5))))
        named = dict(model.named_parameters())
        groups = [
            {"params": [parameter for name, parameter in named.items() if "weight" in name]},
            {
                "params": [parameter for name, parameter in named.items() if "bias" in name],
                "weight_decay": 0,
            },
        ]
        optimizer = run.shard(torch.optim.AdamW(groups, lr=0.1, fused=True))
        run.track(model=model, optimizer=optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        updates, after = [], []
        inner = torch.optim.AdamW.step.__wrapped__

        def counted(self, *arguments):
            updates[-1] += 1
            return inner(self, *arguments)

        torch.optim.AdamW.step.__wrapped__ = counted
        for batch in run.batches(torch.randn(12, 12), 4, epochs=1):

            def again(update=None, batch=batch):
                run.backward(
                    lambda net, inputs: net(inputs).square().mean(), model, batch, update=update
                )

            updates.append(0)
            run.backward(lambda net, inputs: net(inputs).square().mean(), model, batch)
            between(run, model, optimizer, again)
            optimizer.zero_grad()
            scheduler.step()
            after.append([bits(parameter) for parameter in model.parameters()])
        torch.optim.AdamW.step.__wrapped__ = inner
        return after, updates


BETWEEN = [
    nothing,
    clipped,
    accumulated,
    discarded,
    zeroed,
    partly_cleared,
    partly_accumulated,
    read,
    skipped,
    with_closure,
    with_hook,
    scaled,
    frozen_later,
]
# `make test-long` has the others
IN_32_BITS = [nothing, clipped, accumulated, skipped, with_closure]
IN_16_BITS = [accumulated, partly_cleared]


@pytest.mark.parametrize(
    ("between", "exchange_dtype"),
    [
        *(
            pytest.param(between, None, marks=[pytest.mark.long] * (between not in IN_32_BITS))
            for between in BETWEEN
        ),
        *(
            pytest.param(
                between, "bfloat16", marks=[pytest.mark.long] * (between not in IN_16_BITS)
            )
            for between in BETWEEN
        ),
    ],
)
def test_updates_before_the_last_gradients_change_no_bit(between, exchange_dtype):
    ((expected, _),) = run_workers(train, 1, between, exchange_dtype)
    outcomes = run_workers(train, 2, between, exchange_dtype, environment=APART)
    for after, updates in outcomes:
        assert after == expected
        assert updates[0] == EARLY.get(between, 1) - 1
