"""How the workers that write one snapshot meet: in its directory alone.

    every worker    writes tensors-<attempt>-<rank>-of-<workers>.safetensors, then
    part-<attempt>-<rank>.json rank 0          waits for all parts, writes manifest.json: now, and
    only now, the snapshot exists; removes the parts other ranks     wait until their part is gone

A worker whose part will never come leaves failed-<attempt>-<rank>.txt instead, and rank 0 one of
its own whenever there will be no manifest. A worker that has given its part leaves its files to
rank 0 until it sees that.
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
from samestep.snapshot.files import write_whole
from samestep.snapshot.manifest import NAME, Manifest, Piece, TensorSpec
from samestep.snapshot.part import Part
from samestep.snapshot.state import merge

FIRST_PAUSE_SECONDS: Final = 0.005
LONGEST_PAUSE_SECONDS: Final = 0.25


class ToldError(SnapshotError):
    """Another worker's failure, in its own words."""

    is_secondary = True


@dataclass(frozen=True)
class CommitProtocol:
    """One worker's view of a save. Others are waited for until `timeout_seconds` have passed or `given_up` is set."""

    directory: Path
    attempt: str
    rank: int
    workers: int
    timeout_seconds: float
    given_up: threading.Event

    @property
    def data_path(self) -> Path:
        """Where this worker writes its pieces of tensors."""
        return self._data_path(self.rank)

    def go_on(self) -> None:
        """Raise `SnapshotError` once this worker has given up."""
        if self.given_up.is_set():
            raise SnapshotError("this worker stopped")

    def give(self, part: Part) -> None:
        """Tell rank 0 of this worker's part; its data file is durable by now."""
        write_whole(self._part_path(self.rank), part.to_bytes())

    def parts(self) -> list[Part]:
        """Return all workers' parts, by rank, once they are there. Raises `SnapshotError` if one will never come or is late."""
        names = {self._part_path(rank).name: str(rank) for rank in range(self.workers)}

        def missing() -> str:
            present = {path.name for path in self.directory.iterdir()}
            for rank in range(self.workers):
                if self._failed_path(rank).name in present:
                    raise self._told(rank)
            late = [rank for name, rank in names.items() if name not in present]
            return f"worker {', '.join(late)} did not write its part" if late else ""

        self._wait_while(missing)
        return [Part.from_bytes(self._part_path(rank).read_bytes()) for rank in range(self.workers)]

    def wait_for_commit(self) -> None:
        """Return when rank 0 has taken this worker's part. Raises `SnapshotError` if it never will, or is late."""

        def missing() -> str:
            # looked at first: a failure is told before parts are removed
            there = self._part_path(self.rank).exists()
            if self._failed_path(0).exists():
                self._discard([self.rank])
                raise self._told(0)
            if not (there or (self.directory / NAME).exists()):
                raise SnapshotError("its files were removed")
            return "worker 0 did not write the manifest" if there else ""

        self._wait_while(missing)

    def fail(self, failure: SnapshotError) -> None:
        """Free the space that this worker's part took, and tell the others; where rank 0 fails, free all of it."""
        self._discard([self.rank])
        path = self._failed_path(self.rank)
        try:
            write_whole(path, str(failure).encode())
        except OSError:
            with suppress(OSError):
                path.touch()  # where there is no room for words
        if self.rank == 0:
            self._discard(range(self.workers))

    def _wait_while(self, missing: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        pause = FIRST_PAUSE_SECONDS
        while what := missing():
            if self.given_up.wait(pause):
                raise SnapshotError(f"{what} before this worker stopped")
            if time.monotonic() > deadline:
                raise SnapshotError(f"{what} within {self.timeout_seconds:g} seconds")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _told(self, rank: int) -> ToldError:
        words = self._failed_path(rank).read_text()
        return ToldError(
            words or f"worker {rank} could not write its part of snapshot {self.directory}, nor why"
        )

    def _discard(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for path in (self._part_path(rank), self._data_path(rank)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _data_path(self, rank: int) -> Path:
        return self.directory / f"tensors-{self.attempt}-{rank}-of-{self.workers}.safetensors"

    def _part_path(self, rank: int) -> Path:
        return self.directory / f"part-{self.attempt}-{rank}.json"

    def _failed_path(self, rank: int) -> Path:
        return self.directory / f"failed-{self.attempt}-{rank}.txt"


def combined(
    parts: Sequence[Part], *, step: int, attempt: str, info: Mapping[str, Any], score: float | None
) -> Manifest:
    """Put the parts of all workers together, by rank.

    Raises `SnapshotError` where they differ in what they should hold alike, or do not make up every
    tensor.
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
        forms=_forms(parts),
        pieces=_pieces(parts),
        files=tuple(part.file for part in parts),
    )


def _forms(parts: Sequence[Part]) -> dict[str, TensorSpec]:
    forms: dict[str, TensorSpec] = {}
    for rank, part in enumerate(parts):
        for name, form in part.forms.items():
            if forms.setdefault(name, form) != form:
                raise SnapshotError(
                    f"worker {rank} holds tensor {name} as {form.to_json()}, a worker before it as {forms[name].to_json()}"
                )
    return forms


def _pieces(parts: Sequence[Part]) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each tensor; of those that several workers wrote alike, the first."""
    pieces: dict[str, list[Piece]] = {name: [] for part in parts for name in part.forms}
    digests: dict[tuple[str, int, int], str | None] = {}
    for rank, part in enumerate(parts):
        for name, start, stop, offset, digest in part.pieces:
            known = digests.setdefault((name, start, stop), digest)
            if known != digest:
                raise SnapshotError(
                    f"worker {rank} holds other values of tensor {name} than a worker before it; expected equal ones"
                )
            if digest is None or not any(
                (piece.start, piece.stop) == (start, stop) for piece in pieces[name]
            ):
                pieces[name].append(Piece(rank, start, stop, offset))
    return {
        name: tuple(sorted(found, key=lambda piece: piece.start)) for name, found in pieces.items()
    }
