"""The first step with samestep, for `samestep run`."""

import torch
import torch.nn.functional as F

import samestep as ss
from benchmarks.start.network import BATCH_SIZE, dataset, network, report_step


def loss_fn(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return a lane's mean loss."""
    features, labels = batch
    return F.cross_entropy(model(features), labels)


with ss.init() as run:
    model = run.replicate(network())
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    for batch in run.batches(dataset(), BATCH_SIZE, steps=1):
        run.backward(loss_fn, model, batch)
        optimizer.step()
        optimizer.zero_grad()
        report_step()
