"""Classify points inside and outside a circle: a first script, which needs only samestep."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep as ss

points = 2 * torch.rand(4096, 2, generator=torch.Generator().manual_seed(0)) - 1  # [samples, 2]
labels = (points.norm(dim=1) < 0.8).long()  # [samples]
train_set = TensorDataset(points[:3072], labels[:3072])
test_set = TensorDataset(points[3072:], labels[3072:])


def scores_of(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Return means over the samples of a batch."""
    inputs, targets = batch
    logits = model(inputs)
    is_right = (logits.argmax(1) == targets).float()
    return {"loss": F.cross_entropy(logits, targets), "accuracy": is_right.mean()}


with ss.init(lanes=8, dir="runs/points") as run:
    run.print(f"starting at step {run.step} with {run.world_size} workers")
    model = run.replicate(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = run.shard(torch.optim.Adam(model.parameters(), lr=0.01))
    run.track(model=model, optimizer=optimizer)  # saved in snapshots, restored on resume
    for batch in run.batches(train_set, batch_size=256, epochs=10):
        for inputs, targets in batch.lanes(model):  # this worker's parts of the batch
            logits = model(inputs)
            is_right = (logits.argmax(1) == targets).float()
            batch.backward(F.cross_entropy(logits, targets), accuracy=is_right.mean())
        optimizer.step()
        optimizer.zero_grad()
        run.log(batch.means)  # over the whole batch
    scores = run.evaluate(scores_of, model, test_set, batch_size=256)
    run.print(f"accuracy {scores['accuracy']:.1%}")
