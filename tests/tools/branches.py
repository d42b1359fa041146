"""A training script with much state: `branches.py ORDER RATE [EPOCHS]`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import samestep as ss

SIZE = 160
ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 16},
    "weighted": {"batch_size": 16, "order": ss.Weighted(range(1, SIZE + 1))},
    "length": {"order": ss.ByLength([1 + n % 3 for n in range(SIZE)], max_tokens=12)},
}


def train(run: ss.Run, order: str, rate: float, epochs: int) -> None:
    """Train a network with BatchNorm and dropout, a moving average of it, and a schedule."""
    points = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(points, points.norm(dim=1))
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1)
    model = run.replicate(nn.Sequential(*layers))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    run.track(model=model, average=average, optimizer=optimizer, schedule=schedule)
    for batch in run.batches(data, epochs=epochs, **ORDERS[order]):
        for inputs, norms in batch.lanes(model):
            batch.backward(rate * F.mse_loss(model(inputs)[:, 0], norms))
        run.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)
        run.log(batch.means)


if __name__ == "__main__":
    with ss.init(lanes=4, keep_last=20) as run:
        train(run, sys.argv[1], float(sys.argv[2]), int([*sys.argv, 1][3]))
