"""Batches are copied ahead of the lane that uses them, in a stream of their own."""

from __future__ import annotations

import torch
from torch import nn

import samestep as ss
from samestep.data.batch import BatchCopier
from tests.jobs import classify, images


def order_of_step(lanes, devices):
    """Return in which order a step and an evaluation begin to copy batches and compute."""
    from samestep.step import replicas

    order = {}  # an evaluation may not append to a list

    class LoggedCopier(BatchCopier):
        def begin(self, batch):
            order[len(order)] = "copy"
            return super().begin(batch)

        def _begin_part(self, part):
            moved = super()._begin_part(part)
            assert moved.is_cuda
            assert torch.cuda.current_stream() != torch.cuda.default_stream()
            return moved

    def logged(model, batch):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert all(part.is_cuda for part in batch)
        order[len(order)] = "compute"
        return classify(model, batch)

    replicas.BatchCopier = LoggedCopier
    with ss.init(lanes=lanes, devices=devices, timeout=60) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        for batch in run.batches(images(16), 16, steps=1):
            run.backward(logged, model, batch)
        trained = [*order.values()]
        order.clear()
        run.evaluate(logged, model, images(16), 8)
    return trained, [*order.values()]


def test_next_batch_is_copied_while_a_lane_computes(gpus):
    ahead, last = ["copy", "copy", "compute"], ["compute"]
    in_turn = ["copy", "compute"] * 2
    assert gpus.call(order_of_step, 1, 1) == (in_turn[:2], in_turn)
    assert gpus.call(order_of_step, 4, 1) == ([*ahead, *in_turn, *last], in_turn)
    assert gpus.call(order_of_step, 4, 2) == ([*ahead, *ahead, *last, *last], in_turn)


class Named:
    """A part of a batch that moves itself."""

    def __init__(self, values):
        self.values = values

    def to(self, device, *, non_blocking):
        return Named(self.values.to(device, non_blocking=non_blocking))


def copied():
    batch = {
        "pinned": torch.ones(3).pin_memory(),
        "pageable": [torch.full((3,), 2.0)],
        "there": torch.full((3,), 3.0, device="cuda:1"),
        "moves itself": Named(torch.full((3,), 4.0).pin_memory()),
        "number": 5,
    }
    moved = BatchCopier(torch.device("cuda:1")).begin(batch)()
    tensors = [moved["pinned"], *moved["pageable"], moved["there"], moved["moves itself"].values]
    assert {str(tensor.device) for tensor in tensors} == {"cuda:1"}
    return list(moved), [*torch.stack(tensors).sum(1).tolist(), moved["number"]]


def test_parts_of_any_kind_are_copied(gpus):
    names = ["pinned", "pageable", "there", "moves itself", "number"]
    assert gpus.call(copied) == (names, [3.0, 6.0, 9.0, 12.0, 5])


def test_batches_on_the_cpu_are_not_copied():
    batch = [torch.ones(3), "text"]
    moved = BatchCopier(torch.device("cpu")).begin(batch)()
    assert moved[0] is batch[0]
