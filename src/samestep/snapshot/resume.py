"""From the snapshots in a run's directory, and its hot copies, to the one that all workers resume from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from samestep.comm.base import World
from samestep.errors import SnapshotError
from samestep.snapshot.download import Downloads
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.read import Snapshot, list_snapshots, load, step_of


@dataclass(frozen=True)
class _Candidate:
    """What may be resumed from, and the event that tells where it is damaged."""

    step: int
    load: Callable[[], Snapshot]
    rejected: str
    fields: Mapping[str, str]


def load_newest(
    directory: Path | None,
    world: World,
    report: Callable[..., object],
    hot: InMemorySnapshots | None = None,
    downloads: Downloads | None = None,
) -> Snapshot | None:
    """Load the newest snapshot in a run's directory, hot copy or download that every worker finds whole, None if there is none; collective.

    Each worker checks and loads in one pass, all at once. Each newer one that is not whole is told
    by `report("snapshot_rejected", path=..., reason=...)` or `report("hot_copy_rejected",
    reason=...)`. Raises `SnapshotError` where there may be one in remote storage that does not
    answer, and none elsewhere.
    """
    candidates: list[_Candidate] = []
    # first, and so tried first of what is of one step: it need not be read from a disk
    if hot is not None:
        candidates += [
            _Candidate(copy.step, partial(hot.load, copy), "hot_copy_rejected", {})
            for copy in hot.find(report)
        ]
    paths = (
        []
        if directory is None
        else world.broadcast_object(list_snapshots(directory), "choosing a snapshot")
    )
    candidates += [
        _Candidate(
            step_of(path) or 0, partial(load, path), "snapshot_rejected", {"path": str(path)}
        )
        for path in paths
    ]
    if downloads is not None:
        for name in downloads.names(report):
            where = {"path": f"{downloads.url}/{name}"}
            candidates.append(
                _Candidate(
                    step_of(Path(name)) or 0,
                    partial(downloads.load, name),
                    "snapshot_rejected",
                    where,
                )
            )
    for candidate in sorted(candidates, key=attrgetter("step"), reverse=True):
        snapshot, fault = _loaded(candidate.load)
        faults = world.all_gather_json(fault, "loading a snapshot")
        if not any(faults):
            return snapshot
        report(candidate.rejected, **candidate.fields, reason=next(filter(None, faults)))
    if downloads is not None:
        downloads.raise_if_unanswered()
    return None


def _loaded(load_it: Callable[[], Snapshot]) -> tuple[Snapshot | None, str | None]:
    try:
        return load_it(), None
    except SnapshotError as error:
        return None, str(error)
