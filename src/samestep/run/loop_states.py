"""The state of loops, from which they continue after a resume."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from samestep.data.batch import LaneStream
from samestep.data.exclude import Exclusion
from samestep.data.mixture_plan import MixturePlan
from samestep.snapshot.read import Snapshot


@dataclass
class Position:
    """The position of a loop: its next step is `step` of `epoch`, after `done` steps in total.

    `is_open` says that the steps of the epoch before it are done, and that what the script does
    after them in its own loop over epochs may not be: that is done when the next epoch begins.
    `mixture` is what the sources of a `MixturePlan` have given.
    """

    epoch: int = 0
    step: int = 0
    done: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    is_open: bool = False
    mixture: dict[str, Any] = field(default_factory=dict)

    def advance(self, steps_per_epoch: int | None, *, opens: bool = False) -> int:
        """Count one step (streams have no epochs: None) and return the epoch of the next one.

        Set `opens` if the script may do more after the last step of an epoch.
        """
        self.done += 1
        self.step += 1
        if self.step == steps_per_epoch:
            self.epoch, self.step, self.is_open = self.epoch + 1, 0, opens
        return self.epoch

    def note(self, mixture: dict[str, Any]) -> None:
        """Note what the sources of a mixture have given by the end of a step."""
        self.mixture = mixture


class LoopStates:
    """The state of all loops, by name; they take it from here when the script creates them."""

    def __init__(self, resumed: Snapshot | None, exclusion: Exclusion) -> None:
        state = {} if resumed is None else resumed.state["run"]
        positions: dict[str, dict[str, Any]] = state.get("positions", {})
        self.positions = {name: Position(**at) for name, at in positions.items()}
        self.streams: dict[str, dict[int, LaneStream]] = {}
        self.mixtures: dict[str, MixturePlan] = {}  # of loops that have begun
        # in whose open epoch the script continues, with no step and then what it does after them
        self.resumed_open = {name for name, at in self.positions.items() if at.is_open}
        # what per-epoch loops have begun their epochs with
        self.orders: dict[str, Any] = dict(state.get("orders", {}))
        self.resumed_orders = dict(self.orders)
        # the option, and the sorted indices of all samples that loops leave out
        self.exclusion = exclusion
        self.excluded: dict[str, Any] = dict(state.get("excluded", {}))
        # state by loop and lane, from which loops continue
        self.resumed_streams: dict[str, dict[int, Any]] = {}
        if resumed is not None:
            self.resumed_streams = resumed.state.get("streams", {})
        # names of loops to warn of
        self.end_with_epoch: set[str] = set()
        self.skipped: set[str] = set()  # after `run.finish`
        self.continued: set[str] = set()  # in an epoch that was left by break
        self.said: set[str] = set()  # lines about data sets

    @property
    def are_open(self) -> bool:
        """Whether what the script does after an epoch of a loop may not be done."""
        return any(position.is_open for position in self.positions.values())

    def close_epochs(self, before: float = math.inf) -> None:
        """Note that the script has done all in its epochs before the given one."""
        for position in self.positions.values():
            if position.epoch <= before:  # of the next step
                position.is_open = False

    def state_dict(self) -> dict[str, Any]:
        """Return what is equal on all workers."""
        positions = {name: asdict(position) for name, position in self.positions.items()}
        sets = {
            "exclude": self.exclusion.state_dict(),
            "excluded": {name: own for name, own in self.excluded.items() if len(own)},
        }
        kept = {name: own for name, own in sets.items() if own}
        return {"positions": positions, "orders": dict(self.orders), **kept}

    def own_state_dict(self) -> dict[str, Any]:
        """Return the states of this worker's streams."""
        streams = {
            name: {lane: stream.state_dict() for lane, stream in lanes.items()}
            for name, lanes in self.streams.items()
        }
        return {"streams": streams} if streams else {}
