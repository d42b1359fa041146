"""A lane's source of samples: its own games, played with the current network, and its replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipes.atari.config import CollectSettings, Settings
from recipes.atari.game import Game, Moment
from recipes.atari.model import best_actions
from recipes.atari.replay import PrioritizedReplay, Replay, Samples

RECENT_GAMES = 20


class LaneBatch(NamedTuple):
    """A lane's share of a batch, with the state of the collection."""

    samples: Samples
    environment_steps: int  # so far, over all lanes
    exploration: float
    recent_return: float | None  # mean of the lane's last games; None before the first has ended


class Lane:
    """Endless samples of one of `lanes` lanes, for `run.streams`.

    All lanes play in step, so each one knows the number of environment steps over all lanes. Random
    draws use torch's generator, which samestep seeds for each item of a lane, so the state of no
    generator is saved.
    """

    def __init__(self, settings: Settings, model: nn.Module, lanes: int) -> None:
        self._settings, self._model = settings, model
        environments = settings.collect.environments // lanes
        self._batch_size = settings.batch_size // lanes
        self._games = [Game(settings.game) for _ in range(environments)]
        rows = settings.replay.size // settings.collect.environments
        replay = PrioritizedReplay if settings.replay.prioritized else Replay
        self._replay = replay(settings.replay, settings.game, rows, environments)
        self._returns: list[float] = []  # of the last games
        self._plays = 0  # actions in each game
        self._drawn_batches = 0

    def __iter__(self) -> Lane:
        return self

    def __next__(self) -> LaneBatch:
        """Collect if it is time to, and draw a lane's share of a batch."""
        collect, start = self._settings.collect, self._settings.replay.priority_correction
        if self._plays == 0:
            self._replay.begin_row(torch.stack([game.start(draw_seed()) for game in self._games]))
        while self._environment_steps() < collect.warmup_steps or not self._replay.ready():
            self._play(exploration=1.0)
        if self._drawn_batches % collect.updates == 0:
            for _ in range(collect.steps):
                self._play(exploration_after(self._environment_steps(), collect))
        correction = start + (1 - start) * self._drawn_batches / self._settings.updates
        self._drawn_batches += 1
        return LaneBatch(
            self._replay.draw(self._batch_size, correction),
            environment_steps=self._environment_steps(),
            exploration=exploration_after(self._environment_steps(), collect),
            recent_return=sum(self._returns) / len(self._returns) if self._returns else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of emulators, replay and counters."""
        return {
            "games": [game.state_dict() for game in self._games],
            "replay": self._replay.state_dict(),
            "returns": list(self._returns),
            "plays": self._plays,
            "given": self._drawn_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._replay.load_state_dict(state["replay"])
        for game, its_state in zip(self._games, state["games"], strict=True):
            game.load_state_dict(its_state)
        self._returns, self._plays = list(state["returns"]), state["plays"]
        self._drawn_batches = state["given"]

    def _environment_steps(self) -> int:
        return self._plays * self._settings.collect.environments

    def _play(self, exploration: float) -> None:
        """Take one action in each game; a fraction `exploration` of them is random."""
        explored = torch.rand(len(self._games)) < exploration
        actions = torch.randint(self._games[0].actions, (len(self._games),))
        if not explored.all():
            best = best_actions(self._model, self._replay.newest())
            actions = torch.where(explored, actions, best)
        moments = [
            game.play(action) for game, action in zip(self._games, actions.tolist(), strict=True)
        ]
        # clipped, so that one learning rate is suitable for all games
        rewards = torch.tensor([moment.points for moment in moments]).sign()
        lost = torch.tensor([moment.lost for moment in moments])
        self._replay.complete_row(actions, rewards, lost)
        self._replay.begin_row(torch.stack(list(map(self._next_frame, self._games, moments))))
        self._plays += 1

    def _next_frame(self, game: Game, moment: Moment) -> Tensor:
        if not moment.over:
            return moment.frame
        self._returns = [*self._returns, game.points][-RECENT_GAMES:]
        return game.start(draw_seed())


def exploration_after(environment_steps: int, settings: CollectSettings) -> float:
    """Return the fraction of random actions after steps of all lanes, including warmup."""
    rest = math.exp(-environment_steps / settings.exploration_decay)
    return settings.exploration_end + (settings.exploration_start - settings.exploration_end) * rest


def draw_seed() -> int:
    """Return a seed for a game from torch's generator."""
    return int(torch.randint(2**31 - 1, ()))
