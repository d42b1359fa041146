"""Contenders: ways to train a job, each as its own documentation teaches.

They share the job and the stopwatch. `python -m benchmarks.contenders NAME JOB` is one worker of a
contender, and `Contender.command` starts all of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from benchmarks import turns
from benchmarks.jobs import Job

WORKERS = 2


@dataclass(frozen=True)
class Contender:
    """A way to train a job: `train` in `module` with `options`.

    A tuned peer has options beyond the first pages of its documentation. Those with 16 bits
    exchange rounded gradients, so they are compared to each other only. A bound exchanges nothing.
    """

    title: str
    module: str
    role: Literal["reference", "peer", "tuned peer", "ours", "16-bit", "bound"] = "peer"
    options: dict[str, Any] = field(default_factory=dict)

    def train(self, job: Job) -> dict[str, float]:
        """Train as one of the workers; return figures."""
        return self.load().train(job, **self.options)

    def load(self) -> ModuleType:
        """Import the libraries of this contender only."""
        return import_module(f"{__name__}.{self.module}")


CONTENDERS = {
    "plain": Contender("plain loop, one worker", "with_plain_loop", "reference"),
    "plain-fused": Contender(
        "plain loop, fused AdamW", "with_plain_loop", "reference", {"fused": True}
    ),
    "ddp": Contender("DDP", "with_ddp"),
    "ddp-fused": Contender(
        "DDP, fused AdamW",
        "with_ddp",
        "tuned peer",
        {"fused": True, "gradient_as_bucket_view": True},
    ),
    "ddp-fp16": Contender(
        "DDP, fused AdamW, fp16 hook",
        "with_ddp",
        "16-bit",
        {"fused": True, "gradient_as_bucket_view": True, "fp16": True},
    ),
    "accelerate": Contender("Accelerate", "with_accelerate"),
    "fabric": Contender("Fabric", "with_fabric"),
    "ignite": Contender("Ignite", "with_ignite"),
    "zero1": Contender("ZeRO-1 (torch)", "with_ddp", options={"zero": True}),
    "all-reduce": Contender("all-reduce per parameter", "with_all_reduce"),
    "samestep": Contender("samestep", "with_samestep", "ours"),
    "samestep-16": Contender(
        "samestep, bfloat16 exchange", "with_samestep", "16-bit", {"exchange_dtype": "bfloat16"}
    ),
    "ideal": Contender("ideal link", "with_ideal_link", "bound"),
    "ideal-16": Contender("ideal link, 16 bits", "with_ideal_link", "bound", {"itemsize": 2}),
}


def command(name: str, job: str) -> list[str]:
    """Return the command that trains a job with all workers of a contender."""
    module = [__name__, name, job]
    contender = CONTENDERS[name]
    if contender.role == "reference":
        return [sys.executable, "-m", *module]
    launcher = turns.samestep if contender.module == "with_samestep" else turns.torchrun
    return launcher(WORKERS, *module)
