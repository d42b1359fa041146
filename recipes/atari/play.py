"""Whole games for evaluation, several side by side; a game depends on the seed, its number and the network alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recipes.atari.game import Game
from recipes.atari.model import best_actions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recipes.atari.config import GameSettings

FILMED = 8  # screens of a game


class Film:
    """Some screens of a game, evenly apart from its start to its end, however long it lasts."""

    def __init__(self) -> None:
        self._screens: list[NDArray[np.uint8]] = []
        self._seen, self._every = 0, 1

    def see(self, game: Game) -> None:
        """Look at a game after an action."""
        if self._seen % self._every == 0:
            self._screens.append(game.screen())
        # nobody knows how long the game will last: keep every other one, also from here on
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
    """Play games to their ends; returns for each of `numbers` [games] the points, float64, the actions taken, int64, and a film.

    A part of the actions, `exploration`, is random; each game has a generator of its own, seeded by
    `seed` and its number. Only game 0 is filmed, and others have None.
    """
    names = numbers.tolist()
    draws = [random.Random(f"{seed}, game {number}") for number in names]
    games = [Game(settings) for _ in draws]
    observations = torch.stack(
        [game.start(draw.randrange(2**31 - 1)) for game, draw in zip(games, draws, strict=True)]
    )
    # [games, stack, H, W]
    observations = observations[:, None].repeat(1, settings.frame_stack, 1, 1)
    lengths = torch.zeros(len(games), dtype=torch.int64)
    film, playing = Film(), list(range(len(games)))
    while playing:
        chosen = (
            best_actions(model, observations[playing]).tolist()
            if exploration < 1
            else [0] * len(playing)
        )
        over = set()
        for index, best in zip(playing, chosen, strict=True):
            explores = draws[index].random() < exploration
            moment = games[index].play(
                draws[index].randrange(games[index].actions) if explores else best
            )
            observations[index] = torch.cat([observations[index, 1:], moment.frame[None]])
            lengths[index] += 1
            if names[index] == 0:
                film.see(games[index])
            over |= {index} if moment.over else set()
        playing = [index for index in playing if index not in over]
    points = torch.tensor([game.points for game in games], dtype=torch.float64)
    return {
        "return": points,
        "actions": lengths,
        "film": [film.strip() if number == 0 else None for number in names],
    }


def scores_of(played: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean and the standard deviation of the returns of games, and the mean of the actions taken."""
    returns = played["return"]
    return {
        "return": returns.mean().item(),
        "return_deviation": returns.std(correction=0).item(),
        "actions": played["actions"].double().mean().item(),
    }


def shown(scores: dict[str, float]) -> str:
    """Return scores as a person reads them."""
    return f"return {scores['return']:.1f} ± {scores['return_deviation']:.1f}, {scores['actions']:.0f} actions a game"
