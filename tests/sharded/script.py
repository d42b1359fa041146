"""A program that trains a sharded model."""

from __future__ import annotations

import torch

import samestep as ss
from tests.sharded.jobs import Block, Words, adamw, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    with ss.init(lanes=4, progress=False) as run:
        torch.manual_seed(1)
        model = run.replicate(Words(), shard="full", units=(Block,))
        optimizer = adamw(run, model)
        run.track(model=model, optimizer=optimizer)
        train(run, model, optimizer, clip=0.5, steps=6)
