"""The GPU benchmark's job with samestep, for `samestep run` and `samestep verify`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# A script can import only modules of its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import samestep as ss
from benchmarks.gpu_job import Job, Samples, Stopwatch, loss_of


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a lane's mean loss."""
    return loss_of(model, *batch)


def main() -> None:
    """Train, and print the speed."""
    job = Job.from_arguments()
    graphs = "on" if job.graph and job.device == "cuda" else "off"  # CPUs have none
    with ss.init(device=job.device, precision=job.precision, graphs=graphs) as run:
        model = run.replicate(job.network())
        job.compile(model)
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        run.track(model=model, optimizer=optimizer)
        watch = Stopwatch(job)
        for batch in run.batches(Samples(job), job.batch_size, loader_workers=job.loader_workers):
            means = run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            run.log(means)
            if not watch.step():
                break
        run.print(watch.figures())


if __name__ == "__main__":
    main()
