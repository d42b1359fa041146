from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.comm.base import Alone
from samestep.errors import ModelError
from samestep.step.replicas import LARGE_BYTES, WRAPPERS, Replicas, replicate
from tests.bits import digest
from tests.worlds import in_processes

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
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
def test_devices_get_all_lanes_once_and_in_order(devices, start, more):
    all_lanes = range(start, start + devices + more)
    dealt = [replica.lanes for replica in Replicas([CPU] * devices, all_lanes).all]
    assert [lane for lanes in dealt for lane in lanes] == list(all_lanes)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_every_tensor_has_a_replica_and_tied_ones_stay_tied():
    module = Tied()
    replicas = replicas_of(module, module.first, devices=3)
    stand_ins = [standing_in(module)]
    for replica in replicas.all[1:]:
        with replicas.on(replica):
            stand_ins.append(standing_in(module))
            assert module.second.weight is module.first.weight
    assert standing_in(module) == stand_ins[0]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert not set(stand_ins[first].values()) & set(stand_ins[second].values())


def test_replicas_are_found_by_the_original_parameters():
    module = Tied()
    replicas = replicas_of(module)
    parameters = list(module.parameters())
    assert all(a is b for a, b in zip(replicas.all[0].of(parameters), parameters, strict=True))
    with replicas.on(replicas.all[1]):
        assert all(
            a is b for a, b in zip(replicas.all[1].of(parameters), module.parameters(), strict=True)
        )


def test_refresh_copies_values_and_requires_grad():
    module = Tied()
    replicas = replicas_of(module)
    with torch.no_grad():
        module.first.weight.fill_(2.0)
        module.norm.running_mean.fill_(3.0)
    module.first.bias.requires_grad = False
    replicas.refresh()
    with replicas.on(replicas.all[1]):
        assert module.second.weight.eq(2.0).all()
        assert module.norm.running_mean.eq(3.0).all()
        assert [
            parameter.requires_grad for parameter in (module.first.weight, module.first.bias)
        ] == [
            True,
            False,
        ]
        with torch.no_grad():
            module.first.weight.fill_(5.0)
    assert module.first.weight.eq(2.0).all()


def test_the_modules_own_tensors_are_restored_after_an_error():
    module = Tied()
    replicas = replicas_of(module)
    before = standing_in(module)
    with pytest.raises(RuntimeError, match="in the middle"), replicas.on(replicas.all[1]):
        raise RuntimeError("in the middle")
    assert standing_in(module) == before


