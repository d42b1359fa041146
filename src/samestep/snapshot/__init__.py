"""The whole state of a run at a step, on disk: written beside training, checked before it is believed, read at any number of workers."""

from samestep.snapshot.export import export
from samestep.snapshot.read import Snapshot, check, find_newest, list_snapshots, load
from samestep.snapshot.resume import load_newest
from samestep.snapshot.write import SnapshotWriter

__all__ = [
    "Snapshot",
    "SnapshotWriter",
    "check",
    "export",
    "find_newest",
    "list_snapshots",
    "load",
    "load_newest",
]
