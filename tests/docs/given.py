"""A network, a loss function and data that pages use without defining them.

Blocks of a page have these names. A file that a page writes has them if its test says so.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import samestep as ss

__all__ = [
    "AdamW",
    "DataLoader",
    "F",
    "Net",
    "loss_fn",
    "nn",
    "ss",
    "test_set",
    "torch",
    "train_set",
]


class Net(nn.Sequential):
    """A classifier of images [1, 8, 8], with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(36, 10),
        )


def loss_fn(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the accuracy of a lane's batch."""
    images, labels = batch
    logits = model(images)
    return F.cross_entropy(logits, labels), {
        "accuracy": (logits.argmax(1) == labels).float().mean()
    }


def images(size: int, seed: int) -> TensorDataset:
    """Return random images, with the index of the brightest row as a label that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(size, 1, 8, 8, generator=generator)
    return TensorDataset(pictures, pictures.mean((1, 3)).argmax(1))


train_set, test_set = images(101, seed=1), images(53, seed=2)
