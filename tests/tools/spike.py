"""A training script with a bad sample: `spike.py SAMPLES BAD FACTOR`.

Workers kill themselves once at the steps and ranks of the variable KILLS, such as "8 1,17 2".
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss


class Points:
    """Points [4] and their norms; the inputs of one of them are far too large."""

    def __init__(self, size: int, bad: int, factor: float) -> None:
        self.points = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
        self.norms = self.points.norm(dim=1)
        self.points[bad] *= factor
        self.files = [f"points/{number}.txt" for number in range(size)]

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.norms[index]


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> object:
    """Return the loss of a lane, and how often it is almost right."""
    points, norms = batch
    predicted = model(points)[:, 0]
    return F.mse_loss(predicted, norms), {"close": (predicted - norms).abs() < 0.1}


def kill_once(run: ss.Run) -> None:
    """Kill this worker if it is told to, and has not been killed at this step before."""
    if run.dir and f"{run.step} {run.rank}" in os.environ.get("KILLS", "").split(","):
        mark = run.dir / f"killed-{run.step}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(run: ss.Run, data: Points) -> nn.Module:
    """Train for an epoch with batches of 16."""
    layers = nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1)
    model = run.replicate(nn.Sequential(*layers))
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.01))
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(data, 16, epochs=1):
        kill_once(run)
        means = run.backward(loss_fn, model, batch)
        optimizer.step()
        optimizer.zero_grad()
        run.log(means)
    return model


if __name__ == "__main__":
    size, bad, factor = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    with ss.init(lanes=4) as run:
        train(run, Points(size, bad, factor))
