"""The least time of a step that a link between two hosts allows.

A worker computes its part of each batch alone, and notes when autograd completes each gradient. The
host of the worker sends these at the full rate of the link, each as soon as it is complete, but a
burst of bytes at once. Everything else that a network needs takes no time.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.jobs import Job
from benchmarks.jobs.job import LEARNING_RATE

RATE, BURST = "LINK_BYTES_A_SECOND", "LINK_BURST_BYTES"


def train(job: Job, *, itemsize: int = 4) -> dict[str, float]:
    """Train on a part of each batch; return the speed of all workers with such a link."""
    rate, burst = float(os.environ[RATE]), int(os.environ[BURST])
    workers = int(os.environ["WORLD_SIZE"])
    model, dataset, loss_fn = job.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    loader = DataLoader(dataset, batch_size=job.batch_size // workers, shuffle=True)
    completed: list[tuple[float, int]] = []  # moment and size of each gradient

    def note(parameter: Tensor) -> None:
        completed.append((time.perf_counter(), parameter.numel() * itemsize))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    watch, seconds, started = Stopwatch(job), [], time.perf_counter()
    for _ in watch.epochs():
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            is_last, ended = watch.step(loss), time.perf_counter()
            seconds.append(least_seconds(started, ended, completed, rate, burst))
            completed.clear()
            started = time.perf_counter()
            if is_last:
                break
    timed = seconds[job.warmup_steps :]
    return {**watch.figures(), "samples_a_second": len(timed) * job.batch_size / sum(timed)}


def least_seconds(
    started: float, ended: float, completed: list[tuple[float, int]], rate: float, burst: int
) -> float:
    """Return the time of a step: at each moment, what is not complete still has to be sent."""
    least, size = ended - started, 0
    for moment, more in reversed(completed):
        size += more
        least = max(least, moment - started + (size - burst) / rate)
    return max(least, size / rate)  # a link saves up for a burst
