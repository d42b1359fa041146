"""The optimizer, and the schedule by steps: both scaled with the batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from recipes.detect.config import OptimizerSettings

WARMUP_START = 1 / 3
DECAY = 0.1


class Schedule(NamedTuple):
    """The learning rate at a batch size: the linear scaling rule of Goyal et al. 2017 (https://arxiv.org/abs/1706.02677)."""

    learning_rate: float
    steps: int
    warmup_steps: int
    decay_steps: tuple[int, ...]

    def factor(self, step: int) -> float:
        """Return the learning rate of a step, in peaks: linear from a third, then a tenth less at each decay."""
        warmup = min(1.0, WARMUP_START + (1 - WARMUP_START) * step / max(1, self.warmup_steps))
        return warmup * DECAY ** sum(step >= decay for decay in self.decay_steps)


def make_schedule(settings: OptimizerSettings, batch_size: int) -> Schedule:
    """Scale the schedule from its reference batch size: half the batch is half the learning rate and twice the steps."""
    scale = batch_size / settings.reference_batch_size
    steps, warmup_steps, *decay_steps = (
        max(1, round(s / scale))
        for s in (settings.steps, settings.warmup_steps, *settings.decay_steps)
    )
    return Schedule(settings.learning_rate * scale, steps, warmup_steps, tuple(decay_steps))


def describe(schedule: Schedule, settings: OptimizerSettings, batch_size: int) -> str:
    """Say which schedule is used, and from which it was scaled."""
    decays = ", ".join(map(str, schedule.decay_steps)) or "never"
    return (
        f"peak learning rate {schedule.learning_rate:g}, {schedule.steps} steps, decays at {decays}, at batch size {batch_size}; "
        f"scaled from {settings.learning_rate:g} and {settings.steps} steps at batch size {settings.reference_batch_size}"
    )


def make_optimizer(
    model: nn.Module, settings: OptimizerSettings, schedule: Schedule
) -> torch.optim.Optimizer:
    """Make SGD with momentum or AdamW for a model; biases, norms and scales do not decay."""
    parameters = list(model.parameters())
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim > 1],
            "weight_decay": settings.weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.ndim <= 1],
            "weight_decay": 0.0,
        },
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=schedule.learning_rate, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=schedule.learning_rate)


def make_scheduler(optimizer: torch.optim.Optimizer, schedule: Schedule) -> LambdaLR:
    """Make the scheduler that follows a schedule."""
    return LambdaLR(optimizer, schedule.factor)
