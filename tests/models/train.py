"""Train one job of tests/models/jobs.py for a few steps: `train.py NAME`."""

from __future__ import annotations

import sys

import torch

import samestep as ss
from tests.models.jobs import JOBS


def train(name: str) -> None:
    """Train the job of this name on global batches of 12 samples, 2 per lane."""
    with ss.init(lanes=6) as run:
        job = JOBS[name].build()
        model = run.replicate(job.model.train())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = run.shard(torch.optim.AdamW(trained, lr=1e-3))
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(job.samples, 12, steps=10, collate_fn=job.collate_fn):
            means = run.backward(job.loss_fn, model, batch, embed=job.embed, count=job.count)
            norm = run.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.log(means, norm=norm)


train(sys.argv[1])
