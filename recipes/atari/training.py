"""The networks, the optimizer, and the learning rate at the batch size."""

from __future__ import annotations

import torch
from torch import nn

from recipes.atari.config import Settings
from recipes.atari.game import Game
from recipes.atari.model import QNetwork
from recipes.pretrained import load, read_parameters
from recipes.scaling import describe_scaling, scaled


def make_networks(settings: Settings) -> dict[str, nn.Module]:
    """Make the networks `online` and `target` for the game's actions."""
    actions = Game(settings.game).actions
    return {name: QNetwork(settings.model, settings.game, actions) for name in ("online", "target")}


def load_pretrained(networks: dict[str, nn.Module], settings: Settings, *, evaluates: bool) -> str:
    """Load the file `pretrained`, an export of `online`, into both networks; describe it.

    A last layer for another number of actions is not loaded; it is an error if the network
    `evaluates`. Raises `PretrainedError`.
    """
    path = settings.pretrained
    last = {"head": "advantages.2", "outputs": "actions", "evaluates": evaluates}
    notes = load(networks["online"], read_parameters(path), path, **last)
    networks["target"].load_state_dict(networks["online"].state_dict())
    return "; ".join([f"loaded {path}", *notes])


def make_optimizer(online: nn.Module, settings: Settings) -> torch.optim.Adam:
    """Make Adam with the learning rate scaled to the batch size."""
    adam, batch_size = settings.optimizer, settings.batch_size
    rate = scaled(adam.learning_rate, adam.reference_batch_size, batch_size)
    return torch.optim.Adam(online.parameters(), lr=rate, eps=adam.epsilon)


def describe_rate(settings: Settings) -> str:
    """Describe the learning rate and how it was scaled."""
    adam = settings.optimizer
    rates = {"learning rate": adam.learning_rate}
    return describe_scaling(rates, adam.reference_batch_size, settings.batch_size)
