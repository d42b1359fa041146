"""The GPU benchmark's job with Lightning Fabric.

https://lightning.ai/docs/fabric/stable/fundamentals/convert.html
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from benchmarks.gpu_job import Job, Samples, Stopwatch, loss_of


def main() -> None:
    """Train, and print the speed."""
    job = Job.from_arguments()
    precision = "bf16-mixed" if job.precision == "bfloat16" else "32-true"
    fabric = Fabric(accelerator=job.device, devices=1, precision=precision)
    fabric.launch()
    network = job.network()
    job.compile(network)
    model, optimizer = fabric.setup(
        network, torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    )
    loader = fabric.setup_dataloaders(
        DataLoader(
            Samples(job),
            job.batch_size,
            shuffle=True,
            num_workers=job.loader_workers,
            pin_memory=job.device == "cuda",
        )
    )
    watch = Stopwatch(job)
    for inputs, targets in loader:
        loss = loss_of(model, inputs, targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not watch.step():
            break
    print(watch.figures())


if __name__ == "__main__":
    main()
