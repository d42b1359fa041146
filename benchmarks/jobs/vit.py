"""The ViT-Ti/8 of recipes/vit, 5.4 million parameters in 150 tensors: computing dominates."""

from __future__ import annotations

import torch

from benchmarks.jobs.job import CLASSES, Job, Parts, classification_loss, images
from recipes.vit.config import ModelSettings
from recipes.vit.model import VisionTransformer

BATCH_SIZE = 64


def build(batch_size: int = BATCH_SIZE, depth: int | None = None) -> Parts:
    """Return the job's parts."""
    torch.manual_seed(0)
    model = VisionTransformer(
        ModelSettings(size="tiny", depth=depth, image_size=32, patch_size=8, classes=CLASSES)
    )
    return Parts(model, images(batch_size), classification_loss)


JOB = Job("ViT-Ti/8, 32x32 images", BATCH_SIZE, steps=15, build=build)
