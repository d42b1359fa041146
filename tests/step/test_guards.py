from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torchmetrics
from torch import Tensor, distributed, nn
from torch.autograd import Variable, backward

import samestep as ss
from samestep.errors import LossError, OptimizerError, WorldError
from samestep.guards.metric_guard import MetricGuard
from samestep.guards.reach import Reach
from samestep.step.guards import ManualGradients, check_same_call
from samestep.step.lane_pass import LossSpec
from tests.workers import run_workers


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


def in_a_lane(call):
    """Make a call in a loss function, in the model and in `embed`; return the messages."""
    messages = []
    with ss.init(lanes=2, process_group=True) as run:
        model = run.replicate(nn.Linear(1, 1))

        def called(model, batch):
            call(run)
            return model(batch)

        def loss_fn(model, batch):
            return model(batch).mean()

        hook = model.register_forward_hook(lambda *_: call(run))
        (batch,) = run.batches(torch.ones(2, 1), 2)
        for arguments in (
            {"loss_fn": loss_fn},
            {"loss_fn": lambda model, rows: rows.mean(), "embed": called},
            {"loss_fn": lambda model, rows: called(model, rows).mean(), "embed": called},
        ):
            with pytest.raises(LossError) as caught:
                run.backward(arguments.pop("loss_fn"), model, batch, **arguments)
            messages.append(str(caught.value).partition(" was called in a lane, by the loss")[0])
            hook.remove()
        call(run)  # outside, it may
    return set(messages)


def test_collectives_in_a_lane_are_refused():
    def body():
        return [
            in_a_lane(lambda run: distributed.all_reduce(torch.ones(1))),
            in_a_lane(lambda run: run.all_gather(1)),
            in_a_lane(lambda run: run.barrier("waiting")),
        ]

    expected = [{"torch.distributed.all_reduce"}, {"run.all_gather"}, {"run.barrier"}]
    for workers in (1, 2):
        assert run_workers(body, workers) == [expected] * workers


class Average:
    """A metric of no library."""

    def __init__(self):
        self.total, self.count = torch.zeros(()), 0

    def update(self, values):
        self.total += values.sum()
        self.count += len(values)

    def compute(self):
        return self.total / self.count

    def reset(self):
        self.__init__()


class Holder(nn.Linear):
    def __init__(self, metric):
        super().__init__(1, 1)
        self.metric = metric


def guarded():
    """Return a context for the lanes of a loss function and a model."""
    reach = Reach([], None)
    guard = MetricGuard(reach)

    @contextmanager
    def lanes(loss_fn, model):
        lane_pass = SimpleNamespace(loss=LossSpec(loss_fn, model), seed=(1, 0))
        reach.begin(lane_pass)
        guard.begin(lane_pass)
        del lane_pass, loss_fn
        yield
        reach.report()
        guard.report()

    return lanes


@pytest.mark.parametrize("where", ["a closure", "the model"])
@pytest.mark.parametrize(
    "make", [Average, torchmetrics.SumMetric, torchmetrics.CatMetric, torchmetrics.MeanMetric]
)
def test_a_metric_that_a_loss_function_updates_is_refused(make, where):
    metric = make()
    model = Holder(metric if where == "the model" else None)

    def loss_with_a_closure(model, batch):
        metric.update(batch)

    def loss_with_a_model(model, batch):
        model.metric.update(batch)

    loss_fn = loss_with_a_closure if where == "a closure" else loss_with_a_model
    name = "loss_fn: metric" if where == "a closure" else "model.metric"
    message = f"the loss function updated {name}, a {make.__name__}: .* logits.argmax"
    lanes = guarded()
    with lanes(loss_fn, model):
        pass
    metric.update(torch.ones(3))  # in the body of the loop
    for _ in range(2):
        with pytest.raises(LossError, match=message), lanes(loss_fn, model):
            loss_fn(model, torch.ones(3))


def test_loss_functions_of_any_kind_are_searched_and_not_kept():
    @dataclass  # not hashable
    class Loss:
        weight: float

        def __call__(self, model, batch):
            return batch

    lanes = guarded()
    tensors = [torch.ones(1) for _ in range(40)]
    kept = [ref(tensor) for tensor in tensors]
    while tensors:
        for loss_fn in (Loss(1.0), partial(Loss(1.0), tensors.pop())):
            with lanes(loss_fn, None):
                pass
    del loss_fn
    assert all(reference() is None for reference in kept)


def test_values_of_a_metric_may_be_read_in_a_loss():
    metric = Average()
    metric.update(torch.ones(3))
    with guarded()(lambda model, batch: metric.compute(), None):
        metric.compute()
