"""Accelerate: https://huggingface.co/docs/accelerate/basic_tutorials/migration."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.contenders.stopwatch import Stopwatch, keep
from benchmarks.jobs import Job
from benchmarks.jobs.job import LEARNING_RATE


def train(job: Job) -> dict[str, float]:
    """Train, and return figures."""
    accelerator = Accelerator(cpu=True)
    model, dataset, loss_fn = job.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(
        dataset, batch_size=job.batch_size // accelerator.num_processes, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    keep(model)
    watch = Stopwatch(job)
    for _ in watch.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            if watch.step(loss):
                break
    figures = watch.figures()
    accelerator.end_training()
    return figures
