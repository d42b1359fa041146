"""torch's DistributedDataParallel: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.jobs.job import LEARNING_RATE

if TYPE_CHECKING:
    from benchmarks.jobs import Job


def train(job: Job, *, fused: bool | None = None, gradient_as_bucket_view: bool = False) -> dict[str, float]:
    """Train, and return figures."""
    dist.init_process_group("gloo")
    model, dataset, loss_fn = job.build()
    model = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=job.batch_size // dist.get_world_size(), sampler=sampler)
    watch = Stopwatch(job)
    for epoch in watch.epochs():
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            if watch.step(loss):
                break
    figures = watch.figures()
    dist.destroy_process_group()
    return figures
