"""The state of loops, from which they continue after a resume."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from samestep.data.batch import LaneStream
from samestep.snapshot.read import Snapshot


@dataclass
class Position:
    """The position of a loop: its next step is `step` of `epoch`, after `done` steps in total."""

    epoch: int = 0
    step: int = 0
    done: int = 0
    plan: dict[str, Any] = field(default_factory=dict)

    def advance(self, steps_per_epoch: int | None) -> int:
        """Count one step (streams have no epochs: None) and return the epoch of the next one."""
        self.done += 1
        self.step += 1
        if self.step == steps_per_epoch:
            self.epoch, self.step = self.epoch + 1, 0
        return self.epoch


class LoopStates:
    """The state of all loops, by name; they take it from here when the script creates them."""

    def __init__(self, resumed: Snapshot | None) -> None:
        state = {} if resumed is None else resumed.state["run"]
        positions: dict[str, dict[str, Any]] = state.get("positions", {})
        self.positions = {name: Position(**at) for name, at in positions.items()}
        self.streams: dict[str, dict[int, LaneStream]] = {}
        # what per-epoch loops have begun their epochs with
        self.orders: dict[str, Any] = dict(state.get("orders", {}))
        self.resumed_orders = dict(self.orders)
        # state by loop and lane, from which loops continue
        self.resumed_streams: dict[str, dict[int, Any]] = {}
        if resumed is not None:
            self.resumed_streams = resumed.state.get("streams", {})
        # names of loops to warn of
        self.end_with_epoch: set[str] = set()
        self.skipped: set[str] = set()  # after `run.finish`
        self.continued: set[str] = set()  # in an epoch that was left by break

    def state_dict(self) -> dict[str, Any]:
        """Return what is equal on all workers."""
        positions = {name: asdict(position) for name, position in self.positions.items()}
        return {"positions": positions, "orders": dict(self.orders)}

    def own_state_dict(self) -> dict[str, Any]:
        """Return the states of this worker's streams."""
        streams = {
            name: {lane: stream.state_dict() for lane, stream in lanes.items()}
            for name, lanes in self.streams.items()
        }
        return {"streams": streams} if streams else {}
