"""What a snapshot holds of a run: the tracked objects, each with `state_dict` and `load_state_dict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from samestep.errors import SnapshotError
from samestep.step.shard import Shard, load_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from samestep.snapshot.read import Snapshot

RESERVED = ("run", "streams")


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved: two methods, as torch's modules, optimizers and schedulers have them."""

    def state_dict(self) -> Any:
        """Return the state: nested dicts, lists and tuples of tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state that `state_dict` returned."""


class Tracked:
    """The tracked objects by name; restores each from the snapshot that the run resumes from."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot
        self._objects: dict[str, Stateful] = {}

    def __bool__(self) -> bool:
        return bool(self._objects)

    def add(self, name: str, item: Any, shard: Shard | None) -> None:
        """Track `item`, through `shard` where it is a sharded optimizer, and restore it. Raises `SnapshotError`."""
        if name in RESERVED or name in self._objects:
            raise SnapshotError(
                f"track was given the name {name!r}, which is taken; choose another"
            )
        if not isinstance(item, Stateful):
            raise SnapshotError(
                f"{name!r} is {type(item).__name__}, which has no state_dict and load_state_dict; give it both to track it"
            )
        tracked = self._objects[name] = item if shard is None else shard
        if self._snapshot is None:
            return
        if name not in self._snapshot.state:
            held = ", ".join(sorted(set(self._snapshot.state) - set(RESERVED)))
            raise SnapshotError(
                f"the snapshot of step {self._snapshot.step} holds {held}, but no {name!r}: track the same names as the run that wrote it, "
                "or start anew with resume='never' and another dir"
            )
        try:
            state = self._snapshot.state.pop(name)
            if isinstance(tracked, torch.optim.Optimizer):
                load_optimizer(tracked, state)
            else:
                tracked.load_state_dict(state)
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise SnapshotError(
                f"the snapshot of step {self._snapshot.step} does not fit {name!r} ({type(item).__name__}): {error}"
            ) from error

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states that all workers hold alike, and those of which this worker holds its slices."""
        sharded = {name for name, item in self._objects.items() if isinstance(item, Shard)}
        shared = {
            name: item.state_dict() for name, item in self._objects.items() if name not in sharded
        }
        return shared, {name: self._objects[name].state_dict() for name in sharded}

    def forgotten(self) -> Mapping[str, Any]:
        """Return what the snapshot holds and nobody tracked again."""
        held = {} if self._snapshot is None else self._snapshot.state
        return {name: state for name, state in held.items() if name not in RESERVED}
