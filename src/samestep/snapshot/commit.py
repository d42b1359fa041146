"""The commit protocol of a snapshot: its workers communicate only through files in its directory.

Every worker writes tensors-<attempt>-<rank>-of-<workers>.safetensors, then
part-<attempt>-<rank>.json. Rank 0 waits for all parts and writes manifest.json, which commits the
snapshot; then it removes the parts. The other ranks wait until their parts are gone.

A worker that cannot write its part writes failed-<attempt>-<rank>.txt instead. Rank 0 writes one
whenever it cannot commit. After a worker wrote its part, it leaves its files to rank 0 unless
rank 0 failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.manifest import NAME, Manifest, StoredPiece, TensorSpec
from samestep.snapshot.part import Part
from samestep.snapshot.state import merge
from samestep.storage import write_atomically

FIRST_DELAY_SECONDS: Final = 0.005
LONGEST_DELAY_SECONDS: Final = 0.25


class PeerFailedError(SnapshotError):
    """Another worker failed; the message is that worker's."""

    is_secondary = True


@dataclass(frozen=True)
class CommitProtocol:
    """One worker's view of a save.

    It waits at most `timeout_seconds` for other workers, or until `given_up` is set.
    """

    directory: Path
    attempt: str
    rank: int
    workers: int
    timeout_seconds: float
    given_up: threading.Event

    def raise_if_given_up(self) -> None:
        """Raise `SnapshotError` once this worker has given up."""
        if self.given_up.is_set():
            raise SnapshotError("this worker stopped")

    def send_part(self, part: Part) -> None:
        """Report this worker's part, whose data file is durable, to rank 0."""
        write_atomically(self._part_path(self.rank), part.to_bytes())

    def receive_parts(self) -> list[Part]:
        """Wait for the parts of all workers and return them by rank.

        Raises `SnapshotError` if a worker failed or timed out.
        """
        paths = [self._part_path(rank) for rank in range(self.workers)]

        def missing() -> str:
            present = {path.name for path in self.directory.iterdir()}
            for rank in range(self.workers):
                if self._failed_path(rank).name in present:
                    raise self._failure(rank)
            late = [str(rank) for rank, path in enumerate(paths) if path.name not in present]
            return f"worker {', '.join(late)} did not write its part" if late else ""

        self._wait_while(missing)
        return [Part.from_bytes(path.read_bytes()) for path in paths]

    def wait_for_commit(self) -> None:
        """Wait until rank 0 committed this worker's part. Raises `SnapshotError` if it does not."""

        def missing() -> str:
            # checked first: rank 0 reports a failure before it removes parts
            is_pending = self._part_path(self.rank).exists()
            if self._failed_path(0).exists():
                self._discard([self.rank])
                raise self._failure(0)
            if not (is_pending or (self.directory / NAME).exists()):
                raise SnapshotError("its files were removed")
            return "worker 0 did not write the manifest" if is_pending else ""

        self._wait_while(missing)

    def report_failure(self, failure: SnapshotError) -> None:
        """Remove this worker's files, or on rank 0 all files, and report to the others."""
        self._discard([self.rank])
        path = self._failed_path(self.rank)
        try:
            write_atomically(path, str(failure).encode())
        except OSError:
            with suppress(OSError):
                path.touch()  # an empty file fits on a full disk
        if self.rank == 0:
            self._discard(range(self.workers))

    def _wait_while(self, missing: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        delay = FIRST_DELAY_SECONDS
        while what := missing():
            if self.given_up.wait(delay):
                raise SnapshotError(f"{what} before this worker stopped")
            if time.monotonic() > deadline:
                raise SnapshotError(f"{what} within {self.timeout_seconds:g} seconds")
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    def _failure(self, rank: int) -> PeerFailedError:
        unknown = f"worker {rank} could not write its part of snapshot {self.directory}"
        return PeerFailedError(self._failed_path(rank).read_text() or unknown)

    def _discard(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for path in (self._part_path(rank), self.data_path(rank)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def data_path(self, rank: int) -> Path:
        """Return the path of a worker's data file."""
        return self.directory / f"tensors-{self.attempt}-{rank}-of-{self.workers}.safetensors"

    def _part_path(self, rank: int) -> Path:
        return self.directory / f"part-{self.attempt}-{rank}.json"

    def _failed_path(self, rank: int) -> Path:
        return self.directory / f"failed-{self.attempt}-{rank}.txt"


def combine(
    parts: Sequence[Part], *, step: int, attempt: str, info: Mapping[str, Any], score: float | None
) -> Manifest:
    """Combine the parts of all workers, by rank, into a manifest.

    Raises `SnapshotError` if workers differ in values that must be equal, or a tensor is
    incomplete.
    """
    return Manifest(
        step=step,
        attempt=attempt,
        created=time.time(),
        workers=len(parts),
        torch=str(torch.__version__),
        score=score,
        info=info,
        state=reduce(merge, (part.state for part in parts)),
        specs=_specs(parts),
        pieces=_pieces(parts),
        files=tuple(part.file for part in parts),
    )


def _specs(parts: Sequence[Part]) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for rank, part in enumerate(parts):
        for name, spec in part.specs.items():
            if (expected := specs.setdefault(name, spec)) != spec:
                raise SnapshotError(
                    f"tensor {name} must be {expected.to_json()} on all workers, "
                    f"got {spec.to_json()} on worker {rank}"
                )
    return specs


def _pieces(parts: Sequence[Part]) -> dict[str, tuple[StoredPiece, ...]]:
    """Return the pieces of each tensor; of equal pieces from several workers, the first."""
    pieces: dict[str, list[StoredPiece]] = {name: [] for part in parts for name in part.specs}
    digests: dict[tuple[str, int, int], str | None] = {}
    for rank, part in enumerate(parts):
        for name, start, stop, offset, digest in part.pieces:
            is_repeated = digest is not None and (name, start, stop) in digests
            if digests.setdefault((name, start, stop), digest) != digest:
                raise SnapshotError(
                    f"tensor {name} must be equal on all workers, got other values on worker {rank}"
                )
            if not is_repeated:
                pieces[name].append(StoredPiece(rank, start, stop, offset))
    return {
        name: tuple(sorted(found, key=lambda piece: piece.start)) for name, found in pieces.items()
    }
