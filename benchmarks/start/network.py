"""The parts that all first steps share: a small network, its samples and a timestamp."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 32  # of all workers together


def network() -> nn.Sequential:
    """Return a network of 9,000 parameters for 64 features and 10 classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 10))


def dataset() -> TensorDataset:
    """Return 1,000 random samples."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(1000, 64, generator=generator), torch.randint(10, (1000,), generator=generator)
    )


def report_step() -> None:
    """Print the time of the clock that all processes of a host share."""
    print(f"first_step_at={time.monotonic():.4f}", flush=True)
