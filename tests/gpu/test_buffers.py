"""Buffers that user code writes during backward, which GPUs tell the host late."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import samestep as ss
from tests.gpu.simulated import VISIBLE
from tests.jobs import classify, images


class Counting(nn.Module):
    """Counts the backward passes through it from step `first` on."""

    def __init__(self, first=0):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.first, self.step = first, 0

    def forward(self, x):
        if self.step >= self.first:
            x.register_hook(self.count)
        return x

    def count(self, gradient):
        self.passes += 1


def counted(first, added=0, **options):
    """Count in a module that is replicated before step `added`."""
    with ss.init(lanes=2, timeout=60, **options) as run:
        counting = Counting(first)
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        head = nn.Identity()
        for step, batch in enumerate(run.batches(images(32), 8, steps=5)):
            counting.step = step
            if step == added:
                head = run.replicate(counting)

            def loss_fn(model, batch, head=head):
                return classify(lambda x: head(model(x)), batch)

            try:
                run.backward(loss_fn, model, batch)
            except ss.ModelError:
                assert step == max(first, added)
                raise
            optimizer.step()
            optimizer.zero_grad()
        return counting.passes.item()


MESSAGE = "passes' was written during backward, but not during forward"


def test_a_cpu_keeps_what_backward_writes():
    assert counted(0, device="cpu") == 5


@pytest.mark.parametrize(("first", "added"), [(0, 0), (1, 0), (0, 3)])
def test_buffer_that_only_backward_writes_is_refused_in_the_first_step(first, added, gpus):
    with pytest.raises(AssertionError, match=MESSAGE):
        gpus.call(counted, first, added)


@pytest.mark.parametrize("saves", [False, True])
def test_buffer_that_only_backward_writes_in_a_later_step_is_refused(saves, gpus, tmp_path):
    options = {"dir": tmp_path} if saves else {}
    with pytest.raises(AssertionError, match=MESSAGE):
        gpus.call(counted, 3, **options)


DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.bool, torch.complex64, torch.float64]


def replicated():
    """Return the buffers of a model with other values on each worker."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(1, 1)
    for number, dtype in enumerate(DTYPES):
        values = torch.tensor([[rank, 1], [2, number]]).to(dtype)
        model.register_buffer(f"buffer{number}", values if number % 2 else values[1, 1])
    with ss.init(lanes=2, timeout=60) as run:
        run.replicate(model)
    return [(buffer.dtype, buffer.tolist()) for buffer in model.buffers()]


def test_buffers_of_any_dtype_are_replicated(gpus):
    first, second = gpus.workers(2, replicated, **{VISIBLE: "0,1"})
    assert [dtype for dtype, _ in first] == DTYPES
    assert first == second


def swapped():
    """Let each of three lanes swap two values of a frozen layer through `.data`."""
    with ss.init(lanes=3, timeout=60) as run:
        model = run.replicate(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        model[1].requires_grad_(requires_grad=False)

        def loss_fn(model, rows):
            bias = model[1].bias
            version = bias._version
            bias.data.copy_(bias.data.flip(0))  # the same bytes in another order
            assert bias._version == version
            return model[0](rows).sum()

        for batch in run.batches(torch.ones(9, 2), 9, steps=1):
            run.backward(loss_fn, model, batch)


def test_values_that_a_lane_swaps_are_noticed(gpus):
    with pytest.raises(AssertionError, match=r"a lane changed the parameter model\.1\.bias"):
        gpus.call(swapped)
