"""What a lane remembers of its games. A frame is stored once; observations are put together when they are asked for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from recipes.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from recipes.atari.config import GameSettings, ReplaySettings

LEAST_ERROR = 1e-6  # so that what was learned well is drawn now and then


class Samples(NamedTuple):
    """Samples of a lane: what was seen and done, the rewards of the next steps, and where they led.

    The value of `actions` in `observations` should be `returns + discounts * value of
    next_observations`; `discounts` is 0 where the episode ended before. `tell_errors` takes the
    absolute errors [batch]; a prioritised replay draws by them.
    """

    observations: Tensor  # uint8 [batch, stack, H, W]
    actions: Tensor  # int64 [batch]
    returns: Tensor  # float32 [batch]
    next_observations: Tensor  # uint8 [batch, stack, H, W]
    discounts: Tensor  # float32 [batch]
    weights: Tensor  # float32 [batch], of the samples' losses
    tell_errors: Callable[[Tensor], None]


class Replay:
    """A ring of the newest `rows` moments of some games that are played in step; a row has one moment of each game.

    Row `i` holds the frames that were seen, and then what was done: actions, rewards, and whether
    the episode ended by it. `count` is the number of rows ever begun, the last of which waits for
    its actions.
    """

    def __init__(
        self, settings: ReplaySettings, game: GameSettings, rows: int, environments: int
    ) -> None:
        least = game.frame_stack + settings.steps + 1
        if rows < least:
            raise SettingsError(
                f"replay.size={settings.size} was given, which is {rows} steps of a game; expected at least {least} to draw from"
            )
        self._settings, self._stack, self.rows = settings, game.frame_stack, rows
        self.count = 0
        self._frames = torch.zeros(
            rows, environments, game.frame_size, game.frame_size, dtype=torch.uint8
        )
        self._actions = torch.zeros(rows, environments, dtype=torch.int64)
        self._rewards = torch.zeros(rows, environments)
        self._ends = torch.zeros(rows, environments, dtype=torch.bool)

    @property
    def environments(self) -> int:
        """Games a row."""
        return self._frames.shape[1]

    def see(self, frames: Tensor) -> None:
        """Begin a row with frames [environments, H, W]."""
        self._frames[self.count % self.rows] = frames
        self.count += 1

    def did(self, actions: Tensor, rewards: Tensor, ends: Tensor) -> None:
        """Complete the row that waits, with [environments] of each."""
        row = (self.count - 1) % self.rows
        self._actions[row], self._rewards[row], self._ends[row] = actions, rewards, ends

    def newest(self) -> Tensor:
        """Return the observations that wait for actions, uint8 [environments, stack, H, W]."""
        return self._observations(
            torch.full((self.environments,), self.count - 1), torch.arange(self.environments)
        )

    def ready(self) -> bool:
        """Tell whether there is anything to draw."""
        return len(self._drawable()) > 0

    def draw(self, size: int, correction: float) -> Samples:
        """Draw samples from torch's generator; `correction` is the exponent of a prioritised replay's weights."""
        rows, columns, weights = self._choose(size, correction)
        returns, discounts = torch.zeros(size), torch.ones(size)
        for step in range(self._settings.steps):
            place = (rows + step) % self.rows, columns
            returns += discounts * self._rewards[place]
            discounts *= self._settings.discount * ~self._ends[place]
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
        """Return the rows that are filled, each as it is."""
        return {
            "rows": self.rows,
            "count": self.count,
            **{name: one[: self.count] for name, one in self._columns().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take rows that `state_dict` returned. Raises `SettingsError` for those of another size."""
        if state["rows"] != self.rows or state["frames"].shape[1:] != self._frames.shape[1:]:
            raise SettingsError(
                f"the snapshot's replay has {state['rows']} rows of frames {list(state['frames'].shape[1:])}, but the settings ask for "
                f"{self.rows} of {list(self._frames.shape[1:])}; resume with the replay.size, lanes, environments and frame_size it had"
            )
        self.count = state["count"]
        for name, one in self._columns().items():
            one[: self.count] = state[name]

    def _columns(self) -> dict[str, Tensor]:
        return {
            "frames": self._frames,
            "actions": self._actions,
            "rewards": self._rewards,
            "ends": self._ends,
        }

    def _drawable(self) -> range:
        """Return the rows whose frames before and steps after are all there."""
        first = 0 if self.count <= self.rows else self.count - self.rows + self._stack - 1
        return range(first, self.count - self._settings.steps)

    def _choose(self, size: int, correction: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, columns and weights of samples to draw, [size] each."""
        among = self._drawable()
        return (
            torch.randint(among.start, among.stop, (size,)),
            torch.randint(self.environments, (size,)),
            torch.ones(size),
        )

    def _take_errors(self, rows: Tensor, columns: Tensor, errors: Tensor) -> None:
        """Take the errors of samples; of no use where all are drawn alike."""

    def _observations(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the newest frames up to some rows, [batch, stack, H, W]; the first frame of an episode stands for those before it."""
        stack = [rows]
        for _ in range(self._stack - 1):
            before = stack[-1] - 1
            starts = (before < 0) | self._ends[before % self.rows, columns]
            stack.append(torch.where(starts, stack[-1], before))
        return self._frames[torch.stack(stack[::-1], 1) % self.rows, columns[:, None]]


class PrioritisedReplay(Replay):
    """Draws by the last error of a sample; new ones count as the largest error so far (Schaul et al. 2016, proportional)."""

    def __init__(
        self, settings: ReplaySettings, game: GameSettings, rows: int, environments: int
    ) -> None:
        super().__init__(settings, game, rows, environments)
        self._priorities = torch.zeros(rows, environments)
        self._largest = torch.ones(())

    def did(self, actions: Tensor, rewards: Tensor, ends: Tensor) -> None:
        super().did(actions, rewards, ends)
        self._priorities[(self.count - 1) % self.rows] = self._largest

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._largest = state["largest"].clone()

    def _columns(self) -> dict[str, Tensor]:
        return super()._columns() | {"priorities": self._priorities}

    def _choose(self, size: int, correction: float) -> tuple[Tensor, Tensor, Tensor]:
        among = self._drawable()
        # All of them at each draw, with no tree of sums to keep: 50,000 take 0.7 ms.
        priorities = (
            self._priorities[torch.arange(among.start, among.stop) % self.rows].double().flatten()
        )
        sums = priorities.cumsum(0)
        chosen = torch.searchsorted(
            sums, torch.rand(size, dtype=torch.float64) * sums[-1], right=True
        ).clamp(max=len(sums) - 1)
        # equation of section 3.4, the largest weight being 1
        weights = (priorities[chosen] / priorities.min()) ** -correction
        return (
            among.start + chosen // self.environments,
            chosen % self.environments,
            weights.float(),
        )

    def _take_errors(self, rows: Tensor, columns: Tensor, errors: Tensor) -> None:
        priorities = (
            errors.detach().float().cpu() + LEAST_ERROR
        ) ** self._settings.priority_exponent
        self._priorities[rows % self.rows, columns] = priorities
        self._largest = torch.maximum(self._largest, priorities.max())
