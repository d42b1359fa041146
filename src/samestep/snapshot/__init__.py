"""Snapshots of a run's complete state, written by any number of workers in the background.

Their checksums are verified before use, and any number of workers can resume from them.
"""

from samestep.snapshot.read import Snapshot, check, export, list_snapshots, load
from samestep.snapshot.resume import load_newest
from samestep.snapshot.write import SnapshotWriter

__all__ = ["Snapshot", "SnapshotWriter", "check", "export", "list_snapshots", "load", "load_newest"]
