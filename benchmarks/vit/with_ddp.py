"""The ViT job with torch's DistributedDataParallel, for torchrun."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.vit import job


def main() -> None:
    """Train, and tell the speed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(job.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    dataset = job.dataset()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=job.BATCH_SIZE // dist.get_world_size(), sampler=sampler, drop_last=True)
    watch = job.Stopwatch()
    epoch, training = 0, True
    while training:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training = watch.step()
            if not training:
                break
        epoch += 1
    if os.environ["RANK"] == "0":
        print(f"samples_a_second={watch.samples_a_second():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
