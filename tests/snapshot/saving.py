"""Workers of one process that save, and communicate through the file system only."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from samestep.snapshot import SnapshotWriter, list_snapshots
from samestep.snapshot.read import fault
from samestep.step.layout import TensorSlice, flattened, storage_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

Reports = list[tuple[str, dict[str, Any]]]
NO_INFO: dict[str, Any] = {}


@contextmanager
def team(
    directory: Path,
    workers: int = 1,
    attempt: str = "first",
    keep_last: int = 100,
    keep_best: int = 0,
    timeout_seconds: float = 20.0,
) -> Iterator[tuple[list[SnapshotWriter], Reports]]:
    """Yield the writers of all workers, by rank, and what rank 0 reports."""
    reports: Reports = []

    def report(kind: str, **fields: Any) -> None:
        reports.append((kind, fields))

    writers = [
        SnapshotWriter(
            directory,
            rank=rank,
            workers=workers,
            attempt=attempt,
            keep_last=keep_last,
            keep_best=keep_best,
            report=report if rank == 0 else lambda *_, **__: None,
            timeout_seconds=timeout_seconds,
        )
        for rank in range(workers)
    ]
    try:
        yield writers, reports
    finally:
        for writer in writers:
            writer.close(grace_seconds=0.0)


def save(
    writers: Sequence[SnapshotWriter],
    step: int,
    shared: Mapping[str, Any],
    own_states: Sequence[Mapping[str, Any]] | None = None,
    info: Mapping[str, Any] = NO_INFO,
    score: float | None = None,
) -> None:
    """Save with all workers, and return when old snapshots are removed."""
    for rank, writer in enumerate(writers):
        writer.save(step, shared, own_states[rank] if own_states else {}, info, score)
    for writer in writers:
        writer.wait(tidy_seconds=20.0)


def save_once(
    directory: Path, step: int, shared: Mapping[str, Any], workers: int = 1, attempt: str = "first"
) -> None:
    """Save one snapshot in addition to existing ones."""
    with team(directory, workers, attempt) as (writers, _):
        save(writers, step, shared)


def small_state(step: int) -> dict[str, Any]:
    """Return a state that differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.rand(2, 40, generator=generator),
            "bias": torch.rand(3, dtype=torch.float64, generator=generator),
        },
        "scheduler": {"last_epoch": step, "milestones": (1, 2.5, None)},
    }


def sliced(tensor: torch.Tensor, start: int, stop: int) -> TensorSlice:
    """Return elements [start, stop) of a tensor as a worker of a sharded optimizer holds them."""
    return TensorSlice(
        flattened(tensor)[start:stop].clone(), tuple(tensor.shape), start, storage_order(tensor)
    )


def find_newest(directory: Path, report: Callable[..., object]) -> Path | None:
    """Return the newest complete snapshot; report those after it, in the words of a resume."""
    for path in reversed(list_snapshots(directory)):
        if (reason := fault(path)) is None:
            return path
        report("snapshot_rejected", path=str(path), reason=reason)
    return None
