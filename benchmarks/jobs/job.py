"""Training jobs: the same parts for every contender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCHES_AN_EPOCH = 32
CLASSES = 10
LEARNING_RATE = 1e-4  # of AdamW, everywhere


class Parts(NamedTuple):
    """The parts of a job; `loss_fn(model, batch)` returns the mean loss of a batch."""

    model: nn.Module
    dataset: TensorDataset
    loss_fn: Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Job:
    """A training job: a global `batch_size`, and `steps` that are timed after `warmup_steps`."""

    title: str
    batch_size: int
    steps: int
    build: Callable[[], Parts]
    warmup_steps: int = 3


def images(batch_size: int) -> TensorDataset:
    """Return one epoch of the same random float32 images [3, 32, 32] with labels."""
    generator = torch.Generator().manual_seed(1)
    size = BATCHES_AN_EPOCH * batch_size
    return TensorDataset(
        torch.randn(size, 3, 32, 32, generator=generator),
        torch.randint(CLASSES, (size,), generator=generator),
    )


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of images [batch, 3, 32, 32] and labels [batch]."""
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)
