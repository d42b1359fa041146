"""A plain training loop for one worker."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.jobs import Job
from benchmarks.jobs.job import LEARNING_RATE


def train(job: Job, *, fused: bool | None = None) -> dict[str, float]:
    """Train, and return figures."""
    model, dataset, loss_fn = job.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    loader = DataLoader(dataset, batch_size=job.batch_size, shuffle=True)
    watch = Stopwatch(job)
    for _ in watch.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            if watch.step(loss):
                break
    return watch.figures()
