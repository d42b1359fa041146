"""torch.compile with CUDA graphs of its own: what a graph returns is used before the next forward.

Neither Triton nor a GPU is there, so modules stand for compiled ones: as in torch, what they return
and their gradients are in memory that they write again once a new iteration begins.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch._inductor
from torch import nn

import samestep as ss
from tests.gpu.simulated import VISIBLE
from tests.gpu.test_same_bits import moved
from tests.jobs import fingerprint, images

TREES = "torch._inductor.cudagraph_trees"
order: list[str] = []  # of iterations that begin, and forward and backward passes
trees = ModuleType("trees")  # whose memory no search sees
trees.pool = {}  # by device, name and shape


def begin_iteration():
    order.append("begin")
    for memory in trees.pool.values():
        memory.fill_(float("nan"))


def pretend():
    """Stand for the graphs of torch.compile, which exist on each device."""
    module = ModuleType(TREES)
    container = SimpleNamespace(tree_manager=True)
    vars(module).update(get_container=lambda _: container, mark_step_begin=begin_iteration)
    sys.modules[TREES] = vars(torch._inductor)["cudagraph_trees"] = module


def in_pool(name, value):
    """Return a value in the memory of an earlier one, as a tensor that nobody else holds."""
    memory = trees.pool.setdefault((value.device, name, value.shape), torch.empty_like(value))
    memory.copy_(value)
    tensor = torch.empty(0, dtype=value.dtype, device=value.device)
    return tensor.set_(memory.untyped_storage(), 0, value.shape, value.stride())


class CompiledFunction(torch.autograd.Function):
    """A linear map, whose results are in the pool if there are graphs."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        result = inputs @ weight.T
        order.append("forward")
        return in_pool("result", result) if TREES in sys.modules else result

    @staticmethod
    def backward(ctx, gradient):
        order.append("backward")
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight = gradient @ weight, gradient.T @ inputs
        if TREES in sys.modules:
            of_weight = in_pool("gradient", of_weight)
        return of_inputs, of_weight


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(10, 64))

    def forward(self, pictures):
        return CompiledFunction.apply(pictures.flatten(1), self.weight)


def loss_of(model, batch):
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits, batch[1]), {"largest": logits.max()}


def embedded(model, batch):
    return model(batch[0])


def contrast(model, embeddings):
    return (embeddings @ embeddings.T).logsumexp(1).mean()


def compiled_contrast(model, embeddings):
    return contrast(model, CompiledFunction.apply(embeddings, model.weight[:, :10]))


def trained(with_graphs, *, lanes, inline=False, **options):
    """Train with two calls per update; return what results, and the order of the last call."""
    if with_graphs:
        pretend()
    calls = {name: options.pop(name) for name in ("embed",) if name in options}
    loss_fn, results = options.pop("loss_fn", loss_of), []
    with ss.init(lanes=lanes, timeout=60, **options) as run:
        model = run.replicate(Compiled())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in run.batches(images(32), 16, steps=2):
            for _ in range(2):  # the gradients are added
                order.clear()
                if inline:
                    for lane_batch in batch.lanes(model):
                        loss, metrics = loss_of(model, lane_batch)
                        batch.backward(loss, **metrics)
                else:
                    run.backward(loss_fn, model, batch, **calls)
            last = list(order)
            results.append([*batch.means.values()] if inline else float(model.weight.grad.sum()))
            optimizer.step()
            optimizer.zero_grad()
        scores = run.evaluate(loss_of, model, images(24), 8)
        outputs = run.broadcast(run.evaluate(embedded, model, images(24), 8, gather=True))
        results += [dict(scores), outputs, model.state_dict()]
    return fingerprint(moved(results)), last


LANE = ["forward", "backward"]
JOBS = [
    ("one lane", {"lanes": 1}, LANE),
    ("a loop over lanes", {"lanes": 2, "inline": True}, LANE * 2),
    ("two devices, 16 bits", {"lanes": 4, "devices": 2, "exchange_dtype": "bfloat16"}, LANE * 4),
    (
        "a loss of all embeddings",
        {"lanes": 2, "embed": embedded, "loss_fn": contrast},
        ["forward", "forward", *LANE * 2],
    ),
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(*job, id=name, marks=[pytest.mark.long] * ("all embeddings" not in name))
        for name, *job in JOBS
    ],
)
def test_lanes_may_be_compiled_with_cuda_graphs(options, expected, gpus):
    eager, passes = gpus.call(trained, with_graphs=False, **options)
    assert passes == expected
    result, passes = gpus.call(trained, with_graphs=True, **options)
    assert result == eager
    assert [name for name in passes if name != "begin"] == expected
    for number, name in enumerate(passes):
        if name == "forward":
            assert passes[number - 1] == "begin", passes


@pytest.mark.long
def test_last_lanes_of_workers_may_be_compiled_with_cuda_graphs(gpus):
    expected, _ = gpus.call(trained, with_graphs=False, lanes=4)
    results = gpus.workers(2, partial(trained, with_graphs=True, lanes=4), **{VISIBLE: "0,1"})
    assert [result for result, _ in results] == [expected] * 2


def refused():
    try:
        trained(with_graphs=True, lanes=2, embed=embedded, loss_fn=compiled_contrast)
    except ss.LossError as error:
        return str(error)
    return "not refused"


def test_a_loss_of_all_embeddings_is_not_compiled_with_cuda_graphs(gpus):
    assert gpus.call(refused).startswith("the loss of all embeddings is compiled in a run with")
