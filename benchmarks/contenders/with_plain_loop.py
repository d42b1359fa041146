"""A plain training loop for one worker."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.jobs import Job, Parts
from benchmarks.jobs.job import LEARNING_RATE


def train(job: Job, *, fused: bool | None = None) -> dict[str, float]:
    """Train, and return figures."""
    watch = Stopwatch(job)
    train_parts(job.build(), watch, job.batch_size, fused=fused)
    return watch.figures()


def train_parts(
    parts: Parts, watch: Stopwatch, batch_size: int, *, fused: bool | None = None
) -> None:
    """Train a job's parts until the stopwatch has all of its steps."""
    model, dataset, loss_fn = parts
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    for _ in watch.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            if watch.step(loss):
                break
