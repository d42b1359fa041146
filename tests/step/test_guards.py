from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable, backward

from samestep.errors import OptimizerError, WorldError
from samestep.step.guards import ManualGradients, check_same_call


def test_a_watched_parameter_has_no_hook_and_autograd_is_restored():
    """Hooks would cost more than everything else that is checked in a step."""
    module, manual = nn.Linear(2, 2), ManualGradients()
    engine = Variable._execution_engine
    manual.watch(module)
    assert Variable._execution_engine is not engine
    module(torch.ones(2)).sum().backward()
    assert module.weight._post_accumulate_grad_hooks is None
    manual.close()
    assert type(Variable._execution_engine) is type(engine)


@pytest.mark.parametrize("differentiate", [Tensor.backward, backward])
def test_every_way_to_call_backward_is_noticed(differentiate):
    module, manual = nn.Linear(2, 2), ManualGradients()
    optimizer = torch.optim.SGD(module.parameters())
    manual.watch(module)
    try:
        torch.autograd.grad(module(torch.ones(2)).sum(), list(module.parameters()))
        manual.check(optimizer, is_sharded=False)
        differentiate(module(torch.ones(2)).sum())
        with pytest.raises(OptimizerError, match="a gradient of 'weight' of Linear"):
            manual.check(optimizer, is_sharded=False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            differentiate(torch.ones(()))
        optimizer.zero_grad()
        manual.check(optimizer, is_sharded=False)
    finally:
        manual.close()


def test_the_worker_that_went_on_is_named():
    check_same_call([3, 3, 3])
    with pytest.raises(WorldError, match="worker 1 went on after an exception"):
        check_same_call([3, 4, 3])
