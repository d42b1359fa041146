"""The least time of a step that a link between two hosts allows.

A worker computes its part of each batch alone. Its gradients take as long as their bytes and the
headers of TCP need at the link's rate, each from when autograd has completed it, but a burst of
bytes takes no time. The update waits until the last gradient would have arrived. Nothing is sent,
so the CPU has no work for the network.
"""

from __future__ import annotations

import os
import time
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.contenders.with_plain_loop import train_parts
from benchmarks.jobs import Job

RATE, BURST = "LINK_BYTES_A_SECOND", "LINK_BURST_BYTES"
PAYLOAD = 1448 / 1514  # of an Ethernet frame: the rest is headers of Ethernet, IP and TCP


def train(job: Job, *, itemsize: int = 4) -> dict[str, float]:
    """Train on a part of each batch; return the speed of all workers with such a link."""
    parts, watch = job.build(), Stopwatch(job)
    link = Link(PAYLOAD * float(os.environ[RATE]), PAYLOAD * float(os.environ[BURST]))

    def send(parameter: Tensor) -> None:
        link.send(parameter.numel() * itemsize, time.perf_counter())

    def wait(*_: Any) -> None:
        time.sleep(max(0.0, link.arrives_at - time.perf_counter()))

    for parameter in parts.model.parameters():
        parameter.register_post_accumulate_grad_hook(send)
    hook = register_optimizer_step_pre_hook(wait)
    train_parts(parts, watch, job.batch_size // int(os.environ["WORLD_SIZE"]), fused=True)
    hook.remove()
    return watch.figures()


class Link:
    """A link of `rate` bytes a second, which saves up for `burst` bytes at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst_seconds = rate, burst / rate
        self.arrives_at = -self._burst_seconds  # what was sent last

    def send(self, size: int, now: float) -> None:
        """Send bytes after all others."""
        self.arrives_at = max(self.arrives_at, now - self._burst_seconds) + size / self._rate
