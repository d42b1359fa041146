"""The commit protocol of a snapshot, and the removal of older ones.

The workers of a snapshot communicate only through files in its directory.

Every worker writes tensors-<attempt>-<rank>-of-<workers>.safetensors, then
part-<attempt>-<rank>.json. Rank 0 waits for all parts, looks at the files that they name, and
writes manifest.json, which commits the snapshot. It removes what earlier attempts left, and the
parts last: once its part is gone and the manifest has its attempt, a worker may begin the next
save, perhaps in the same directory.

A worker that cannot write its part writes failed-<attempt>-<rank>.txt instead. Rank 0 writes one
whenever it cannot commit. After a worker wrote its part, it leaves its files to rank 0 unless
rank 0 failed.

A step may be saved again, such as with a score. A worker whose data has not changed writes no file
then: its part names the earlier one.
"""

from __future__ import annotations

import errno
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.files import opened_size
from samestep.snapshot.manifest import NAME, Manifest, StoredPiece, TensorSpec, attempt_of
from samestep.snapshot.part import Part
from samestep.snapshot.read import check, inspect, list_snapshots, remove, step_of
from samestep.snapshot.state import merge
from samestep.storage import read_regular, sync, write_atomically

# Files are polled, since a shared file system announces no changes. The first polls are
# frequent because small snapshots are complete within milliseconds.
FIRST_DELAY_SECONDS: Final = 0.005
LONGEST_DELAY_SECONDS: Final = 0.25
# errors of a damaged snapshot; with others the file system fails, perhaps only now
DAMAGE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)
# files of any save, and of one that was killed while it wrote one; others are not ours to remove
SAVED: Final = re.compile(r"(tensors|part|failed)-.+|\.(part|failed|manifest)\b.+\.tmp")
KEEP: Final = "keep.txt"  # in a snapshot that is kept, with the reason
MOST_KEPT: Final = 3  # so that alerts do not fill the disk
LARGEST_REASON: Final = 2**12  # bytes
MOST_NONFINITE: Final = 8  # names of tensors in a manifest


class PeerFailedError(SnapshotError):
    """Another worker failed; the message is that worker's."""

    is_secondary = True  # the record blames that worker instead of this one


