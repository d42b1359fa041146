"""Train a small ViT on scikit-learn's digits, and record the samples of every step.

usage: samestep run -n 2 --dir DIR benchmarks/chaos/job.py [EPOCHS]
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

# A script can import only modules of its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import samestep as ss
from recipes.vit.config import DataSettings, ModelSettings
from recipes.vit.data import open_images
from recipes.vit.model import VisionTransformer

BATCH_SIZE = 64
LANES = 4
HASH_FILE = "hash.txt"
MODEL = ModelSettings(
    width=32, depth=2, heads=2, image_size=8, patch_size=2, channels=1, classes=10
)
DATA = DataSettings(source="digits", mean=(0.305,), std=(0.376,))


class Numbered(torch.utils.data.Dataset[Any]):
    """The samples of another data set with their indices."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return *self._samples[index], index


def loss_fn(model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a lane's images."""
    images, labels, _ = batch
    return F.cross_entropy(model(images), labels)


def main(epochs: int) -> None:
    """Train, or resume training, and write a hash of the model."""
    with ss.init(lanes=LANES) as run:
        model = run.replicate(VisionTransformer(MODEL))
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)
        model.train()
        samples = Numbered(open_images(DATA, MODEL).train)
        for batch in run.batches(samples, BATCH_SIZE, epochs=epochs):
            means = run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            used = [index for lane in batch for index in lane[2].tolist()]
            every = [index for others in run.all_gather(used) for index in others]
            run.log(means, **{f"sample {number}": index for number, index in enumerate(every)})
        if run.is_main and run.dir is not None:
            (run.dir / HASH_FILE).write_text(hash_of(model))


def hash_of(model: torch.nn.Module) -> str:
    """Return a hash of every bit of a model."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
