"""The network that estimates the values of actions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes.atari.config import GameSettings, ModelSettings
from recipes.settings import SettingsError

KERNELS, STRIDES = (8, 4, 3), (4, 2, 1)
LEAST_FRAME_SIZE = 36  # pixels, for the convolutions


class QNetwork(nn.Module):
    """Convolutions (Mnih et al. 2015), then streams for value and advantages (Wang et al. 2016)."""

    def __init__(self, settings: ModelSettings, game: GameSettings, actions: int) -> None:
        super().__init__()
        channels, width = settings.channels, game.frame_size
        if len(channels) != len(KERNELS):
            numbers = f"{len(KERNELS)} numbers, one per convolution"
            raise SettingsError(f"model.channels must be {numbers}, got {list(channels)}")
        if width < LEAST_FRAME_SIZE:
            raise SettingsError(f"game.frame_size must be at least {LEAST_FRAME_SIZE}, got {width}")
        layers: list[nn.Module] = []
        inputs = (game.frame_stack, *channels[:-1])
        for before, after, kernel, stride in zip(inputs, channels, KERNELS, STRIDES, strict=True):
            layers += [nn.Conv2d(before, after, kernel, stride), nn.ReLU()]
            width = (width - kernel) // stride + 1
        hidden = nn.Linear(channels[-1] * width**2, settings.features)
        self.encoder = nn.Sequential(*layers, nn.Flatten(), hidden)
        if settings.hidden_relu:
            self.encoder.append(nn.ReLU())
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
    """Make a stream: a hidden layer and the outputs."""
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, outputs))


@torch.no_grad()
def best_actions(model: nn.Module, observations: Tensor) -> Tensor:
    """Return the action with the highest value for each observation, on the CPU: int64 [batch]."""
    device = next(model.parameters()).device
    return model(observations.to(device)).argmax(1).cpu()