@dataclass(frozen=True)
class CommitProtocol:
    """One worker's view of a save.

    It waits at most `timeout_seconds` for other workers, or until `given_up` is set.
    """

    directory: Path
    attempt: str  # of the run, with the number of the save
    rank: int
    workers: int
    timeout_seconds: float
    given_up: threading.Event  # set when the process exits

    def raise_if_given_up(self) -> None:
        """Raise `SnapshotError` once this worker has given up."""
        if self.given_up.is_set():
            raise SnapshotError("this worker stopped")

    def send_part(self, part: Part) -> None:
        """Report to rank 0 that this worker's data file is on disk."""
        write_atomically(self._part_path(self.rank), part.to_bytes())

    def receive_parts(self) -> list[Part]:
        """Wait for the parts of all workers and return them by rank.

        Raises `SnapshotError` if a worker failed or timed out.
        """
        paths = [self._part_path(rank) for rank in range(self.workers)]

        def missing() -> str:
            # one listing instead of two lookups per worker, which would load a file server
            present = {path.name for path in self.directory.iterdir()}
            for rank in range(self.workers):
                if self._failed_path(rank).name in present:  # no need to wait for the others
                    raise self._failure(rank)
            late = [str(rank) for rank, path in enumerate(paths) if path.name not in present]
            return f"worker {', '.join(late)} did not write its part" if late else ""

        self._wait_while(missing)
        return [Part.from_bytes(path.read_bytes()) for path in paths]

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, remove what earlier saves of this step left, then all parts.

        Raises `SnapshotError` if a file that the manifest names is missing or has another size.
        """
        manifest.check_sizes(lambda name: opened_size(self.directory / name))
        write_atomically(self.directory / NAME, manifest.to_bytes())
        sync(self.directory.parent)  # the name of a new snapshot
        parts = [self._part_path(rank) for rank in range(self.workers)]
        needed = {file.name for file in manifest.files} | {path.name for path in parts}
        # They only take space, so errors do not matter. No worker writes here before its part is
        # gone.
        with suppress(OSError):
            for path in self.directory.iterdir():
                if path.name not in needed and SAVED.fullmatch(path.name):
                    with suppress(OSError):
                        path.unlink()
        for path in parts:
            path.unlink()  # its worker then knows that its save is complete

    def wait_for_commit(self) -> None:
        """Wait until rank 0 committed this worker's part. Raises `SnapshotError` if it does not."""

        def missing() -> str:
            # first, because rank 0 reports a failure before it removes parts
            is_pending = self._part_path(self.rank).exists()
            if self._failed_path(0).exists():
                self._discard([self.rank])  # also if rank 0 was killed before it did
                raise self._failure(0)
            if not (is_pending or attempt_of(self.directory / NAME) == self.attempt):
                raise SnapshotError("its files were removed")
            return "worker 0 did not write the manifest" if is_pending else ""

        self._wait_while(missing)

    def report_failure(self, failure: SnapshotError) -> None:
        """Remove this worker's files, or on rank 0 all files, and report to the others.

        Files that a manifest names stay: an error after the commit damages no snapshot.
        """
        if self.directory.is_symlink():  # refused: all workers see it
            return
        if self._is_committed():  # the others still wait for the removal of their parts
            for rank in range(self.workers):
                with suppress(OSError):
                    self._part_path(rank).unlink(missing_ok=True)
            return
        # First, to make room on a full disk. But rank 0 may already commit a part that it sees.
        if self.rank == 0 or not self._part_path(self.rank).exists():
            self._discard([self.rank])
        path = self._failed_path(self.rank)
        try:
            write_atomically(path, str(failure).encode())
        except OSError:
            with suppress(OSError):
                path.touch()  # an empty file fits on a full disk
        if self.rank == 0:
            self._discard(range(self.workers))  # last: a worker whose part disappears looks why

    def _wait_while(self, missing: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        delay = FIRST_DELAY_SECONDS
        while what := missing():
            if self.given_up.wait(delay):  # the sleep between two polls
                raise SnapshotError(f"{what} before this worker stopped")
            if time.monotonic() > deadline:
                raise SnapshotError(f"{what} within {self.timeout_seconds:g} seconds")
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    def _failure(self, rank: int) -> PeerFailedError:
        # an empty report is that of a full disk
        unknown = f"worker {rank} could not write its part of snapshot {self.directory}"
        return PeerFailedError(self._failed_path(rank).read_text() or unknown)

    def _is_committed(self) -> bool:
        """Return whether the manifest names this save's files."""
        try:
            return attempt_of(self.directory / NAME) == self.attempt  # not an earlier save's
        except OSError:  # better extra files than a manifest without its data
            return self.rank == 0

    def _discard(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for path in (self._part_path(rank), self.data_path(rank)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def data_path(self, rank: int) -> Path:
        """Return the path of a worker's data file; an earlier save of the same step has others."""
        return self.directory / f"tensors-{self.attempt}-{rank}-of-{self.workers}.safetensors"

    def _part_path(self, rank: int) -> Path:
        return self.directory / f"part-{self.attempt}-{rank}.json"

    def _failed_path(self, rank: int) -> Path:
        return self.directory / f"failed-{self.attempt}-{rank}.txt"


def combine(
    parts: Sequence[Part], *, step: int, attempt: str, info: Mapping[str, Any], score: float | None
) -> Manifest:
    """Combine the parts of all workers, by rank, into a manifest.

    Its `info` also names tensors that are not finite, if there are any.

    Raises `SnapshotError` if workers differ in values that must be equal, or a tensor is
    incomplete.
    """
    nonfinite = sorted({name for part in parts for name in part.nonfinite})[:MOST_NONFINITE]
    return Manifest(
        step=step,
        attempt=attempt,
        created=time.time(),
        workers=len(parts),
        torch=str(torch.__version__),
        score=score,
        info={**info, "nonfinite": nonfinite} if nonfinite else info,
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
    # of complete tensors in the workers' own states, which several workers may have written
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
        name: tuple(sorted(stored, key=lambda piece: piece.start))
        for name, stored in pieces.items()
    }


def keep_newest(directory: Path, reason: str) -> None:
    """Mark the newest complete snapshot, and newer ones that are being written, as kept.

    One that is not finite is marked only if none is.
    """
    complete: dict[Path, Manifest] = {}
    for path in reversed(list_snapshots(directory)):
        if (path / NAME).exists():
            with suppress(SnapshotError):
                complete[path] = inspect(path)
        else:
            _mark(path, reason)
        if path in complete and not complete[path].nonfinite:
            break
    if complete:
        _mark(min(complete, key=lambda path: bool(complete[path].nonfinite)), reason)


def _mark(path: Path, reason: str) -> None:
    with suppress(OSError):  # an alert does not end a run
        write_atomically(path / KEEP, f"{reason}\n".encode())


def kept(manifests: Mapping[Path, Manifest]) -> set[Path]:
    """Return the newest snapshot that is kept for a reason, for the newest `MOST_KEPT` reasons.

    `manifests` are those of a directory, the newest first. One that is not finite stays only if no
    other one is kept for the same reason.
    """
    by_reason: dict[bytes, Path] = {}
    for path, manifest in manifests.items():
        with suppress(OSError):  # most are not marked
            reason = read_regular(path / KEEP, LARGEST_REASON)
            other = by_reason.setdefault(reason, path)
            if manifests[other].nonfinite and not manifest.nonfinite:
                by_reason[reason] = path
    return set(islice(by_reason.values(), MOST_KEPT))


class Retention:
    """Removes all but the `keep_last` newest snapshots and the `keep_best` with highest scores.

    Those that are `kept` for the newest reasons stay as well.
    """

    def __init__(
        self, directory: Path, keep_last: int, keep_best: int, verified: Iterable[Path] = ()
    ) -> None:
        self._directory, self._keep_last, self._keep_best = directory, keep_last, keep_best
        self._checked = set(verified)  # this process wrote them or verified their checksums
        self._unreadable: set[Path] = set()  # now, but perhaps not damaged

    def apply(self, written: Path) -> list[Path]:
        """Remove and return old snapshots now that `written` is committed.

        Ignores links, and steps after `written`, which belong to another history. Removes earlier
        directories without a manifest. A damaged snapshot does not count towards `keep_last` and
        `keep_best`, and is removed like a complete one of its age. One that cannot be read, because
        the file system fails, stays.
        """
        self._checked.add(written)
        self._unreadable.clear()  # the file system may work again
        paths = [path for path in list_snapshots(self._directory) if not path.is_symlink()]
        steps = {path: step_of(path) or 0 for path in paths}
        # newest first
        candidates = [path for path in reversed(steps) if steps[path] <= steps[written]]
        # only the sizes of files are compared here; `choose` then reads those that may stay
        examined = {path: self._valid(path, inspect) for path in candidates}
        manifests = {path: manifest for path, manifest in examined.items() if manifest is not None}
        staying, is_old = choose(manifests, self._keep_last, self._keep_best, self._is_complete)
        # What cannot be read now may be all that is left to resume from later.
        staying |= {written, *self._unreadable, *kept(manifests)}
        old = [path for path in candidates if path not in staying]
        removed = [path for path in old if is_old(path) or not (path / NAME).exists()]
        for path in removed:
            remove(path)
        return removed

    def _is_complete(self, path: Path) -> bool:
        if path not in self._checked and self._valid(path, check) is not None:  # reads every byte
            self._checked.add(path)
        return path in self._checked

    def _valid(self, path: Path, examine: Callable[[Path], Manifest]) -> Manifest | None:
        try:
            return examine(path)
        except SnapshotError as error:
            cause = error.__cause__
            # Input/output errors and lost connections say nothing about the snapshot.
            if isinstance(cause, OSError) and cause.errno not in DAMAGE:
                self._unreadable.add(path)
            return None


def choose(
    manifests: Mapping[Path, Manifest],
    keep_last: int,
    keep_best: int,
    is_complete: Callable[[Path], bool] = lambda _: True,
) -> tuple[set[Path], Callable[[Path], bool]]:
    """Return which snapshots stay, and whether another one is so old that it may be removed.

    `manifests` are those of snapshots that seem complete; `is_complete` is called until enough are
    found. Of equal scores, the earliest is the best. Snapshots that are not finite are counted by
    themselves, so that they never take the place of a finite one.
    """
    staying: set[Path] = set()
    horizons = {}  # with too few complete ones, no age is old enough for the others to be removed
    for nonfinite in (False, True):
        scores = {
            path: manifest.score
            for path, manifest in manifests.items()
            if bool(manifest.nonfinite) == nonfinite
        }
        by_step = sorted(scores, key=_step, reverse=True)
        newest = list(islice(filter(is_complete, by_step), keep_last))
        staying.update(newest, islice(filter(is_complete, rank_scores(scores)), keep_best))
        horizons[nonfinite] = _step(newest[-1]) if len(newest) == keep_last else 0

    def is_old(path: Path) -> bool:
        return _step(path) < horizons[path in manifests and bool(manifests[path].nonfinite)]

    return staying, is_old


def _step(path: Path) -> int:
    return step_of(path) or 0


def rank_scores(scores: Mapping[Path, float | None]) -> list[Path]:
    """Return the snapshots that have a score, the best and of equal ones the earliest first."""
    ranked = [
        (-score, step_of(path) or 0, path)
        for path, score in scores.items()
        if score is not None and not math.isnan(score)
    ]
    return [path for _, _, path in sorted(ranked)]
