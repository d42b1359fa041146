"""The least time of a step that links between hosts allow.

A worker computes its part of each batch alone, and notes when autograd completes each gradient. The
host of the worker sends these at the full rate of its link, each as soon as it is complete, but a
burst of bytes at once. An all-reduce over H hosts sends 2 (H - 1) / H times their size. Everything
else that a network needs takes no time.
"""

from __future__ import annotations

import math
import os
import time

import torch
from torch import Tensor

from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.contenders.with_plain_loop import train_parts
from benchmarks.jobs import Job

RATE, BURST, HOSTS = "LINK_BYTES_A_SECOND", "LINK_BURST_BYTES", "LINK_HOSTS"


def train(job: Job, *, itemsize: int = 4) -> dict[str, float]:
    """Train on a part of each batch; return the speed of all workers with such a link."""
    parts = job.build()
    watch = IdealStopwatch(job, float(os.environ[RATE]), int(os.environ[BURST]))
    hosts = int(os.environ[HOSTS])
    for parameter in parts.model.parameters():
        watch.note(parameter, itemsize * 2 * (hosts - 1) // hosts)
    train_parts(parts, watch, job.batch_size // int(os.environ["WORLD_SIZE"]), fused=True)
    return watch.figures()


class IdealStopwatch(Stopwatch):
    """Times steps as if the gradients were sent over a link of `rate` bytes a second."""

    def __init__(self, job: Job, rate: float, burst: int) -> None:
        super().__init__(job)
        self._rate, self._burst = rate, burst
        self._completed: list[tuple[float, int]] = []  # moment and size of each gradient
        self._least: list[float] = []  # seconds of each step

    def note(self, parameter: torch.nn.Parameter, itemsize: int) -> None:
        """Note when autograd completes the parameter's gradient."""

        def complete(_: Tensor) -> None:
            self._completed.append((time.perf_counter(), parameter.numel() * itemsize))

        parameter.register_post_accumulate_grad_hook(complete)

    def _time(self, now: float) -> float:
        seconds = least_seconds(self._since, now, self._completed, self._rate, self._burst)
        self._least.append(seconds)
        self._completed.clear()
        return seconds

    def figures(self) -> dict[str, float]:
        """Return the speed with the link."""
        timed = self._least[self._job.warmup_steps :]
        speed = len(timed) * self._job.batch_size / math.fsum(timed)
        return {**super().figures(), "samples_a_second": speed}


def least_seconds(
    started: float, ended: float, completed: list[tuple[float, int]], rate: float, burst: int
) -> float:
    """Return the time of a step: at each moment, what is not complete still has to be sent."""
    least, size = ended - started, 0
    for moment, more in reversed(completed):
        size += more
        least = max(least, moment - started + (size - burst) / rate)
    return max(least, size / rate)  # a link saves up for a burst
