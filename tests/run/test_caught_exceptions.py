"""Programs that catch an exception of a backward call and go on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.errors import NonFiniteLossError, WorldError
from tests.bits import bits
from tests.workers import WorkerFailedError, run_workers

APART = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each worker is a host
FAILS = 2  # this call of each step fails, unless it succeeds with the same loss
LAYERS = 5
PLACES = "forward", "backward", "NaN"
SHARD = False, True


class LaneError(Exception):
    pass


def fail(*_):
    raise LaneError


def train(place, *, shard, failing=range(4), lanes=4):
    """Return the bits after each step of two backward calls, between which one fails.

    The `failing` workers do so in "forward" or "backward", or have a loss that is "NaN".
    """
    torch.manual_seed(0)
    after, caught = [], 0
    with ss.init(lanes=lanes, dir=None, timeout=30) as run:
        layers = [nn.Linear(16, 16) for _ in range(LAYERS)]
        layers[1] = nn.BatchNorm1d(16)
        model = run.replicate(nn.Sequential(*layers))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        optimizer = run.shard(optimizer) if shard else optimizer
        run.track(model=model, optimizer=optimizer)

        def loss(net, batch):
            return net(batch).square().mean()

        def failing_loss(net, batch):
            if run.rank in failing and place == "forward":
                fail()
            half = net[: LAYERS // 2](batch)
            if run.rank in failing and place == "backward":
                half.register_hook(fail)
            return net[LAYERS // 2 :](half).mean() * (float("nan") if place == "NaN" else 1.0)

        for batch in run.batches(torch.randn(24, 16), 8, epochs=1):
            for call in (1, FAILS, 3):
                try:
                    run.backward(failing_loss if call == FAILS else loss, model, batch)
                except (LaneError, NonFiniteLossError):
                    caught += 1
            optimizer.step()
            optimizer.zero_grad()
            after.append([caught, *map(bits, model.state_dict().values())])
    return after


def train_all():
    """Return what `train` does for each place and with each kind of optimizer."""
    return [train(place, shard=shard) for shard in SHARD for place in PLACES]


def test_a_call_that_fails_on_all_workers_leaves_gradients_and_buffers_as_they_were():
    (expected,) = run_workers(train_all, 1)
    for caught in ([number for number, *_ in steps] for steps in expected):
        assert caught == [1, 2, 3]  # the fault happened
    assert all(steps == expected[0] for steps in expected)
    assert run_workers(train_all, 2) == [expected] * 2
    assert run_workers(train_all, 2, environment=APART) == [expected] * 2


def train_two():
    """Return the bits of a model whose gradients were cleared before a call for another failed."""
    torch.manual_seed(0)
    with ss.init(lanes=2, dir=None) as run:
        models = [run.replicate(nn.Linear(16, 16)) for _ in range(2)]
        optimizers = [run.shard(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
        before = bits(models[0].weight)
        for batch in run.batches(torch.randn(8, 16), 8, epochs=1):
            run.backward(lambda net, inputs: net(inputs).square().mean(), models[0], batch)
            models[0].zero_grad()
            with pytest.raises(LaneError):
                run.backward(fail, models[1], batch)
            for optimizer in optimizers:
                optimizer.step()
        return before == bits(models[0].weight)


def test_a_call_that_fails_does_not_bring_back_gradients_of_another_model():
    for workers in (1, 2):
        assert run_workers(train_two, workers) == [True] * workers


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_call_that_fails_on_one_worker_alone_ends_the_run(place):
    with pytest.raises(WorkerFailedError, match=r"worker 1 went on after an exception") as caught:
        run_workers(lambda: train(place, shard=True, failing={1}), 2)
    assert isinstance(caught.value.__cause__, WorldError)


@pytest.mark.parametrize("failing", [{1}, {0, 1}])
def test_a_call_that_fails_in_the_last_lane_of_a_host_ends_the_run(failing):
    def body():
        return train("backward", shard=True, failing=failing, lanes=2)

    with pytest.raises(WorkerFailedError, match=r"sent to other hosts, so this worker cannot"):
        run_workers(body, 2, environment=APART)


def test_nor_does_the_run_go_on_with_other_parameters():
    def body():
        torch.manual_seed(0)
        with ss.init(lanes=2, dir=None, timeout=30) as run:
            models = [run.replicate(nn.Sequential(nn.Linear(16, 16), nn.ReLU())) for _ in range(2)]

            def failing_loss(net, batch):
                hidden = net(batch)
                if run.rank == 1:  # the other one has sent gradients by then
                    hidden.register_hook(fail)
                return hidden.square().mean()

            for batch in run.batches(torch.randn(8, 16), 8, epochs=1):
                if run.rank == 0:
                    models[0][0].weight.register_hook(fail)
                with pytest.raises(LaneError):
                    run.backward(failing_loss, models[0], batch)
                run.backward(lambda net, inputs: net(inputs).square().mean(), models[1], batch)

    with pytest.raises(WorkerFailedError, match=r"sent to other hosts, so this worker cannot"):
        run_workers(body, 2, environment=APART)
