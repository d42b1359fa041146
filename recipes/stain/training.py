"""The losses on a lane's strips [batch, tiles, 3, height, width], the optimizers and schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    ReduceLROnPlateau,
    StepLR,
)

from recipes.scaling import describe_scaling, scaled
from recipes.settings import SettingsError
from recipes.stain.config import OptimizerSettings, Settings
from recipes.stain.model import Networks, weights_for

# Goodfellow et al. 2014; Mao et al. 2017
GAN = {"vanilla": F.binary_cross_entropy_with_logits, "lsgan": F.mse_loss}
STEP_FACTOR = 0.1
PLATEAU_FACTOR = 0.2
LEAST_IMPROVEMENT = 0.01  # relative


class Losses:
    """The losses of discriminators and of generators: weighted sums over modalities and Seg.

    Raises `SettingsError` for a wrong number of weights.
    """

    def __init__(self, settings: Settings) -> None:
        self.names = (*settings.modalities, "seg")
        self.kinds = [*(settings.loss.gan for _ in settings.modalities), settings.loss.seg_gan]
        self.l1_weight = settings.loss.l1_weight
        self.discriminator_weights, self.generator_weights = (
            weights_for(f"loss.{name}", getattr(settings.loss, name), settings)
            for name in ("discriminator_weights", "generator_weights")
        )

    def discriminators(
        self, networks: Networks, strips: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of distinguishing strips from generated ones, and its parts."""
        with torch.no_grad():
            made = networks.generators(strips[:, 0])
        fake = self._gan(networks.discriminators(strips, made), real=False)
        real = self._gan(networks.discriminators(strips, strips[:, 1:]), real=True)
        total = sum(
            weight * (fake[name] + real[name]) / 2
            for name, weight in zip(self.names, self.discriminator_weights, strict=True)
        )
        return total, {**_named(fake, "fake"), **_named(real, "real")}

    def generators(self, networks: Networks, strips: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of deceiving the discriminators and matching the truth, and its parts."""
        made, truth = networks.generators(strips[:, 0]), strips[:, 1:]
        gan = self._gan(networks.discriminators(strips, made), real=True)
        l1 = {
            name: F.smooth_l1_loss(made[:, number], truth[:, number])
            for number, name in enumerate(self.names)
        }
        total = sum(
            weight * (gan[name] + self.l1_weight * l1[name])
            for name, weight in zip(self.names, self.generator_weights, strict=True)
        )
        return total, {**_named(gan, "gan"), **_named(l1, "l1")}

    def _gan(self, maps: Sequence[Tensor], *, real: bool) -> dict[str, Tensor]:
        return {
            name: GAN[kind](logits, torch.full_like(logits, float(real)))
            for name, kind, logits in zip(self.names, self.kinds, maps, strict=True)
        }


def _named(losses: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {f"{name}_{kind}": loss for name, loss in losses.items()}


def make_optimizers(
    settings: OptimizerSettings, networks: Networks, batch_size: int
) -> dict[str, Optimizer]:
    """Make Adam for all generators, and for all discriminators, with scaled learning rates."""
    rates = {
        "generators": settings.generator_learning_rate,
        "discriminators": settings.discriminator_learning_rate,
    }
    return {
        name: Adam(
            getattr(networks, name).parameters(),
            scaled(rate, settings.reference_batch_size, batch_size),
            settings.betas,
        )
        for name, rate in rates.items()
    }


def describe_rates(settings: OptimizerSettings, batch_size: int) -> str:
    """Describe both learning rates and how they were scaled."""
    rates = {
        "learning rate of generators": settings.generator_learning_rate,
        "of discriminators": settings.discriminator_learning_rate,
    }
    return describe_scaling(rates, settings.reference_batch_size, batch_size)


def make_schedulers(
    settings: Settings, optimizers: Mapping[str, Optimizer]
) -> dict[str, LRScheduler]:
    """Make the schedule of each optimizer, as `make_scheduler` does."""
    return {
        name: make_scheduler(optimizer, settings.optimizer, settings.epochs)
        for name, optimizer in optimizers.items()
    }


def make_scheduler(optimizer: Optimizer, settings: OptimizerSettings, epochs: int) -> LRScheduler:
    """Make the schedule `optimizer.policy`; "linear" and "cosine" reach 0 after `epochs` epochs.

    Raises `SettingsError` if `optimizer.decay_epochs` is out of range.
    """
    if settings.policy == "linear":
        decay = epochs // 2 if settings.decay_epochs is None else settings.decay_epochs
        if not 0 <= decay <= epochs:
            raise SettingsError(f"optimizer.decay_epochs must be 0 to {epochs}, got {decay}")
        return LambdaLR(optimizer, lambda epoch: min(1.0, (epochs - epoch) / (decay + 1)))
    if settings.policy == "step":
        return StepLR(optimizer, settings.step_epochs, STEP_FACTOR)
    if settings.policy == "cosine":
        return CosineAnnealingLR(optimizer, epochs)
    return ReduceLROnPlateau(
        optimizer, factor=PLATEAU_FACTOR, patience=settings.patience, threshold=LEAST_IMPROVEMENT
    )


def tracked(
    networks: Networks,
    optimizers: Mapping[str, Optimizer],
    schedulers: Mapping[str, LRScheduler],
) -> dict[str, Any]:
    """Return the objects of a snapshot by name."""
    return {
        "generators": networks.generators,
        "discriminators": networks.discriminators,
        **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()},
        **{f"{name}_scheduler": scheduler for name, scheduler in schedulers.items()},
    }


def end_epoch(schedulers: Iterable[LRScheduler]) -> None:
    """Step the schedulers after an epoch, except those that follow scores."""
    for scheduler in schedulers:
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()


def end_evaluation(schedulers: Iterable[LRScheduler], held_out_l1: float) -> None:
    """Step the schedulers that follow scores after an evaluation."""
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(held_out_l1)
