"""What all versions of the ViT job share: the model, the images, and how speed is told."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from recipes.vit.config import ModelSettings
from recipes.vit.model import VisionTransformer

BATCH_SIZE = 64
WARMUP_STEPS = 5
STEPS = 40


def model() -> VisionTransformer:
    """Return a ViT-Ti/8 for 32x32 images of 10 classes (5.4 million parameters)."""
    torch.manual_seed(0)
    return VisionTransformer(ModelSettings(size="tiny", image_size=32, patch_size=8, classes=10))


def dataset() -> TensorDataset:
    """Return scikit-learn's digits as float32 images [3, 32, 32] with their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(8).sub(1)
    return TensorDataset(
        F.interpolate(images[:, None], 32, mode="bilinear").expand(-1, 3, -1, -1).contiguous(), torch.tensor(digits.target)
    )


class Stopwatch:
    """Tells samples a second over the steps after the warm-up."""

    def __init__(self) -> None:
        self._steps = 0
        self._started = 0.0

    def step(self) -> bool:
        """Count a step; returns False after the last one."""
        self._steps += 1
        if self._steps == WARMUP_STEPS:
            self._started = time.perf_counter()
        return self._steps < WARMUP_STEPS + STEPS

    def samples_a_second(self) -> float:
        """Return the speed, of the global batch."""
        return STEPS * BATCH_SIZE / (time.perf_counter() - self._started)
