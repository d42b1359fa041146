"""A lane's source of samples: its own games, played with the network as it is, and its own replay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recipes.atari.game import Game
from recipes.atari.model import best_actions
from recipes.atari.replay import PrioritisedReplay, Replay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from recipes.atari.config import CollectSettings, Settings
    from recipes.atari.game import Moment
    from recipes.atari.replay import Samples

RECENT_GAMES = 20


class LaneBatch(NamedTuple):
    """A lane's share of a batch, and what is known beside it."""

    samples: Samples
    environment_steps: int  # so far, in all lanes
    exploration: float
    recent_return: float | None  # mean of the lane's last games; None before it has finished one


class Lane:
    """Endless samples of one of `lanes` lanes, for `run.streams`; its state is that of its emulators, replay and counters.

    All lanes play in step, so each knows how many environment steps all have made. Everything
    random is drawn from torch's generator, which samestep keys for each item of a lane, so that no
    generator has to be kept.
    """

    def __init__(self, settings: Settings, model: nn.Module, lanes: int) -> None:
        self._settings, self._model = settings, model
        environments = settings.collect.environments // lanes
        self._batch_size = settings.batch_size // lanes
        self._games = [Game(settings.game) for _ in range(environments)]
        self._replay = (PrioritisedReplay if settings.replay.prioritised else Replay)(
            settings.replay,
            settings.game,
            settings.replay.size // settings.collect.environments,
            environments,
        )
        self._returns: list[float] = []  # of the last games
        self._plays = 0  # actions in each game
        self._given = 0

    def __iter__(self) -> Lane:
        return self

    def __next__(self) -> LaneBatch:
        """Collect where it is time to, and draw a lane's share of a batch."""
        collect, replay = self._settings.collect, self._settings.replay
        if self._plays == 0:
            self._replay.see(torch.stack([game.start(draw_seed()) for game in self._games]))
        while self._warming_up():
            self._play(exploration=1.0)
        if self._given % collect.updates == 0:
            for _ in range(collect.steps):
                self._play(exploration_after(self._environment_steps(), collect))
        correction = (
            replay.priority_correction
            + (1 - replay.priority_correction) * self._given / self._settings.updates
        )
        self._given += 1
        return LaneBatch(
            self._replay.draw(self._batch_size, correction),
            environment_steps=self._environment_steps(),
            exploration=exploration_after(self._environment_steps(), collect),
            recent_return=sum(self._returns) / len(self._returns) if self._returns else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that the lane is."""
        return {
            "games": [game.state_dict() for game in self._games],
            "replay": self._replay.state_dict(),
            "returns": list(self._returns),
            "plays": self._plays,
            "given": self._given,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._replay.load_state_dict(state["replay"])
        for game, its_state in zip(self._games, state["games"], strict=True):
            game.load_state_dict(its_state)
        self._returns, self._plays, self._given = (
            list(state["returns"]),
            state["plays"],
            state["given"],
        )

    def _environment_steps(self) -> int:
        return self._plays * self._settings.collect.environments

    def _warming_up(self) -> bool:
        return (
            self._environment_steps() < self._settings.collect.warmup_steps
            or not self._replay.ready()
        )

    def _play(self, exploration: float) -> None:
        """Take one action in each game; a part of them, `exploration`, at random."""
        explored = torch.rand(len(self._games)) < exploration
        actions = torch.randint(self._games[0].actions, (len(self._games),))
        if not explored.all():
            actions = torch.where(
                explored, actions, best_actions(self._model, self._replay.newest())
            )
        moments = [
            game.play(action) for game, action in zip(self._games, actions.tolist(), strict=True)
        ]
        # clipped, so that one learning rate does for all games
        rewards = torch.tensor([moment.points for moment in moments]).sign()
        self._replay.did(actions, rewards, torch.tensor([moment.lost for moment in moments]))
        self._replay.see(
            torch.stack(
                [
                    self._next_frame(game, moment)
                    for game, moment in zip(self._games, moments, strict=True)
                ]
            )
        )
        self._plays += 1

    def _next_frame(self, game: Game, moment: Moment) -> Tensor:
        if not moment.over:
            return moment.frame
        self._returns = [*self._returns, game.points][-RECENT_GAMES:]
        return game.start(draw_seed())


def exploration_after(environment_steps: int, settings: CollectSettings) -> float:
    """Return the part of actions that are random after so many steps of all lanes; warm-up counts among them."""
    rest = math.exp(-environment_steps / settings.exploration_decay)
    return settings.exploration_end + (settings.exploration_start - settings.exploration_end) * rest


def draw_seed() -> int:
    """Return a seed for a game, from torch's generator."""
    return int(torch.randint(2**31 - 1, ()))
