"""A program that trains one of the jobs, or the benchmark's transformer of 12 units.

It appends a hash of what it ends with to a file. `--width 768` has 109.6 M parameters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import samestep as ss
from benchmarks import sharded
from tests.sharded import jobs


def transformer(run, shard, width):
    options = {**shard, "units": (sharded.Block,)} if shard else {}
    model = run.replicate(sharded.Words(width, 12), **options)
    data = TensorDataset(sharded.texts(6, 8))
    jobs.train(run, model, jobs.adamw(run, model, fused=True), sharded.loss_fn, data, batch_size=8)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--shard", choices=("full",))
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--end", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ss.init(lanes=options.lanes, progress=False) as run:
        torch.manual_seed(1)
        shard = {"shard": options.shard} if options.shard else {}
        if options.job == "transformer":
            model = transformer(run, shard, options.width)
        else:
            model = getattr(jobs, options.job)(run, shard)
        end = jobs.digest(run, model)
        if run.is_main:
            with options.end.open("a") as file:
                print(end, file=file)
