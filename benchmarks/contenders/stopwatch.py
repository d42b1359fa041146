"""Measurements of all contenders: speed between the same steps, final memory and final loss."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.jobs import Job

LOGS = "STEP_LOGS"  # environment variable: a directory for the times of steps

_KEPT: list[object] = []


class Stopwatch:
    """Count a worker's steps, and time those after the warm-up.

    If `STEP_LOGS` is set, steps never end. The file of that directory that is named after the
    worker's rank gets a line per step: when it began, when it ended, and its time, in seconds.
    """

    def __init__(self, job: Job) -> None:
        self.steps = job.warmup_steps + job.steps
        self._log = None
        if LOGS in os.environ:
            path = Path(os.environ[LOGS], os.environ["RANK"])
            self._log, self.steps = path.open("w", buffering=1, encoding="ascii"), sys.maxsize
        self._since = time.perf_counter()  # of the current step
        self._job = job
        self._done = 0
        self._started = self._seconds = math.nan
        self._loss = math.nan

    def epochs(self) -> Iterator[int]:
        """Yield 0, 1, 2, … until all steps are done."""
        for epoch in count():
            if self._done == self.steps:
                return
            yield epoch

    def step(self, loss: torch.Tensor | float) -> bool:
        """Count a step that just ended with a loss; return whether it was the last one."""
        now = time.perf_counter()
        seconds = self._time(now)
        if self._log is not None:
            print(self._since, now, seconds, file=self._log)
        self._done += 1
        if self._done == self._job.warmup_steps:
            self._started = time.perf_counter()
        if self._done == self.steps:
            self._seconds = time.perf_counter() - self._started
            self._loss = torch.as_tensor(loss).item()
        self._since = time.perf_counter()
        return self._done == self.steps

    def _time(self, now: float) -> float:
        """Return the time of the step that ends now."""
        return now - self._since

    def figures(self) -> dict[str, float]:
        """Return the speed of all workers, this worker's memory, and its loss at the last step."""
        speed = self._job.steps * self._job.batch_size / self._seconds
        return {"samples_a_second": speed, "memory_megabytes": memory(), "loss": self._loss}


def memory() -> float:
    """Return this process's memory in megabytes, with its share of shared memory (PSS)."""
    match = re.search(
        r"^Pss:\s+(\d+) kB",
        Path("/proc/self/smaps_rollup").read_text(encoding="ascii"),
        re.MULTILINE,
    )
    return int(match[1]) / 1024 if match else math.nan


def keep(used: object) -> None:
    """Keep an object of torch.distributed until the process exits.

    torch 2.13 can deadlock if it is destroyed while gloo's thread releases a tensor.
    """
    _KEPT.append(used)


def over_workers(figures: dict[str, float]) -> dict[str, float]:
    """Return the means of all workers' figures, over torch.distributed's default group."""
    keep(dist.group.WORLD)
    values = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(values)
    return dict(zip(figures, (values / dist.get_world_size()).tolist(), strict=True))
