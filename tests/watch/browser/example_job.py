"""A classifier of digits for the pictures in docs/watch.md, which can fail or stall on purpose."""

from __future__ import annotations

import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from recipes.first.train import BATCH_SIZE, LR, loss_fn

EPOCHS = 20
TROUBLE_EPOCH = 12


def main(kind: str) -> None:
    """Train. `kind` is histograms, failed or stalled; the last two concern worker 1."""
    with ss.init(settings={"lr": LR, "batch_size": BATCH_SIZE}) as run:
        model = run.replicate(network())
        optimizer = torch.optim.Adam(model.parameters(), LR)
        run.track(model=model, optimizer=optimizer)
        digits = load_digits()
        images = torch.tensor(digits.images).float()[:, None] / 16
        train_set = TensorDataset(images, torch.tensor(digits.target))
        loop = run.batches(train_set, BATCH_SIZE, epochs=EPOCHS)
        for batch in loop:
            if run.epoch == TROUBLE_EPOCH and run.rank == 1:
                cause_trouble(kind)
            means = run.backward(loss_fn, model, batch)
            if kind == "histograms" and run.step % loop.steps_per_epoch == 0:
                run.log_histogram("weights", model)
                run.log_histogram("gradients", model, grad=True)
            optimizer.step()
            optimizer.zero_grad()
            run.log(means)


def network() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10)
    )


def cause_trouble(kind: str) -> None:
    """Look up a label that does not exist, or wait for ever."""
    if kind == "failed":
        {"zero": torch.zeros(1)}["ten"]
    while kind == "stalled":
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1])
