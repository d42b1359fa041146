"""One Atari game as DQN plays it: grey frames, skipped frames, points, lives, and its whole state as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import ale_py
import cv2
import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import AtariPreprocessing

from recipes.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from recipes.atari.config import GameSettings

gymnasium.register_envs(ale_py)
cv2.setNumThreads(1)  # frames are small, and a worker has its share of the cores
# or each emulator would greet the terminal
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


class Moment(NamedTuple):
    """What an action led to: `lost` says that a life ended, `over` that the game did."""

    frame: Tensor
    points: float
    lost: bool
    over: bool


class Game:
    """An emulator that plays one game after the other; `points` of the one that runs.

    Frame skip, maximum of the last two frames, resizing and no-ops are gymnasium's
    `AtariPreprocessing` (Machado et al. 2018). Where there is a fire button, it is pressed at the
    start of each life, since some games wait for it.
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
            draws = self._ale.ale.getFloat("repeat_action_probability") > 0
        except (gymnasium.error.Error, AssertionError, AttributeError, ValueError) as error:
            raise SettingsError(
                f"game.name={settings.name} cannot be played ({error}); expected such as PongNoFrameskip-v4"
            ) from error
        if draws:  # from a generator of its own, which is not part of the state that is kept
            raise SettingsError(
                f"game.name={settings.name} has sticky actions; expected a game without, such as PongNoFrameskip-v4"
            )
        meanings = self._ale.get_action_meanings()
        self.actions = len(meanings)
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None
        self.points, self._lives = 0.0, 0

    def start(self, seed: int) -> Tensor:
        """Start a game, whose number of no-ops `seed` decides; returns its first frame, uint8 [H, W]."""
        # a seed given to reset would load the cartridge again, in 100 ms
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
        """Return what a person would see, uint8 [210, 160, 3]."""
        return self._ale.ale.getScreenRGB()

    def state_dict(self) -> dict[str, Any]:
        """Return the emulator's memory and registers in its own format, as bytes in a tensor, and the points so far."""
        content = self._ale.clone_state().serialize()
        return {
            "emulator": torch.frombuffer(bytearray(content), dtype=torch.uint8),
            "points": self.points,
            "lives": self._lives,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.start(0)  # gymnasium plays no game that was not started
        self._ale.restore_state(ale_py.ALEState(state["emulator"].numpy().tobytes()))
        self.points, self._lives = state["points"], state["lives"]

    def _act(self, action: int) -> Moment:
        frame, points, terminated, truncated, info = self._env.step(action)
        lost, self._lives = info["lives"] < self._lives, info["lives"]
        self.points += float(points)
        over = terminated or truncated
        return Moment(torch.from_numpy(frame), float(points), lost or over, over)
