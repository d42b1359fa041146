from __future__ import annotations

import pytest
import torch
from torch import nn

from samestep.comm.base import Alone
from samestep.errors import ModelError
from samestep.step.replicate import LARGE_BYTES, replicate
from tests.bits import digest
from tests.worlds import in_processes

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


def test_every_worker_has_what_rank_zero_has():
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


DIFFERENCES = {
    r"'0.weight' is torch.float32 \(2, 3\), trained on worker 0 and torch.float32 \(2, 4\), trained on worker 1": (
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
    r"'0.weight' is torch.float32 \(2, 3\), trained on worker 0 and torch.float64 \(2, 3\), trained": (
        linear,
        lambda: linear(dtype=torch.float64),
    ),
    r"'1.running_mean' is torch.float32 \(2,\) on worker 0 and missing on worker 1": (
        linear,
        lambda: linear()[:1].append(nn.LayerNorm(2)),
    ),
    r"'0.weight' is torch.float32 \(2, 3\), trained on worker 0 and torch.float32 \(2, 3\) on worker 1": (
        linear,
        lambda: linear().requires_grad_(requires_grad=False),
    ),
    r"worker 1 has its parameters in another order than worker 0": (in_order, in_another_order),
}


def test_models_that_differ_are_an_error_on_every_worker():
    """Worker 2 has what worker 0 has, and must fail too."""

    def body(world):
        told = []
        for first, other in DIFFERENCES.values():
            with pytest.raises(ModelError, match="models differ between workers") as caught:
                replicate(other() if world.rank == 1 else first(), CPU, world)
            told.append(str(caught.value))
        return told

    for told in in_processes(3, body):
        for message, expected in zip(told, DIFFERENCES, strict=True):
            with pytest.raises(ModelError, match=expected):
                raise ModelError(message)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_is_no_model_or_has_no_shapes_is_refused():
    with pytest.raises(
        ModelError, match=r"run.replicate was given function; expected a torch.nn.Module"
    ):
        replicate(linear, CPU, Alone())
    with pytest.raises(
        ModelError, match="parameter 'weight' has no shape yet; run the model once on a sample"
    ):
        replicate(nn.LazyLinear(3), CPU, Alone())
    replicate(nn.ReLU(), CPU, Alone())
