"""One Atari game as DQN plays it: gray frames, skipped frames, points, lives, state as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import ale_py
import cv2
import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import AtariPreprocessing
from numpy.typing import NDArray
from torch import Tensor

from recipes.atari.config import GameSettings
from recipes.settings import SettingsError

gymnasium.register_envs(ale_py)
cv2.setNumThreads(1)  # frames are small, and workers share the cores
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner per emulator


class Moment(NamedTuple):
    """The result of an action; `lost` is true if a life ended, `over` if the game ended."""

    frame: Tensor
    points: float
    lost: bool
    over: bool


class Game:
    """An emulator that plays one game after another; `points` are those of the current game.

    Frame skip, maximum of the last two frames, resizing and no-ops are gymnasium's
    `AtariPreprocessing` (Machado et al. 2018). If there is a fire button, it is pressed at the
    start of each life, because some games wait for it.
    """

    def __init__(self, settings: GameSettings) -> None:
        try:
            emulator = gymnasium.make(settings.name, disable_env_checker=True)
            self._ale: Any = emulator.unwrapped
            self._env = AtariPreprocessing(
                emulator,
                noop_max=settings.no_ops,
                frame_skip=settings.frame_skip,
                screen_size=settings.frame_size,
            )
            sticky = self._ale.ale.getFloat("repeat_action_probability") > 0
        except (gymnasium.error.Error, AssertionError, AttributeError, ValueError) as error:
            expected = "a game such as PongNoFrameskip-v4"
            raise SettingsError(
                f"game.name must be {expected}, got {settings.name}: {error}"
            ) from error
        if sticky:  # drawn from a generator that is not part of the saved state
            expected = "a game without sticky actions such as PongNoFrameskip-v4"
            raise SettingsError(f"game.name must be {expected}, got {settings.name}")
        meanings = self._ale.get_action_meanings()
        self.actions = len(meanings)
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None
        self.points, self._lives = 0.0, 0

    def start(self, seed: int) -> Tensor:
        """Start a game and return its first frame, uint8 [H, W]; `seed` determines the no-ops."""
        # A seed passed to reset would load the cartridge again, which takes 100 ms.
        self._ale.np_random = np.random.default_rng(seed)
        frame, info = self._env.reset()
        self.points, self._lives = 0.0, info["lives"]
        return torch.from_numpy(frame) if self._fire is None else self._act(self._fire).frame

    def play(self, action: int) -> Moment:
        """Take an action for `frame_skip` frames."""
        moment = self._act(action)
        if moment.lost and not moment.over and self._fire is not None:
            fired = self._act(self._fire)
            return Moment(fired.frame, moment.points + fired.points, lost=True, over=fired.over)
        return moment

    def screen(self) -> NDArray[np.uint8]:
        """Return the screen in color, uint8 [210, 160, 3]."""
        return self._ale.ale.getScreenRGB()

    def state_dict(self) -> dict[str, Any]:
        """Return the emulator's state in its own format, as bytes in a tensor, and the points."""
        content = self._ale.clone_state().serialize()
        return {
            "emulator": torch.frombuffer(bytearray(content), dtype=torch.uint8),
            "points": self.points,
            "lives": self._lives,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.start(0)  # gymnasium does not play a game that was not started
        self._ale.restore_state(ale_py.ALEState(state["emulator"].numpy().tobytes()))
        self.points, self._lives = state["points"], state["lives"]

    def _act(self, action: int) -> Moment:
        frame, points, terminated, truncated, info = self._env.step(action)
        lost, self._lives = info["lives"] < self._lives, info["lives"]
        self.points += float(points)
        over = terminated or truncated
        return Moment(torch.from_numpy(frame), float(points), lost or over, over)
