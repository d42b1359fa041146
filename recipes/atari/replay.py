"""A lane's replay memory. Each frame is stored once; observations are assembled when drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.atari.config import GameSettings, ReplaySettings
from recipes.settings import SettingsError

LEAST_ERROR = 1e-6  # so that samples without error are drawn, too


class Samples(NamedTuple):
    """Samples of a lane: observations, actions, the rewards of the next steps, and their results.

    The value of `actions` in `observations` should be `returns + discounts * value of
    next_observations`; `discounts` is 0 if the episode ended before. `report_errors` receives the
    absolute errors [batch]; a prioritized replay draws by them.
    """

    observations: Tensor  # uint8 [batch, stack, H, W]
    actions: Tensor  # int64 [batch]
    returns: Tensor  # float32 [batch]
    next_observations: Tensor  # uint8 [batch, stack, H, W]
    discounts: Tensor  # float32 [batch]
    weights: Tensor  # float32 [batch], of the samples' losses
    report_errors: Callable[[Tensor], None]


class Replay:
    """A ring of the newest `rows` moments of games that are played in step, one per game and row.

    A row has the frames, and then the actions, their rewards, and whether they ended the episode.
    `count` is the number of rows so far; the last one is not complete.
    """

    def __init__(
        self, settings: ReplaySettings, game: GameSettings, rows: int, environments: int
    ) -> None:
        least = game.frame_stack + settings.steps + 1
        if rows < least:
            got = f"{rows} with replay.size={settings.size}"
            raise SettingsError(f"the replay must have at least {least} steps per game, got {got}")
        self._settings, self._stack, self.rows = settings, game.frame_stack, rows
        self.count = 0
        size = game.frame_size
        self._frames = torch.zeros(rows, environments, size, size, dtype=torch.uint8)
        self._actions = torch.zeros(rows, environments, dtype=torch.int64)
        self._rewards = torch.zeros(rows, environments)
        self._ends = torch.zeros(rows, environments, dtype=torch.bool)

    @property
    def environments(self) -> int:
        """Games per row."""
        return self._frames.shape[1]

    def begin_row(self, frames: Tensor) -> None:
        """Begin a row with frames [environments, H, W]."""
        self._frames[self.count % self.rows] = frames
        self.count += 1

    def complete_row(self, actions: Tensor, rewards: Tensor, ends: Tensor) -> None:
        """Complete the last row, with [environments] of each."""
        row = (self.count - 1) % self.rows
        self._actions[row], self._rewards[row], self._ends[row] = actions, rewards, ends

    def newest(self) -> Tensor:
        """Return the newest observations, uint8 [environments, stack, H, W]."""
        rows = torch.full((self.environments,), self.count - 1)
        return self._observations(rows, torch.arange(self.environments))

    def ready(self) -> bool:
        """Return whether there are samples to draw."""
        return len(self._drawable()) > 0

    def draw(self, size: int, correction: float) -> Samples:
        """Draw samples; `correction` is the exponent of a prioritized replay's weights."""
        rows, columns, weights = self._choose(size, correction)
        returns, discounts = torch.zeros(size), torch.ones(size)
        for step in range(self._settings.steps):
            at = (rows + step) % self.rows, columns
            returns += discounts * self._rewards[at]
            discounts *= self._settings.discount * ~self._ends[at]
        return Samples(
            self._observations(rows, columns),
            self._actions[rows % self.rows, columns],
            returns,
            self._observations(rows + self._settings.steps, columns),
            discounts,
            weights,
            partial(self._take_errors, rows, columns),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far."""
        filled = {name: column[: self.count] for name, column in self._columns().items()}
        return {"rows": self.rows, "count": self.count, **filled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore rows. Raises `SettingsError` if they have another size."""
        got, expected = (
            (rows, list(frames.shape[1:]))
            for rows, frames in ((state["rows"], state["frames"]), (self.rows, self._frames))
        )
        if got != expected:
            raise SettingsError(
                f"the snapshot's replay must have {expected[0]} rows of frames {expected[1]}, got "
                f"{got[0]} of {got[1]}; do not change replay.size, lanes, environments, frame_size"
            )
        self.count = state["count"]
        for name, column in self._columns().items():
            column[: self.count] = state[name]

    def _columns(self) -> dict[str, Tensor]:
        return {
            "frames": self._frames,
            "actions": self._actions,
            "rewards": self._rewards,
            "ends": self._ends,
        }

    def _drawable(self) -> range:
        """Return the rows with all frames before and all steps after them."""
        first = 0 if self.count <= self.rows else self.count - self.rows + self._stack - 1
        return range(first, self.count - self._settings.steps)

    def _choose(self, size: int, correction: float) -> tuple[Tensor, Tensor, Tensor]:
        """Draw rows, columns and weights of samples, [size] each."""
        drawable = self._drawable()
        return (
            torch.randint(drawable.start, drawable.stop, (size,)),
            torch.randint(self.environments, (size,)),
            torch.ones(size),
        )

    def _take_errors(self, rows: Tensor, columns: Tensor, errors: Tensor) -> None:
        """Receive the errors of samples; not needed if samples are drawn uniformly."""

    def _observations(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return frames up to rows, [batch, stack, H, W]; an episode's first frame is repeated."""
        stack = [rows]
        for _ in range(self._stack - 1):
            before = stack[-1] - 1
            starts = (before < 0) | self._ends[before % self.rows, columns]
            stack.append(torch.where(starts, stack[-1], before))
        return self._frames[torch.stack(stack[::-1], 1) % self.rows, columns[:, None]]


class PrioritizedReplay(Replay):
    """Draws proportionally to the last error of a sample (Schaul et al. 2016).

    New samples have the largest error so far.
    """

    def __init__(
        self, settings: ReplaySettings, game: GameSettings, rows: int, environments: int
    ) -> None:
        super().__init__(settings, game, rows, environments)
        self._priorities = torch.zeros(rows, environments)
        self._largest = torch.ones(())

    def complete_row(self, actions: Tensor, rewards: Tensor, ends: Tensor) -> None:
        super().complete_row(actions, rewards, ends)
        self._priorities[(self.count - 1) % self.rows] = self._largest

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._largest = state["largest"].clone()

    def _columns(self) -> dict[str, Tensor]:
        return super()._columns() | {"priorities": self._priorities}

    def _choose(self, size: int, correction: float) -> tuple[Tensor, Tensor, Tensor]:
        drawable = self._drawable()
        # A tree of sums is not needed: 50,000 priorities take 0.7 ms per draw.
        rows = torch.arange(drawable.start, drawable.stop) % self.rows
        priorities = self._priorities[rows].double().flatten()
        sums = priorities.cumsum(0)
        drawn = torch.rand(size, dtype=torch.float64) * sums[-1]
        chosen = torch.searchsorted(sums, drawn, right=True).clamp(max=len(sums) - 1)
        # equation of section 3.4, with 1 as the largest weight
        weights = (priorities[chosen] / priorities.min()) ** -correction
        rows, columns = drawable.start + chosen // self.environments, chosen % self.environments
        return rows, columns, weights.float()

    def _take_errors(self, rows: Tensor, columns: Tensor, errors: Tensor) -> None:
        errors = errors.detach().float().cpu() + LEAST_ERROR
        priorities = errors**self._settings.priority_exponent
        self._priorities[rows % self.rows, columns] = priorities
        self._largest = torch.maximum(self._largest, priorities.max())
