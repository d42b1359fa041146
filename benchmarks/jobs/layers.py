"""100 small layers, 0.6 million parameters in 204 tensors: the cost per tensor dominates."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from benchmarks.jobs.job import CLASSES, Job, Parts, classification_loss, images

BATCH_SIZE = 64
WIDTH = 64


def build(batch_size: int = BATCH_SIZE, depth: int = 100) -> Parts:
    """Return the job's parts."""
    torch.manual_seed(0)
    widths = [3072, *[WIDTH] * (depth + 1)]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        # He et al. 2015: torch's default shrinks gradients to denormal numbers, which are slow.
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layers += [layer, nn.ReLU()]
    return Parts(
        nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), images(batch_size), classification_loss
    )


JOB = Job("100 layers of 64x64 after 3072x64", BATCH_SIZE, steps=400, build=build)
