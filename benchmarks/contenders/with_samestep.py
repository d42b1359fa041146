"""samestep: docs/training.md."""

from __future__ import annotations

import torch

import samestep as ss
from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.jobs import Job
from benchmarks.jobs.job import LEARNING_RATE


def train(job: Job, *, exchange_dtype: str | None = None) -> dict[str, float]:
    """Train, and return figures."""
    with ss.init(
        exchange_dtype=exchange_dtype
    ) as run:  # one lane per worker, as the others compute
        model, dataset, loss_fn = job.build()
        model = run.replicate(model)
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))
        run.track(model=model, optimizer=optimizer)
        watch = Stopwatch(job)
        for batch in run.batches(dataset, job.batch_size, steps=watch.steps):
            means = run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            run.log(means)
            watch.step(means["loss"])
        return watch.figures()
