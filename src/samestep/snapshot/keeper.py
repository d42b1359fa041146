"""When a run's snapshots are taken, and of what."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from samestep.errors import SnapshotError
from samestep.snapshot.remote.afterwards import open_afterwards
from samestep.snapshot.tracked import Tracked
from samestep.snapshot.write import SnapshotWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from samestep.config import Config
    from samestep.record import Record
    from samestep.snapshot.hot import HotCopies
    from samestep.snapshot.read import Snapshot
    from samestep.world import World


class Keeper:
    """Takes snapshots every so many steps or minutes, when asked, and at the end; without a directory none."""

    def __init__(
        self,
        config: Config,
        world: World,
        record: Record,
        attempt: str,
        resumed: Snapshot | None,
        hot: HotCopies,
    ) -> None:
        self.tracked = Tracked(resumed)
        self.hot = hot
        self.stall_seconds = 0.0
        self._config, self._world, self._record, self._attempt = config, world, record, attempt
        self._kept_step = None if resumed is None or resumed.hot else resumed.step
        self._kept_time = time.monotonic()
        self._prepared = config.snapshot_every is None
        start = -1 if resumed is None else resumed.step
        self._afterwards = open_afterwards(
            config, acts=world.rank == 0, attempt=attempt, start=start
        )
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
