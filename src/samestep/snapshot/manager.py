"""What a snapshot holds of a run: the tracked objects, each with `state_dict` and `load_state_dict`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from samestep.comm.base import World
from samestep.config import Config
from samestep.errors import SnapshotError
from samestep.record import Record
from samestep.snapshot.hooks import open_hooks
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.read import Snapshot
from samestep.snapshot.write import SnapshotWriter
from samestep.step.shard import Shard, load_optimizer

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


class SnapshotManager:
    """Takes snapshots every so many steps or minutes, when asked, and at the end; without a directory none."""

    def __init__(
        self,
        config: Config,
        world: World,
        record: Record,
        attempt: str,
        resumed: Snapshot | None,
        hot: InMemorySnapshots,
    ) -> None:
        self.tracked = Tracked(resumed)
        self.hot = hot
        self.stall_seconds = 0.0
        self._config, self._world, self._record, self._attempt = config, world, record, attempt
        self._kept_step = None if resumed is None or resumed.hot else resumed.step
        self._kept_time = time.monotonic()
        self._prepared = config.snapshot_every is None
        start = -1 if resumed is None else resumed.step
        self._afterwards = open_hooks(config, acts=world.rank == 0, attempt=attempt, start=start)
        self._writer: SnapshotWriter | None = None
        if config.dir is not None:
            self._writer = SnapshotWriter(
                config.dir,
                rank=world.rank,
                workers=world.size,
                attempt=attempt,
                keep_last=config.keep_last,
                keep_best=config.keep_best,
                report=record.event,
                when_whole=self._afterwards.snapshot_is_whole,
            )

    @property
    def keeps(self) -> bool:
        """Tell whether snapshots are taken at all."""
        return self._writer is not None and bool(self.tracked)

    def time_is_up(self) -> bool:
        """Tell whether the minutes between snapshots have passed on this worker's clock."""
        seconds = self._config.snapshot_seconds
        return (
            self._writer is not None
            and seconds is not None
            and time.monotonic() - self._kept_time >= seconds
        )

    def is_due(self, step: int) -> bool:
        """Tell whether the steps between snapshots have passed. Raises `SnapshotError` if the last one failed.

        Asked for the first time, after a step that gave optimizers their state, it has memory made
        ready for the first one.
        """
        if self._writer is None:
            return False
        self._writer.raise_if_failed()
        self._afterwards.tell(self._record.event)
        if not self._prepared and self.keeps:
            self._prepared = True
            self._writer.prepare(*self.tracked.states())
        return self._config.snapshot_steps is not None and step % self._config.snapshot_steps == 0

    def save(
        self, step: int, shared: Mapping[str, Any], own: Mapping[str, Any], score: float | None
    ) -> None:
        """Copy the state of all tracked objects, with `shared` and `own` of the run's; files are written beside training."""
        if self._writer is None or not self.keeps:
            return
        if step == self._kept_step and score is None:
            return
        forgotten = ", ".join(sorted(self.tracked.forgotten()))
        if forgotten:
            raise SnapshotError(
                f"the run resumed from a snapshot that also holds {forgotten}; track it too, so that nothing is lost"
            )
        # Workers meet in the file system from here on, where one that is gone would be waited for
        # in vain.
        self._world.barrier("starting a snapshot")
        started = time.perf_counter()
        tracked_shared, tracked_own = self.tracked.states()
        self._writer.save(
            step, {**tracked_shared, **shared}, {**tracked_own, **own}, self._info(shared), score
        )
        self._kept_step, self._kept_time = step, time.monotonic()
        self.stall_seconds += time.perf_counter() - started

    def copy(
        self, step: int, states: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> None:
        """Make a hot copy of the same, of which `states` gives the run's; one that cannot be made is told, and was the last attempt."""
        if not self.tracked or self.tracked.forgotten():
            return
        started = time.monotonic()
        try:
            (shared, own), (tracked_shared, tracked_own) = states(), self.tracked.states()
            self.hot.save(
                step,
                self._attempt,
                {**tracked_shared, **shared},
                {**tracked_own, **own},
                self._info(shared),
                started,
            )
        except (OSError, SnapshotError) as error:
            self.hot.give_up()
            self._record.event("hot_copy_failed", step=step, reason=str(error))
            logging.getLogger("samestep").warning("no more hot copies are made: %s", error)
        self.stall_seconds += time.monotonic() - started

    def _info(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "lanes": shared["run"]["lanes"],
            "seed": self._config.seed,
            "epoch": shared["run"]["epoch"],
        }

    def finish(self) -> None:
        """Wait until the last snapshot is whole, and copied where it is to be. Raises `SnapshotError` if that failed."""
        if self._writer is None:
            return
        self._writer.wait()
        try:
            self._afterwards.finish()
        finally:
            self._afterwards.tell(self._record.event)

    def close(self) -> None:
        """Stop writing."""
        if self._writer is not None:
            self._writer.close()
        self._afterwards.close()
