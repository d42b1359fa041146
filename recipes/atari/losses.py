"""The loss of a lane's samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.atari.config import OptimizerSettings
from recipes.atari.lane import LaneBatch


def td_loss(
    networks: dict[str, nn.Module], batch: LaneBatch, *, settings: OptimizerSettings
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Return the loss of a lane's temporal differences (Mnih et al. 2015), and metrics.

    With `double`, by double Q-learning (van Hasselt et al. 2016).
    """
    samples = batch.samples
    values = networks["online"](samples.observations)  # [batch, actions]
    value = values.gather(1, samples.actions[:, None])[:, 0]  # [batch]
    with torch.no_grad():
        next_values = networks["target"](samples.next_observations)
        choosing = networks["online"](samples.next_observations) if settings.double else next_values
        next_value = next_values.gather(1, choosing.argmax(1, keepdim=True))[:, 0]
        goal = samples.returns + samples.discounts * next_value
    samples.report_errors((goal - value).abs())
    loss_fn = F.huber_loss if settings.loss == "huber" else F.mse_loss
    losses = loss_fn(value, goal, reduction="none")
    metrics = {
        "value": values.max(1).values.mean(),
        "exploration": batch.exploration,
        "environment_steps": batch.environment_steps,
    }
    if batch.recent_return is not None:  # the mean is over lanes that have finished a game
        metrics["training_return"] = batch.recent_return
    return (samples.weights * losses).mean(), metrics
