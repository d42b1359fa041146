"""An MLP of 25 million parameters in six tensors with a small batch: moving data dominates."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.jobs.job import CLASSES, Job, Parts, classification_loss, images

BATCH_SIZE = 16


def build(batch_size: int = BATCH_SIZE, hidden: tuple[int, int] = (4096, 3000)) -> Parts:
    """Return the job's parts."""
    torch.manual_seed(0)
    first, second = hidden
    layers = [
        nn.Flatten(),
        nn.Linear(3072, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, CLASSES),
    ]
    return Parts(nn.Sequential(*layers), images(batch_size), classification_loss)


JOB = Job("MLP 3072-4096-3000-10, 25 M parameters", BATCH_SIZE, steps=20, build=build)
