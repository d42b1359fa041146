"""scikit-learn's 1,797 handwritten digits, real scans of 8x8 pixels, with a fifth held out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Digits(NamedTuple):
    """Images in [0, 1], float32 [samples, 8, 8], with their classes, int64 [samples]."""

    images: Tensor
    labels: Tensor


def read_digits() -> tuple[Digits, Digits]:
    """Return the digits to train on and those held out."""
    from sklearn.datasets import load_digits  # imported here because it takes a second

    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    held_out = held_out_fifth(labels)
    return tuple(Digits(images[mask], labels[mask]) for mask in (~held_out, held_out))


def held_out_fifth(labels: Tensor) -> Tensor:
    """Return a bool per sample, true for every fifth sample of each class in data set order."""
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        held_out[(labels == label).nonzero()[4::5]] = True
    return held_out
