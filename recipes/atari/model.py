"""The network that values actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recipes.settings import SettingsError

if TYPE_CHECKING:
    from recipes.atari.config import GameSettings, ModelSettings

KERNELS, STRIDES = (8, 4, 3), (4, 2, 1)


class QNetwork(nn.Module):
    """Values of all actions, given the newest frames: convolutions (Mnih et al. 2015), then two streams (Wang et al. 2016)."""

    def __init__(self, settings: ModelSettings, game: GameSettings, actions: int) -> None:
        super().__init__()
        if len(settings.channels) != len(KERNELS):
            raise SettingsError(
                f"model.channels={list(settings.channels)} was given; expected three numbers, one for each convolution"
            )
        width = game.frame_size
        for kernel, stride in zip(KERNELS, STRIDES, strict=True):
            width = (width - kernel) // stride + 1
        if width < 1:
            raise SettingsError(
                f"game.frame_size={game.frame_size} was given; expected at least 36 pixels: the convolutions need them"
            )
        layers: list[nn.Module] = []
        for before, after, kernel, stride in zip(
            (game.frame_stack, *settings.channels),
            settings.channels,
            KERNELS,
            STRIDES,
            strict=False,
        ):
            layers += [nn.Conv2d(before, after, kernel, stride), nn.ReLU()]
        self.encoder = nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(settings.channels[-1] * width**2, settings.features),
            nn.ReLU(),
        )
        self.advantages = head(settings.features, actions)
        self.value = head(settings.features, 1) if settings.dueling else None

    def forward(self, observations: Tensor) -> Tensor:
        """Return values, float32 [batch, actions], of uint8 observations [batch, stack, H, W]."""
        features = self.encoder(observations.float() / 255)
        advantages = self.advantages(features).float()
        if self.value is None:
            return advantages
        # equation 9
        return self.value(features).float() + advantages - advantages.mean(1, keepdim=True)


def head(features: int, outputs: int) -> nn.Sequential:
    """Return a stream: a hidden layer and the outputs."""
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, outputs))


@torch.no_grad()
def best_actions(model: nn.Module, observations: Tensor) -> Tensor:
    """Return the action of the highest value for each observation, on the CPU: int64 [batch]."""
    device = next(model.parameters()).device
    return model(observations.to(device)).argmax(1).cpu()
