from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from samestep.errors import LossError
from samestep.step.gradients import ModuleParameters, add_gradients, take_gradients
from tests.bits import bits


def test_missing_gradients_count_as_zeros():
    ones, zeros = torch.ones(2), torch.tensor([-0.0, 0.0])
    assert add_gradients([None, None], [None, None]) == [None, None]
    left, right, both = add_gradients(
        [ones.clone(), None, ones.clone()], [None, zeros.clone(), ones.clone()]
    )
    assert bits(left) == bits(ones)
    assert bits(right) == bits(torch.zeros(2))
    assert bits(both) == bits(2 * ones)


def test_taking_gradients_clears_them():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    (3 * parameters[0]).sum().backward()
    gradients = take_gradients(parameters)
    assert gradients[0].tolist() == [3, 3]
    assert gradients[1] is None
    assert parameters[0].grad is None
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        LossError, match=r"a parameter of shape \(4, 2\) has a sparse gradient.*use sparse=False"
    ):
        take_gradients([embedding.weight])


def ids(parameters):
    return [id(parameter) for parameter in parameters]


def test_a_frozen_added_shared_or_replaced_parameter_is_noticed():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    cached = ModuleParameters()

    def agrees():
        return ids(cached.trainable(module)) == ids(
            parameter for parameter in module.parameters() if parameter.requires_grad
        )

    assert agrees()
    assert len(cached.trainable(module)) == 4
    module[0].weight.requires_grad_(requires_grad=False)
    assert agrees()
    assert len(cached.trainable(module)) == 3
    module[1].append(nn.Linear(2, 3))
    assert agrees()
    module[1][0] = nn.Linear(2, 2)
    assert agrees()
    module[1][0].weight = module[0].weight
    assert agrees()
    module[0].bias = None
    assert agrees()
    module.scale = nn.Parameter(module[0].weight.detach().clone())
    assert agrees()
    assert len(cached.trainable(module)) == 4
    assert cached.trainable(module) is cached.trainable(module)
    module.scale = None
    del module[:]
    assert agrees()
    assert cached.trainable(module) == []


def test_a_module_is_not_kept_alive():
    module, cached = nn.Linear(2, 2), ModuleParameters()
    cached.trainable(module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
