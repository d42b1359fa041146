from __future__ import annotations

import gc
import weakref

from torch import nn

from samestep.step.gradients import ModuleParameters


def ids(parameters):
    return [id(parameter) for parameter in parameters]


def test_what_is_frozen_added_shared_or_replaced_is_seen_at_once():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    remembered = ModuleParameters()

    def agrees():
        return ids(remembered.trainable(module)) == ids(
            parameter for parameter in module.parameters() if parameter.requires_grad
        )

    assert agrees()
    assert len(remembered.trainable(module)) == 4
    module[0].weight.requires_grad_(requires_grad=False)
    assert agrees()
    assert len(remembered.trainable(module)) == 3
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
    assert len(remembered.trainable(module)) == 4


def test_a_module_is_not_kept_alive():
    module, remembered = nn.Linear(2, 2), ModuleParameters()
    remembered.trainable(module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
