"""When a run's snapshots are taken, and of what."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from samestep.errors import SnapshotError
from samestep.snapshot.tracked import Tracked
from samestep.snapshot.write import SnapshotWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from samestep.config import Config
    from samestep.record import Record
    from samestep.snapshot.read import Snapshot
    from samestep.world import World


class Keeper:
    """Takes snapshots every so many steps or minutes, when asked, and at the end; without a directory none."""

    def __init__(self, config: Config, world: World, record: Record, attempt: str, resumed: Snapshot | None) -> None:
        self.tracked = Tracked(resumed)
        self.stall_seconds = 0.0
        self._config, self._world = config, world
        self._kept_step = None if resumed is None else resumed.step
        self._kept_time = time.monotonic()
        self._prepared = config.snapshot_every is None
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
                timeout_seconds=config.timeout_seconds,
            )

    @property
    def keeps(self) -> bool:
        """Tell whether snapshots are taken at all."""
        return self._writer is not None and bool(self.tracked)

    def time_is_up(self) -> bool:
        """Tell whether the minutes between snapshots have passed on this worker's clock."""
        seconds = self._config.snapshot_seconds
        return self._writer is not None and seconds is not None and time.monotonic() - self._kept_time >= seconds

    def is_due(self, step: int) -> bool:
        """Tell whether the steps between snapshots have passed. Raises `SnapshotError` if the last one failed.

        Asked for the first time, after a step that gave optimizers their state, it has memory made ready for the first one.
        """
        if self._writer is None:
            return False
        self._writer.raise_if_failed()
        if not self._prepared and self.keeps:
            self._prepared = True
            self._writer.prepare(*self.tracked.states())
        return self._config.snapshot_steps is not None and step % self._config.snapshot_steps == 0

    def save(self, step: int, shared: Mapping[str, Any], own: Mapping[str, Any], score: float | None) -> None:
        """Copy the state of all tracked objects, with `shared` and `own` of the run's; files are written beside training."""
        if self._writer is None or not self.keeps:
            return
        if step == self._kept_step and score is None:
            return
        forgotten = ", ".join(sorted(self.tracked.forgotten()))
        if forgotten:
            raise SnapshotError(f"the run resumed from a snapshot that also holds {forgotten}; track it too, so that nothing is lost")
        # Workers meet in the file system from here on, where one that is gone would be waited for in vain.
        self._world.barrier("starting a snapshot")
        started = time.perf_counter()
        tracked_shared, tracked_own = self.tracked.states()
        info = {"lanes": shared["run"]["lanes"], "seed": self._config.seed, "epoch": shared["run"]["epoch"]}
        self._writer.save(step, {**tracked_shared, **shared}, {**tracked_own, **own}, info, score)
        self._kept_step, self._kept_time = step, time.monotonic()
        self.stall_seconds += time.perf_counter() - started

    def finish(self) -> None:
        """Wait until the last snapshot is whole. Raises `SnapshotError` if it failed."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Stop writing."""
        if self._writer is not None:
            self._writer.close()
