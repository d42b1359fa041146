"""Complete games for evaluation, several in parallel.

A game depends only on the seed, its number and the network.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recipes.atari.config import GameSettings
from recipes.atari.game import Game
from recipes.atari.model import best_actions

FILMED = 8  # screens of a game


class Film:
    """Some screens of a game of any length, evenly spaced from its start to its end."""

    def __init__(self) -> None:
        self._screens: list[NDArray[np.uint8]] = []
        self._seen, self._every = 0, 1

    def add(self, game: Game) -> None:
        """Add the screen after an action."""
        if self._seen % self._every == 0:
            self._screens.append(game.screen())
        # The length of the game is not known: keep every other screen, also from here on.
        if len(self._screens) == 2 * FILMED:
            self._screens, self._every = self._screens[::2], 2 * self._every
        self._seen += 1

    def strip(self) -> NDArray[np.uint8]:
        """Return `FILMED` screens side by side, uint8 [height, FILMED * width, 3]."""
        chosen = np.linspace(0, len(self._screens) - 1, FILMED).round().astype(int)
        return np.concatenate([self._screens[number] for number in chosen], axis=1)


def play_games(
    model: nn.Module, numbers: Tensor, *, settings: GameSettings, seed: int, exploration: float
) -> dict[str, Any]:
    """Play the games `numbers` [games] to their ends, with a fraction of random actions.

    Returns the points per game, float64, the number of actions, int64, and a film of game 0, None
    for other games. Each game has its own generator, seeded by `seed` and its number.
    """
    names = numbers.tolist()
    draws = [random.Random(f"{seed}, game {number}") for number in names]
    games = [Game(settings) for _ in draws]
    observations = torch.stack(
        [game.start(draw.randrange(2**31 - 1)) for game, draw in zip(games, draws, strict=True)]
    )
    observations = observations[:, None].repeat(1, settings.frame_stack, 1, 1)  # [games, stack, …]
    lengths = torch.zeros(len(games), dtype=torch.int64)
    film, playing = Film(), list(range(len(games)))
    while playing:
        chosen = [0] * len(playing)
        if exploration < 1:
            chosen = best_actions(model, observations[playing]).tolist()
        over = set()
        for index, best in zip(playing, chosen, strict=True):
            game, draw = games[index], draws[index]
            explores = draw.random() < exploration
            moment = game.play(draw.randrange(game.actions) if explores else best)
            observations[index] = torch.cat([observations[index, 1:], moment.frame[None]])
            lengths[index] += 1
            if names[index] == 0:
                film.add(game)
            over |= {index} if moment.over else set()
        playing = [index for index in playing if index not in over]
    return {
        "return": torch.tensor([game.points for game in games], dtype=torch.float64),
        "actions": lengths,
        "film": [film.strip() if number == 0 else None for number in names],
    }


def scores_of(played: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean and the standard deviation of the returns, and the mean number of actions."""
    returns = played["return"]
    return {
        "return": returns.mean().item(),
        "return_deviation": returns.std(correction=0).item(),
        "actions": played["actions"].double().mean().item(),
    }


def shown(scores: dict[str, float]) -> str:
    """Format scores for people."""
    actions = f"{scores['actions']:.0f} actions per game"
    return f"return {scores['return']:.1f} ± {scores['return_deviation']:.1f}, {actions}"
