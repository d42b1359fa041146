from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samestep.step.replicas import Replicas

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)


def standing_in(module):
    return {
        name: id(tensor)
        for name, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(),
        ]
    }


def replicas_of(*modules, devices=2):
    replicas = Replicas([CPU] * devices, range(devices))
    for module in modules:
        replicas.add(module)
    return replicas


@given(devices=st.integers(1, 6), start=st.integers(0, 9), more=st.integers(0, 9))
def test_lanes_are_dealt_to_devices_once_and_in_order(devices, start, more):
    own = range(start, start + devices + more)
    dealt = [replica.lanes for replica in Replicas([CPU] * devices, own).all]
    assert [lane for lanes in dealt for lane in lanes] == list(own)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_every_tensor_has_a_replica_of_its_own_and_tied_ones_stay_tied():
    module = Tied()
    replicas = replicas_of(module, module.one, devices=3)
    there = [standing_in(module)]
    for replica in replicas.all[1:]:
        with replicas.on(replica):
            there.append(standing_in(module))
            assert module.two.weight is module.one.weight
    assert standing_in(module) == there[0]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not set(there[one].values()) & set(there[other].values())


def test_replicas_of_parameters_are_found_by_the_modules_own():
    module = Tied()
    replicas = replicas_of(module)
    own = list(module.parameters())
    assert all(a is b for a, b in zip(replicas.all[0].of(own), own, strict=True))
    with replicas.on(replicas.all[1]):
        assert all(
            a is b for a, b in zip(replicas.all[1].of(own), module.parameters(), strict=True)
        )


def test_values_are_copied_when_they_are_refreshed_and_what_requires_a_gradient_is_kept():
    module = Tied()
    replicas = replicas_of(module)
    with torch.no_grad():
        module.one.weight.fill_(2.0)
        module.norm.running_mean.fill_(3.0)
    module.one.bias.requires_grad = False
    replicas.refresh()
    with replicas.on(replicas.all[1]):
        assert module.two.weight.eq(2.0).all()
        assert module.norm.running_mean.eq(3.0).all()
        assert [parameter.requires_grad for parameter in (module.one.weight, module.one.bias)] == [
            True,
            False,
        ]
        with torch.no_grad():
            module.one.weight.fill_(5.0)
    assert module.one.weight.eq(2.0).all()


def test_the_modules_own_tensors_are_put_back_after_an_error():
    module = Tied()
    replicas = replicas_of(module)
    before = standing_in(module)
    with pytest.raises(RuntimeError, match="in the middle"), replicas.on(replicas.all[1]):
        raise RuntimeError("in the middle")
    assert standing_in(module) == before


def test_a_recurrent_layer_computes_with_the_tensors_of_the_device():
    layer = nn.LSTM(2, 3)
    replicas = replicas_of(layer)
    there = torch.randn(4, 1, 2)
    before = layer(there)[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()  # here, and not on the second device
    with replicas.on(replicas.all[1]):
        assert torch.equal(layer(there)[0], before)
    assert layer(there)[0].eq(0).all()


def test_a_module_that_was_not_replicated_is_on_the_first_device_alone():
    module = Tied()
    replicas = replicas_of(module.one)
    assert replicas.holding(module.one) == replicas.all
    assert replicas.holding(module) == replicas.all[:1]
    assert replicas.holding({"a": module.one}) == replicas.all


def test_one_device_has_nothing_to_exchange():
    module = Tied()
    replicas = replicas_of(module, devices=1)
    before = standing_in(module)
    with replicas.on(replicas.all[0]):
        assert standing_in(module) == before
