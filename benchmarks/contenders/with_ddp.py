"""torch's DistributedDataParallel, and its ZeRO-1.

https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
https://docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.contenders.stopwatch import Stopwatch, keep
from benchmarks.jobs import Job
from benchmarks.jobs.job import LEARNING_RATE


def train(
    job: Job,
    *,
    fused: bool | None = None,
    gradient_as_bucket_view: bool = False,
    fp16: bool = False,
    zero: bool = False,
) -> dict[str, float]:
    """Train, and return figures.

    With `fp16`, exchange gradients in 16 bits; with `zero`, shard the optimizer's state (ZeRO-1).
    """
    dist.init_process_group("gloo")
    model, dataset, loss_fn = job.build()
    model = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)
    keep(model)
    if fp16:
        model.register_comm_hook(None, fp16_compress_hook)
    if zero:
        # the import warns, so it is only here
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, batch_size=job.batch_size // dist.get_world_size(), sampler=sampler
    )
    watch = Stopwatch(job)
    for epoch in watch.epochs():
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            if watch.step(loss):
                break
    figures = watch.figures()
    dist.destroy_process_group()
    return figures
