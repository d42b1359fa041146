"""From the snapshots in a run's directory to the one that all workers resume from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestep.errors import SnapshotError
from samestep.snapshot.read import Snapshot, list_snapshots, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from samestep.world import World


def load_newest(directory: Path, world: World, report: Callable[..., object]) -> Snapshot | None:
    """Load the newest snapshot in a run's directory that every worker finds whole, None if there is none; collective.

    Each worker checks and loads in one pass, all at once. Each newer one that is not whole is told by
    `report("snapshot_rejected", path=..., reason=...)`.
    """
    for path in world.broadcast_object(list_snapshots(directory)[::-1], "choosing a snapshot"):
        snapshot, fault = _loaded(path)
        faults = world.all_gather_json(fault, "loading a snapshot")
        if not any(faults):
            return snapshot
        report("snapshot_rejected", path=str(path), reason=next(filter(None, faults)))
    return None


def _loaded(path: Path) -> tuple[Snapshot | None, str | None]:
    try:
        return load(path), None
    except SnapshotError as error:
        return None, str(error)
