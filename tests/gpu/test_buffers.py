"""Buffers that user code writes during backward, which GPUs tell the host late."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep as ss
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


def counted(first, **options):
    with ss.init(lanes=2, timeout=60, **options) as run:
        counting = Counting(first)
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), counting))
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(model=model, optimizer=optimizer)
        for counting.step, batch in enumerate(run.batches(images(32), 8, steps=3)):
            run.backward(classify, model, batch)
            optimizer.step()
            optimizer.zero_grad()
        return counting.passes.item()


def test_buffer_that_only_backward_writes_in_every_step_is_kept(gpus):
    assert gpus.call(counted, 0) == counted(0, device="cpu") == 3


@pytest.mark.parametrize("saves", [False, True])
def test_buffer_that_only_backward_writes_in_a_later_step_is_refused(saves, gpus, tmp_path):
    options = {"dir": tmp_path} if saves else {}
    with pytest.raises(AssertionError, match="'passes' was written during backward, but not"):
        gpus.call(counted, 1, **options)
