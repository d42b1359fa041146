"""Many narrow layers: a network whose steps are short, so that what samestep itself takes shows."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

BATCH: Final = 64
WIDTH: Final = 64


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch [64, 64], [64]."""
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def samples(steps: int) -> TensorDataset:
    """Return as many random samples as some steps use, with labels, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(steps * BATCH, WIDTH, generator=generator),
        torch.randint(WIDTH, (steps * BATCH,), generator=generator),
    )


def network(layers: int) -> nn.Sequential:
    """Return linear layers, each with a ReLU."""
    blocks = [block for _ in range(layers) for block in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*blocks)
