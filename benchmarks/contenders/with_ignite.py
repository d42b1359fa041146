"""PyTorch-Ignite: https://docs.pytorch.org/ignite/distributed.html."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events

from benchmarks.contenders.stopwatch import Stopwatch, keep
from benchmarks.jobs import Job
from benchmarks.jobs.job import LEARNING_RATE


def train(job: Job) -> dict[str, float]:
    """Train, and return figures."""
    figures: dict[str, float] = {}
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(_train, job, figures)
    return figures


def _train(_local_rank: int, job: Job, figures: dict[str, float]) -> None:
    model, dataset, loss_fn = job.build()
    loader = idist.auto_dataloader(dataset, batch_size=job.batch_size, shuffle=True)
    model = idist.auto_model(model)
    keep(model)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    watch = Stopwatch(job)

    def train_step(_engine: Engine, batch: Any) -> float:
        model.train()
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)

    @trainer.on(Events.EPOCH_STARTED)
    def set_epoch(engine: Engine) -> None:
        loader.sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.ITERATION_COMPLETED)
    def count_step(engine: Engine) -> None:
        if watch.step(engine.state.output):
            engine.terminate()

    trainer.run(loader, max_epochs=watch.steps)
    figures.update(watch.figures())
