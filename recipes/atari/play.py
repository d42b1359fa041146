"""Whole games for evaluation, several side by side; a game depends on the seed, its number and the network alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from recipes.atari.game import Game
from recipes.atari.model import best_actions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from recipes.atari.config import GameSettings


def play_games(model: nn.Module, numbers: Tensor, *, settings: GameSettings, seed: int, exploration: float) -> dict[str, Tensor]:
    """Play games to their ends; returns the points, float64, and the actions taken, int64, of each of `numbers` [games].

    A part of the actions, `exploration`, is random; each game has a generator of its own, seeded by `seed` and its number.
    """
    draws = [random.Random(f"{seed}, game {number}") for number in numbers.tolist()]
    games = [Game(settings) for _ in draws]
    observations = torch.stack([game.start(draw.randrange(2**31 - 1)) for game, draw in zip(games, draws, strict=True)])
    observations = observations[:, None].repeat(1, settings.frame_stack, 1, 1)  # [games, stack, H, W]
    lengths = torch.zeros(len(games), dtype=torch.int64)
    playing = list(range(len(games)))
    while playing:
        chosen = best_actions(model, observations[playing]).tolist() if exploration < 1 else [0] * len(playing)
        over = set()
        for index, best in zip(playing, chosen, strict=True):
            explores = draws[index].random() < exploration
            moment = games[index].play(draws[index].randrange(games[index].actions) if explores else best)
            observations[index] = torch.cat([observations[index, 1:], moment.frame[None]])
            lengths[index] += 1
            over |= {index} if moment.over else set()
        playing = [index for index in playing if index not in over]
    return {"return": torch.tensor([game.points for game in games], dtype=torch.float64), "actions": lengths}
