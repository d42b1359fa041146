"""The ViT job with samestep, for `samestep run`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import samestep as ss
from benchmarks.vit import job

if TYPE_CHECKING:
    from recipes.vit.model import VisionTransformer


def loss_fn(model: VisionTransformer, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a lane's mean loss."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main() -> None:
    """Train, and tell the speed."""
    with ss.init() as run:  # a lane a worker: what DDP computes
        model = run.replicate(job.model())
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        watch = job.Stopwatch()
        for batch in run.batches(job.dataset(), job.BATCH_SIZE, steps=job.WARMUP_STEPS + job.STEPS, drop_last=True):
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
        speed = watch.samples_a_second()
        run.print(f"samples_a_second={speed:.2f} memory_megabytes={run.reduce_dict({'own': memory()}, average=False)['own']:.0f}")


def memory() -> float:
    """Return this process's memory in megabytes; of what it shares, its part."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) / 1024 if found else math.nan


if __name__ == "__main__":
    main()
