"""How a learning rate changes by epoch: DeepLIIF's four policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR

from recipes.settings import SettingsError

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from recipes.stain.config import OptimizerSettings

STEP_FACTOR = 0.1
PLATEAU_FACTOR = 0.2
LEAST_IMPROVEMENT = 0.01  # relative


def make_scheduler(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, epochs: int
) -> LRScheduler:
    """Make the schedule that `optimizer.policy` names, over `epochs` epochs; "linear" and "cosine" reach 0 after the last.

    Raises `SettingsError` for epochs that do not fit.
    """
    if settings.policy == "linear":
        decay = epochs // 2 if settings.decay_epochs is None else settings.decay_epochs
        if not 0 <= decay <= epochs:
            raise SettingsError(
                f"optimizer.decay_epochs={decay} was given; expected 0 to epochs={epochs}"
            )
        return LambdaLR(optimizer, lambda epoch: min(1.0, (epochs - epoch) / (decay + 1)))
    if settings.policy == "step":
        return StepLR(optimizer, settings.step_epochs, STEP_FACTOR)
    if settings.policy == "cosine":
        return CosineAnnealingLR(optimizer, epochs)
    return ReduceLROnPlateau(
        optimizer, factor=PLATEAU_FACTOR, timeout=settings.timeout, threshold=LEAST_IMPROVEMENT
    )


def end_epoch(scheduler: LRScheduler, held_out_l1: float | None) -> None:
    """Take a scheduler past an epoch; a plateau is found in `held_out_l1`, where the epoch ended with an evaluation."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()
    elif held_out_l1 is not None:
        scheduler.step(held_out_l1)
