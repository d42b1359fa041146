"""A guard that is no part of samestep: what it needs to know is imported here."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from samestep.config import Config
from samestep.data.batch import Batch
from samestep.data.nested import tensors_in
from samestep.errors import LossError
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import LossSpec, StepPlugin
from tests.bits import bits
from tests.worlds import in_processes

LANES = 4


class BatchGuard(StepPlugin):
    """Refuses a loss function that changes its batch in place, on all workers."""

    def __init__(self):
        self.changed, self.ended = [], 0

    @contextmanager
    def lane(self, lane_pass, lane, batch):
        before = [(name, tensor, tensor._version) for name, tensor in tensors_in(batch)]
        yield
        self.changed += [
            f"tensor {name} of lane {lane}"
            for name, tensor, version in before
            if tensor._version != version
        ]

    def report(self):
        changed, self.changed = self.changed, []
        return lambda: changed

    def compare(self, reports):
        if all_changed := [text for report in reports for text in report]:
            raise LossError(f"the loss function changed {', '.join(all_changed)}")

    def end(self, result):
        self.ended += 1


def rows(lane):
    return [torch.ones(2, 3), torch.full((2, 1), float(lane))]


def mean_loss(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def loss_that_changes_lane_2(model, batch):
    loss = mean_loss(model, batch)
    if batch[1][0, 0] == 2:
        batch[1].zero_()
    return loss


def train(world):
    torch.manual_seed(0)
    model, guard = nn.Linear(3, 1), BatchGuard()
    engine = LaneEngine(world, Config(), LANES, [torch.device("cpu")])
    engine.add(model)
    engine.use([guard])
    backwards = []
    for step, loss_fn in enumerate([mean_loss, loss_that_changes_lane_2]):
        batch = Batch(0, engine.own, [2] * LANES, map(rows, engine.own))
        try:
            engine.backward(LossSpec(loss_fn, model), batch, model, (step,), dict)
        except LossError as error:
            backwards.append(str(error))
        backwards.append(bits(model.weight.grad))
    return backwards, guard.ended


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_guard_of_ones_own_refuses_a_step_on_all_workers(workers):
    first, *others = in_processes(workers, train)
    gradient, error, gradient_after = first[0]
    assert error == "the loss function changed tensor 1 of lane 2"
    assert gradient_after == gradient
    assert first[1] == 1
    assert all(other == first for other in others)
