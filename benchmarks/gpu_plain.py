"""The GPU benchmark's job as a plain PyTorch loop."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from benchmarks.gpu_job import Images, Job, Stopwatch, loss_of


def main() -> None:
    """Train, and print the speed."""
    job = Job.from_arguments()
    model = job.network().to(job.device)
    job.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    on_gpu = job.device == "cuda"
    loader = DataLoader(
        Images(job), job.batch_size, shuffle=True, num_workers=job.loader_workers, pin_memory=on_gpu
    )
    watch = Stopwatch(job)
    for images, labels in loader:
        images_there, labels_there = (
            tensor.to(job.device, non_blocking=on_gpu) for tensor in (images, labels)
        )
        with torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "bfloat16"):
            loss = loss_of(model, images_there, labels_there)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not watch.step():
            break
    print(watch.figures())


if __name__ == "__main__":
    main()
