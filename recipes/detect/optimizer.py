"""The optimizer and the learning rate schedule, both scaled with the batch size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from recipes.detect.config import OptimizerSettings

WARMUP_START = 1 / 3
DECAY = 0.1


class Schedule(NamedTuple):
    """The learning rate at a batch size, by the linear scaling rule (Goyal et al. 2017)."""

    learning_rate: float
    steps: int
    warmup_steps: int
    decay_steps: tuple[int, ...]

    def factor(self, step: int) -> float:
        """Return the learning rate of a step as a fraction of the peak."""
        warmup = min(1.0, WARMUP_START + (1 - WARMUP_START) * step / max(1, self.warmup_steps))
        return warmup * DECAY ** sum(step >= decay for decay in self.decay_steps)


def make_schedule(settings: OptimizerSettings, batch_size: int) -> Schedule:
    """Scale the schedule from its reference batch size to `batch_size`."""
    scale = batch_size / settings.reference_batch_size
    unscaled = (settings.steps, settings.warmup_steps, *settings.decay_steps)
    steps, warmup_steps, *decay_steps = (max(1, round(number / scale)) for number in unscaled)
    return Schedule(settings.learning_rate * scale, steps, warmup_steps, tuple(decay_steps))


def describe(schedule: Schedule, settings: OptimizerSettings, batch_size: int) -> str:
    """Describe the schedule and how it was scaled."""
    decays = ", ".join(map(str, schedule.decay_steps)) or "never"
    return (
        f"peak learning rate {schedule.learning_rate:g}, {schedule.steps} steps, decays at "
        f"{decays}, at batch size {batch_size},\nscaled from {settings.learning_rate:g} and "
        f"{settings.steps} steps at batch size {settings.reference_batch_size}"
    )


def make_optimizer(
    model: nn.Module, settings: OptimizerSettings, schedule: Schedule
) -> torch.optim.Optimizer:
    """Make SGD with momentum or AdamW; biases, norms and scales do not decay."""
    groups = [
        {
            "params": [
                parameter for parameter in model.parameters() if (parameter.ndim > 1) == decays
            ],
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=schedule.learning_rate, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=schedule.learning_rate)


def make_scheduler(optimizer: torch.optim.Optimizer, schedule: Schedule) -> LambdaLR:
    """Make the scheduler that follows a schedule."""
    return LambdaLR(optimizer, schedule.factor)
