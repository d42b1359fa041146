"""The optimizer and the learning rate's schedule."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from recipes.vit.config import OptimizerSettings

NEVER_DECAYED = {"cls_token", "pos_embed"}


def make_optimizer(
    model: nn.Module, settings: OptimizerSettings, batch_size: int
) -> torch.optim.Optimizer:
    """Make AdamW (Loshchilov and Hutter 2019) or SGD for a model; biases, norms, class token and position embedding do not decay."""
    parameters = dict(model.named_parameters())
    decayed = {
        name
        for name, parameter in parameters.items()
        if parameter.ndim > 1 and name not in NEVER_DECAYED
    }
    groups = [
        {
            "params": [parameters[name] for name in parameters if name in decayed],
            "weight_decay": settings.weight_decay,
        },
        {
            "params": [parameters[name] for name in parameters if name not in decayed],
            "weight_decay": 0.0,
        },
    ]
    peak = scaled(settings, batch_size, settings.learning_rate)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=peak, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=peak, betas=settings.betas)


def make_scheduler(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, steps: int, warmup_steps: int
) -> LambdaLR:
    """Make a linear warm-up and then half a cosine from the peak to the final learning rate (Loshchilov and Hutter 2017)."""
    final = settings.final_learning_rate / settings.learning_rate
    return LambdaLR(optimizer, partial(factor, steps=steps, warmup_steps=warmup_steps, final=final))


def factor(step: int, *, steps: int, warmup_steps: int, final: float) -> float:
    """Return the learning rate of a step, in peaks."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    part = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return final + (1 - final) * (1 + math.cos(math.pi * part)) / 2


def scaled(settings: OptimizerSettings, batch_size: int, learning_rate: float) -> float:
    """Scale a learning rate with the batch size (Goyal et al. 2017, https://arxiv.org/abs/1706.02677)."""
    return learning_rate * batch_size / (settings.reference_batch_size or batch_size)


def describe_scaling(settings: OptimizerSettings, batch_size: int) -> str:
    """Say which learning rate is used, and from which it was scaled."""
    peak = scaled(settings, batch_size, settings.learning_rate)
    if settings.reference_batch_size is None:
        return f"peak learning rate {peak:g}, not scaled with the batch size"
    reference = f"{settings.learning_rate:g} at batch size {settings.reference_batch_size}"
    return f"peak learning rate {peak:g} at batch size {batch_size}, scaled from {reference}"
