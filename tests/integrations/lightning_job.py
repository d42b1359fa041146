"""Train a small LightningModule: `lightning_job.py [EPOCHS]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import samestep as ss
from samestep.integrations.lightning import fit


def images(size: int, seed: int) -> TensorDataset:
    """Return random images [1, 8, 8], with the index of the brightest row as a label."""
    pictures = torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(pictures, pictures.mean((1, 3)).argmax(1))


class Data(lightning.LightningDataModule):
    """37 samples to train, and 17 to validate."""

    shuffle = True

    def setup(self, stage: str) -> None:
        self.sets = images(37, seed=1), images(17, seed=2)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.sets[0], 12, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.sets[1], 5)


class Net(lightning.LightningModule):
    """A classifier that logs losses and an accuracy, and counts its hooks."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(144, 8)
        )
        self.accuracy = MulticlassAccuracy(8, average="micro")
        self.hooks: list[str] = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.layers(images)
        self.accuracy(logits, labels)
        self.log_dict({"val_loss": F.cross_entropy(logits, labels)})
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_epoch_start(self):
        self.hooks.append(f"start {self.current_epoch}")

    def on_validation_epoch_end(self):
        self.hooks.append(f"validated {self.trainer.callback_metrics['val_loss']:.4f}")

    def on_train_epoch_end(self):
        self.hooks.append(f"end {self.global_step}")
        self.log("rate", self.trainer.max_epochs / 2)


def train(epochs: int, out: Path | None = None) -> None:
    """Train; write what was logged to a file."""
    with ss.init(lanes=4) as run:
        module = Net()
        metrics = fit(module, Data(), run=run, max_epochs=epochs, gradient_clip_val=1.0)
        if run.is_main and out is not None:
            weights = [parameter.tolist() for parameter in module.parameters()]
            report = {"metrics": metrics, "hooks": module.hooks, "weights": weights}
            out.write_text(json.dumps(report))


if __name__ == "__main__":
    train(int(sys.argv[1]) if sys.argv[1:] else 2)
