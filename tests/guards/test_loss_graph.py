"""Parameters that a loss uses are trained, or refused with the way to train them."""

from __future__ import annotations

import gc
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss
from samestep.errors import OptimizerError
from tests.jobs import Net, images

NO_MODULE = r"would not train a parameter of shape \[2\] that the loss uses"
OWN_BACKWARD = r"a gradient of a tensor of shape \[2\] from a backward\(\) in a lane"


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, logits, labels):
        first, second = self.weights
        return (-first).exp() * F.cross_entropy(logits, labels) + first + second.square() - second


def train(run, optimizer, loss_fn, modules, *, inline=True, steps=3, after=lambda batch: None):
    for batch in run.batches(images(24), 8, steps=steps):
        if inline:
            for lane_batch in batch.lanes(*modules):
                batch.backward(loss_fn(modules[0], lane_batch))
        else:
            run.backward(loss_fn, modules[0], batch)
        after(batch)
        optimizer.step()
        optimizer.zero_grad()


def loss_with(criterion):
    return lambda model, batch: criterion(model(batch[0]), batch[1])


def bare_parameter(run):
    weights = nn.Parameter(torch.zeros(2))

    def loss_fn(model, batch):
        return (-weights[0]).exp() * F.cross_entropy(model(batch[0]), batch[1]) + weights.sum()

    return loss_fn, [weights]


def in_a_list(run):
    weights = [torch.zeros(2, requires_grad=True)]
    loss = F.cross_entropy
    return lambda model, batch: loss(model(batch[0]) * weights[0].mean().exp(), batch[1]), weights


def criterion_alone(run):
    criterion = Criterion()
    return loss_with(criterion), [*criterion.parameters()]


def replicated_but_not_named(run):
    criterion = run.replicate(Criterion())
    return loss_with(criterion), [*criterion.parameters()]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    "make", [bare_parameter, in_a_list, criterion_alone, replicated_but_not_named]
)
def test_a_parameter_of_no_named_module_is_refused(make, inline, lanes):
    with ss.init(lanes=lanes) as run:
        model = run.replicate(Net())
        loss_fn, others = make(run)
        optimizer = torch.optim.Adam([*model.parameters(), *others], 0.01)
        run.track(model=model, optimizer=optimizer)
        with pytest.raises(OptimizerError, match=NO_MODULE):
            train(run, optimizer, loss_fn, [model], inline=inline)
        assert not any(parameter.any() for parameter in others)


def test_the_advice_trains_it():
    with ss.init(lanes=2) as run:
        model, criterion = run.replicate(Net()), run.replicate(Criterion())
        optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], 0.01)
        train(run, optimizer, loss_with(criterion), [model, criterion])
        assert criterion.weights.all()
        both = nn.ModuleList([model, criterion])

        def loss_fn(model, batch):
            return criterion(model(batch[0]), batch[1])

        for batch in run.batches(images(8), 8, steps=2, name="function"):
            run.backward(loss_fn, model, batch, update=both)
            assert criterion.weights.grad.all()
            optimizer.step()
            optimizer.zero_grad()


def test_a_temperature_with_a_backward_of_its_own_in_a_lane_is_refused():
    with ss.init(lanes=2) as run:
        model, temperature = run.replicate(Net()), nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([temperature], 0.01)

        def loss_fn(model, batch):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            (temperature * loss.detach()).sum().backward()
            return loss * temperature.detach().exp().mean()

        with pytest.raises(OptimizerError, match=OWN_BACKWARD):
            train(run, optimizer, loss_fn, [model])


def test_a_temperature_may_learn_from_the_means_of_a_batch():
    with ss.init(lanes=2) as run:
        model, temperature = run.replicate(Net()), nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([temperature], 0.01)

        def loss_fn(model, batch):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return loss * temperature.detach().exp().mean()

        def learn(batch):
            (temperature * batch.means["loss"]).sum().backward()

        train(run, optimizer, loss_fn, [model], after=learn)
        assert temperature.all()


def test_two_players_with_one_optimizer_or_two_are_accepted():
    def generate(generator, batch):
        return critic(generator(batch[0])).mean()

    def judge(critic, batch):
        return -critic(generator(batch[0]).detach()).square().mean()

    with ss.init(lanes=2) as run:
        generator, critic = run.replicate(Net()), run.replicate(nn.Linear(10, 1))
        both = torch.optim.SGD([*generator.parameters(), *critic.parameters()], 0.1)
        separate = [torch.optim.SGD(each.parameters(), 0.1) for each in (generator, critic)]
        for name, optimizers in {"one": [both, both], "two": separate}.items():
            for batch in run.batches(images(24), 8, steps=3, name=name):
                run.backward(generate, generator, batch)
                optimizers[0].step()
                both.zero_grad()
                run.backward(judge, critic, batch)
                optimizers[1].step()
                both.zero_grad()


@pytest.mark.parametrize("inline", [True, False])
def test_a_part_of_a_model_may_be_trained_by_an_optimizer_of_all(inline):
    with ss.init(lanes=2) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in run.batches(images(24), 8, steps=3):
            loss_fn = loss_with(F.cross_entropy)
            if inline:
                for lane_batch in batch.lanes(model[2]):
                    batch.backward(loss_fn(model, lane_batch))
            else:
                run.backward(loss_fn, model, batch, update=model[2])
            optimizer.step()
            optimizer.zero_grad()


def test_inputs_that_need_a_gradient_are_accepted_and_not_kept():
    seen = WeakSet()

    def loss_fn(model, batch):
        inputs = batch[0].clone().requires_grad_()
        seen.add(inputs)
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return gradient.square().mean() + model(inputs).square().mean()

    with ss.init(lanes=2) as run:
        model = run.replicate(Net())
        train(run, torch.optim.SGD(model.parameters(), 0.01), loss_fn, [model], inline=False)
        gc.collect()
        assert not seen