def test_a_recurrent_layer_computes_with_the_tensors_of_the_device():
    layer = nn.LSTM(2, 3)
    replicas = replicas_of(layer)
    inputs = torch.randn(4, 1, 2)
    before = layer(inputs)[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()  # here, and not on the second device
    with replicas.on(replicas.all[1]):
        assert torch.equal(layer(inputs)[0], before)
    assert layer(inputs)[0].eq(0).all()


def test_a_module_that_was_not_replicated_is_on_the_first_device_only():
    module = Tied()
    replicas = replicas_of(module.first)
    assert replicas.holding(module.first) == replicas.all
    assert replicas.holding(module) == replicas.all[:1]
    assert replicas.holding({"a": module.first}) == replicas.all


def test_one_device_has_nothing_to_exchange():
    module = Tied()
    replicas = replicas_of(module, devices=1)
    before = standing_in(module)
    with replicas.on(replicas.all[0]):
        assert standing_in(module) == before


CPU = torch.device("cpu")


class Model(nn.Module):
    """Several dtypes, storage formats, tied weights and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.mixed = nn.Sequential(
            nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2, dtype=torch.float64)
        )
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.large = nn.ParameterList(
            [torch.randn(LARGE_BYTES // 8, 2), torch.randn(2, LARGE_BYTES // 8).T]
        )
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.rand(4) > 0.5)
        self.register_buffer("unsaved", torch.rand(2), persistent=False)


def model_of(rank):
    torch.manual_seed(rank)
    model = Model()
    model.norm.running_mean.fill_(rank)
    model.norm.num_batches_tracked.fill_(rank)
    return model


def tensors_of(model):
    return [*model.parameters(), *model.buffers()]


def test_every_worker_gets_the_values_of_rank_zero():
    expected = digest(tensors_of(model_of(0)))
    assert expected != digest(tensors_of(model_of(1)))

    def body(world):
        model = model_of(world.rank)
        parts = tensors_of(model)
        keys = list(model.state_dict())
        replicate(model, CPU, world)
        assert all(now is before for now, before in zip(tensors_of(model), parts, strict=True))
        assert model.head.weight is model.embedding.weight
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        assert list(model.state_dict()) == keys
        assert not model.frozen.requires_grad
        assert model.scale.requires_grad
        return digest(tensors_of(model))

    for workers in (1, 2, 3):
        assert in_processes(workers, body) == [expected] * workers


def linear(**changes):
    return nn.Sequential(
        nn.Linear(**{"in_features": 3, "out_features": 2, **changes}), nn.BatchNorm1d(2)
    )


def in_another_order():
    model = nn.Module()
    model.b, model.a = nn.Linear(2, 2), nn.Linear(2, 2)
    return model


def in_order():
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2), nn.Linear(2, 2)
    return model


SPEC = r"'0.weight' is torch.float32 \(2, 3\), trained on worker 0"
DIFFERENCES = {
    SPEC + r" and torch.float32 \(2, 4\), trained on worker 1": (
        linear,
        lambda: linear(in_features=4),
    ),
    r"'0.bias' is torch.float32 \(2,\), trained on worker 0 and missing on worker 1": (
        linear,
        lambda: linear(bias=False),
    ),
    r"'0.bias' is missing on worker 0 and torch.float32 \(2,\), trained on worker 1": (
        lambda: linear(bias=False),
        linear,
    ),
    SPEC + r" and torch.float64 \(2, 3\), trained": (
        linear,
        lambda: linear(dtype=torch.float64),
    ),
    r"'1.running_mean' is torch.float32 \(2,\) on worker 0 and missing on worker 1": (
        linear,
        lambda: linear()[:1].append(nn.LayerNorm(2)),
    ),
    SPEC + r" and torch.float32 \(2, 3\) on worker 1": (
        linear,
        lambda: linear().requires_grad_(requires_grad=False),
    ),
    r"worker 1 has its parameters in a different order than worker 0": (in_order, in_another_order),
}


def test_models_that_differ_are_an_error_on_every_worker():
    """Worker 2 has the same model as worker 0, and must fail too."""

    def body(world):
        messages = []
        for first, other in DIFFERENCES.values():
            with pytest.raises(ModelError, match="models differ between workers") as caught:
                replicate(other() if world.rank == 1 else first(), CPU, world)
            messages.append(str(caught.value))
        return messages

    for messages in in_processes(3, body):
        for message, expected in zip(messages, DIFFERENCES, strict=True):
            with pytest.raises(ModelError, match=expected):
                raise ModelError(message)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_other_objects_and_lazy_modules_are_rejected():
    with pytest.raises(ModelError, match=r"run.replicate expected a torch.nn.Module, got function"):
        replicate(linear, CPU, Alone())
    with pytest.raises(
        ModelError, match="parameter 'weight' has no shape yet; run the model once on a sample"
    ):
        replicate(nn.LazyLinear(3), CPU, Alone())
    replicate(nn.ReLU(), CPU, Alone())


def test_torchs_own_data_parallelism_is_refused():
    with pytest.raises(ModelError, match="the model is a DataParallel, but samestep itself"):
        replicate(nn.DataParallel(nn.Linear(2, 1)), CPU, Alone())
    inside = nn.Sequential(nn.Sequential(nn.DataParallel(nn.Linear(2, 1))))
    with pytest.raises(ModelError, match=r"'0.0' of the model is a DataParallel"):
        replicate(inside, CPU, Alone())
    assert {kind.__name__ for kind in (nn.DataParallel, DistributedDataParallel)} <= WRAPPERS


class Counting(nn.Module):
    """Changes a buffer in place between its layers, while autograd keeps a parameter of both."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, values):
        result = self.last(self.first(values))
        self.calls += 1
        return result


def test_a_buffer_may_change_while_backward_needs_a_parameter():
    module = Counting()
    replicas = replicas_of(module)
    replicas.refresh()
    with replicas.on(replicas.all[1]):
        module(torch.ones(2, 3)).sum().backward()
        assert module.first.weight.grad is not None
