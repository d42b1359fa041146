"""The GPU benchmark's job with Accelerate.

https://huggingface.co/docs/accelerate/basic_tutorials/migration
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.gpu_job import Job, Samples, Stopwatch, loss_of


def main() -> None:
    """Train, and print the speed."""
    job = Job.from_arguments()
    accelerator = Accelerator(
        mixed_precision="bf16" if job.precision == "bfloat16" else "no", cpu=job.device == "cpu"
    )
    network = job.network()
    job.compile(network)
    model, optimizer, loader = accelerator.prepare(
        network,
        torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True),
        DataLoader(
            Samples(job),
            job.batch_size,
            shuffle=True,
            num_workers=job.loader_workers,
            pin_memory=job.device == "cuda",
        ),
    )
    watch = Stopwatch(job)
    for inputs, targets in loader:
        loss = loss_of(model, inputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not watch.step():
            break
    print(watch.figures())


if __name__ == "__main__":
    main()
