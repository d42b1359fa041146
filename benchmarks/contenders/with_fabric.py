"""Lightning Fabric: https://lightning.ai/docs/fabric/stable/fundamentals/convert.html."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

from benchmarks.contenders.stopwatch import Stopwatch, keep
from benchmarks.jobs import Job
from benchmarks.jobs.job import LEARNING_RATE


def train(job: Job) -> dict[str, float]:
    """Train, and return figures."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, dataset, loss_fn = job.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = fabric.setup(model, optimizer)
    keep(model)
    loader = fabric.setup_dataloaders(
        DataLoader(dataset, batch_size=job.batch_size // fabric.world_size, shuffle=True)
    )
    watch = Stopwatch(job)
    for _ in watch.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            fabric.backward(loss)
            optimizer.step()
            if watch.step(loss):
                break
    figures = watch.figures()
    dist.destroy_process_group()
    return figures
