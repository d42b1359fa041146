"""What the networks are trained for, on one lane's strips [batch, tiles, 3, height, width]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.stain.model import weights_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recipes.stain.config import Settings
    from recipes.stain.model import Networks

# Goodfellow et al. 2014; Mao et al. 2017
GAN = {"vanilla": F.binary_cross_entropy_with_logits, "lsgan": F.mse_loss}


class Losses:
    """The losses of discriminators and of generators, each the weighted sum of those of the modalities and of Seg.

    Raises `SettingsError` for another number of weights than there are modalities and Seg.
    """

    def __init__(self, settings: Settings) -> None:
        self.names = (*settings.modalities, "seg")
        self.kinds = [*(settings.loss.gan for _ in settings.modalities), settings.loss.seg_gan]
        self.l1_weight = settings.loss.l1_weight
        self.discriminator_weights = weights_for(
            "loss.discriminator_weights", settings.loss.discriminator_weights, settings
        )
        self.generator_weights = weights_for(
            "loss.generator_weights", settings.loss.generator_weights, settings
        )

    def discriminators(
        self, networks: Networks, strips: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return how far discriminators are from telling strips from what generators make of their IHC, and the parts of it."""
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
        """Return how far generators are from passing for real and from the truth, and the parts of it."""
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
        """Return how far each map of logits is from saying `real` everywhere."""
        return {
            name: GAN[kind](logits, torch.full_like(logits, float(real)))
            for name, kind, logits in zip(self.names, self.kinds, maps, strict=True)
        }


def _named(losses: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {f"{name}_{kind}": loss for name, loss in losses.items()}
