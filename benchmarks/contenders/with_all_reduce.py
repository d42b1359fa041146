"""One all-reduce per parameter after backward, as in https://github.com/opendilab/DI-engine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.jobs import Job
from benchmarks.jobs.job import LEARNING_RATE


def train(job: Job) -> dict[str, float]:
    """Train, and return figures."""
    dist.init_process_group("gloo")
    workers = dist.get_world_size()
    model, dataset, loss_fn = job.build()
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=job.batch_size // workers, sampler=sampler)
    watch = Stopwatch(job)
    for epoch in watch.epochs():
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(workers)
            optimizer.step()
            if watch.step(loss):
                break
    figures = watch.figures()
    dist.destroy_process_group()
    return figures
