"""One worker of a job of any size: square layers, AdamW, every step timed.

usage: samestep run -n 2 -m benchmarks.growth_steps samestep 100000
       torchrun --nproc-per-node 2 -m benchmarks.growth_steps ddp 100000

Every worker takes 16 samples per step, so work grows with workers. Prints the median milliseconds
of a step and the memory of a worker in megabytes, at the peak of the last step. Both are means over
workers.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep as ss
from benchmarks.contenders.stopwatch import memory, over_workers

SAMPLES = 16  # per worker and step
FEATURES, CLASSES, LAYERS = 64, 10, 4
WARMUP_STEPS = 3
Figures = dict[str, float]


def network(parameters: int) -> nn.Sequential:
    """Return square layers with about `parameters` parameters, for 64 features and 10 classes."""
    torch.manual_seed(0)
    # LAYERS * width**2 + other * width = parameters, nearly
    other = FEATURES + CLASSES + LAYERS + 1
    width = round((math.sqrt(other**2 + 4 * LAYERS * parameters) - other) / (2 * LAYERS))
    squares = itertools.chain.from_iterable(
        (nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)
    )
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *squares, nn.Linear(width, CLASSES))


def dataset() -> TensorDataset:
    """Return 4,096 random samples."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(4096, FEATURES, generator=generator),
        torch.randint(CLASSES, (4096,), generator=generator),
    )


def steps_for(parameters: int) -> int:
    """Return a number of steps that takes at most a few seconds."""
    return min(200, max(6, 200_000_000 // parameters))


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch [16, 64], [16]."""
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def with_samestep(parameters: int, steps: int) -> Figures:
    """Train with a sharded optimizer and one lane per worker, which is what DDP computes."""
    with ss.init() as run:
        model = run.replicate(network(parameters))
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        watch = Watch(steps)
        for batch in run.batches(dataset(), SAMPLES * run.world_size, steps=steps):
            run.backward(loss_fn, model, batch)
            optimizer.step()
            watch.step()
            optimizer.zero_grad()
        return run.reduce_dict(watch.figures())


def with_ddp(parameters: int, steps: int) -> Figures:
    """Train with DistributedDataParallel."""
    return _with_torch(
        parameters, steps, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    )


def with_zero(parameters: int, steps: int) -> Figures:
    """Train with DistributedDataParallel and a sharded optimizer (ZeRO-1)."""
    # the import warns, so it is only here
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return _with_torch(
        parameters,
        steps,
        lambda model: ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True
        ),
    )


def _with_torch(
    parameters: int, steps: int, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> Figures:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network(parameters), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, SAMPLES, sampler=sampler)
    watch = Watch(steps)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in itertools.islice(loader, steps - watch.steps):
            loss_fn(model, batch).backward()
            optimizer.step()
            watch.step()
            optimizer.zero_grad()
        if watch.steps == steps:
            break
    return over_workers(watch.figures())


def pure(parameters: int, steps: int) -> Figures:
    """Make the same steps in one process that loads nothing and does not communicate."""
    torch.set_num_threads(1)
    model = network(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = list(dataset()[:SAMPLES])
    watch = Watch(steps)
    for _ in range(steps):
        loss_fn(model, batch).backward()
        optimizer.step()
        watch.step()
        optimizer.zero_grad()
    return watch.figures()


class Watch:
    """Time steps, and measure the process's peak memory in the last one."""

    def __init__(self, steps: int) -> None:
        self._megabytes = math.nan
        self._last = steps
        self._stamps: list[float] = []

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return len(self._stamps)

    def step(self) -> None:
        """Count a step."""
        self._stamps.append(time.perf_counter())
        if self.steps == self._last - 1:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        if self.steps == self._last:
            self._megabytes = memory() + freed_megabytes()

    def figures(self) -> Figures:
        """Return the median time of a step after the warm-up, and the memory."""
        durations = [
            end - start for start, end in itertools.pairwise(self._stamps[WARMUP_STEPS - 1 :])
        ]
        return {
            "step_milliseconds": 1000 * statistics.median(durations),
            "memory_megabytes": self._megabytes,
        }


def freed_megabytes() -> float:
    """Return by how much this process's memory was larger at its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    sizes = re.findall(r"^Vm(?:HWM|RSS):\s+(\d+) kB", status, re.MULTILINE)
    peak, now = (int(kilobytes) / 1024 for kilobytes in sizes)
    return max(0.0, peak - now)


WAYS = {"samestep": with_samestep, "ddp": with_ddp, "zero": with_zero, "pure": pure}


def tell(figures: Figures) -> None:
    """Print figures, then leave the process group: gloo may abort the process (torch 2.13)."""
    for name, value in figures.items():
        print(f"{name}={value:.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Train as one worker, and print its figures."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # warnings of peers about themselves
    parameters = int(sys.argv[2])
    tell(WAYS[sys.argv[1]](parameters, steps_for(parameters)))


if __name__ == "__main__":
    main()
