"""The networks, the optimizer, and the learning rate at the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes.atari.config import Settings
from recipes.atari.game import Game
from recipes.atari.model import QNetwork
from recipes.pretrained import PretrainedError, load, read_parameters, renamed
from recipes.scaling import describe_scaling, scaled

DI_ENGINE_NAMES = (
    (r"^encoder\.main\.", "encoder."),
    (r"^encoder\.mid\.", "encoder.7."),
    (r"^head\.[AQ]\.0\.0\.", "advantages.0."),
    (r"^head\.[AQ]\.1\.0\.", "advantages.2."),
    (r"^head\.V\.0\.0\.", "value.0."),
    (r"^head\.V\.1\.0\.", "value.2."),
)


def make_networks(settings: Settings) -> dict[str, nn.Module]:
    """Make the networks `online` and `target` for the game's actions."""
    actions = Game(settings.game).actions
    return {name: QNetwork(settings.model, settings.game, actions) for name in ("online", "target")}


def load_pretrained(networks: dict[str, nn.Module], settings: Settings, *, evaluates: bool) -> str:
    """Load the file `pretrained` into both networks; describe it.

    It is an export of `online`, or a checkpoint of DI-engine's DQN. A last layer for another number
    of actions is not loaded; it is an error if the network `evaluates`. Raises `PretrainedError`.
    """
    path = settings.pretrained
    saved = read_parameters(path)
    if "encoder.mid.weight" in saved:
        saved = _from_di_engine(path, saved, settings)
    last = {"head": "advantages.2", "outputs": "actions", "evaluates": evaluates}
    notes = load(networks["online"], saved, path, **last)
    networks["target"].load_state_dict(networks["online"].state_dict())
    return "; ".join([f"loaded {path}", *notes])


def _from_di_engine(
    path: Path, saved: Mapping[str, Tensor], settings: Settings
) -> dict[str, Tensor]:
    """Return DI-engine's parameters with our names. Raises `PretrainedError` for other settings."""
    dueling = any(name.startswith("head.V.") for name in saved)
    needed = {"model.hidden_relu=false": settings.model.hidden_relu} | {
        f"model.dueling={str(dueling).lower()}": settings.model.dueling != dueling
    }
    if missing := " ".join(text for text, is_missing in needed.items() if is_missing):
        raise PretrainedError(f"{path} is a DQN of DI-engine, which needs {missing}")
    return {renamed(name, DI_ENGINE_NAMES): tensor for name, tensor in saved.items()}


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
