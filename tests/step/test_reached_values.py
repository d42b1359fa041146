"""What a loss function and its model reach is compared, as far as kernels can depend on it."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from samestep.step.reached_values import GeneratorStates, ReachedValues

WEIGHT = 0.5


class Loss:
    factor = 1.0

    def __init__(self):
        self.weight, self.table, self.kept = 0.1, {"a": 1}, []
        self.options = SimpleNamespace(depth=2)
        self.target, self.scalar = torch.zeros(30), torch.tensor(1.0)
        self.array = np.zeros(3)

    def __call__(self, model, batch):
        return model(batch).sum() * WEIGHT * self.weight


def set_global(value):
    globals()["WEIGHT"] = value


def closing_over(cell):
    """Return a loss function that reads a variable, and a function that sets it."""
    weight = cell

    def loss_fn(model, batch):
        return model(batch).sum() * weight

    def put(value):
        nonlocal weight
        weight = value

    return loss_fn, put


CHANGES = {
    "loss_fn.weight, from 0.1 to 0.2": lambda loss, _: setattr(loss, "weight", 0.2),
    "loss_fn.table.a, from 1 to True": lambda loss, _: loss.table.update(a=True),
    "loss_fn.table.a, from 1 to 1.0": lambda loss, _: loss.table.update(a=1.0),
    "loss_fn.table.a, from 1 to 2": lambda loss, _: loss.table.update(a=2),
    "the length of loss_fn.table": lambda loss, _: loss.table.update(b=2),
    "the length of loss_fn.kept": lambda loss, _: loss.kept.append(1),
    "loss_fn.options.depth, from 2 to 3": lambda loss, _: setattr(loss.options, "depth", 3),
    "loss_fn.target": lambda loss, _: setattr(loss, "target", torch.zeros(30)),
    "loss_fn.scalar": lambda loss, _: loss.scalar.fill_(2.0),
    "Loss.factor, from 1.0 to 2.0": lambda loss, _: setattr(Loss, "factor", 2.0),
    "WEIGHT, from 0.5 to 0.7": lambda loss, _: set_global(0.7),
    "model.1.p, from 0.5 to 0.6": lambda _, model: setattr(model[1], "p", 0.6),
    "model.1.training, from True to False": lambda _, model: model[1].eval(),
    "model.0.weight": lambda _, model: model[0].weight.requires_grad_(requires_grad=False),
    "model.0.bias": lambda _, model: setattr(model[0].bias, "data", torch.zeros(40)),
}


@pytest.fixture
def values():
    """Yield a loss function, a model and the values that they reach."""
    loss, model = Loss(), nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5))
    yield loss, model, ReachedValues(loss_fn=loss, model=model)
    set_global(0.5)
    Loss.factor = 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name, values):
    loss, model, reached = values
    before = reached.marks
    assert reached.is_same()
    CHANGES[name](loss, model)
    assert not reached.is_same()
    assert name in reached.difference(before)
    assert reached.is_same()


def test_a_zero_has_a_sign(values):
    loss, _, reached = values
    loss.weight = 0.0
    assert not reached.is_same()
    before = reached.marks
    loss.weight = -0.0
    assert not reached.is_same()
    assert reached.difference(before) == "loss_fn.weight, from 0.0 to -0.0"


@pytest.mark.parametrize("after", [torch.tensor(-0.0), torch.tensor(0), torch.tensor([0.0])])
def test_a_scalar_tensor_of_the_host_has_bits_a_dtype_and_a_shape(after, values):
    loss, _, reached = values
    loss.weight = zero = torch.tensor(0.0)
    assert not reached.is_same()
    loss.weight = torch.tensor(0.0)  # the same for a kernel, which gets its value
    assert reached.is_same()
    loss.weight = after
    assert not reached.is_same()
    loss.weight = zero
    assert not reached.is_same()
    zero.neg_()
    assert not reached.is_same()


def test_a_tensor_has_a_dtype_and_strides_at_its_address(values):
    loss, _, reached = values
    memory = torch.zeros(8, 8)
    for other in (memory, memory.view(torch.int32), memory.T, memory.view(64)):
        loss.weight = other
        assert not reached.is_same()


def test_what_kernels_read_themselves_may_change(values):
    loss, model, reached = values
    loss.target.fill_(1.0)  # its address is the same
    with torch.no_grad():
        model[0].weight.add_(1.0)
    loss.weight = float("0.1")  # an equal number, another object
    assert reached.is_same()


def test_closures_and_partial_functions_are_searched():
    loss_fn, put = closing_over(1.0)
    reached = ReachedValues(loss_fn=partial(loss_fn), model=None)
    before = reached.marks
    put(2.0)
    assert not reached.is_same()
    assert reached.difference(before) == "weight, from 1.0 to 2.0"


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "Python's random"),
        (np.random.rand, "numpy.random"),
        (lambda: torch.rand(()), "torch's generator of the CPU"),
    ],
)
def test_draws_are_named(draw, name):
    states = GeneratorStates(loss_fn=None)
    assert states.moved() is None
    draw()
    assert states.moved() == name


def test_draws_of_an_own_generator_are_named():
    loss = Loss()
    loss.generator = torch.Generator()
    states = GeneratorStates(loss_fn=loss)
    torch.rand((), generator=loss.generator)
    assert states.moved() == "loss_fn.generator"
