"""Write snapshots beside training. Workers meet in the file system alone.

    every worker    copies its pieces of tensors, which is all that training waits for
                    writes tensors-<attempt>-<rank>-of-<workers>.safetensors, then part-<attempt>-<rank>.json
    rank 0          waits for all parts, writes manifest.json: now, and only now, the snapshot exists
                    removes the parts, then older snapshots
    other ranks     wait until their part is gone

A worker whose part will never come leaves failed-<attempt>-<rank>.txt instead. So no manifest can follow where there is
one, and whoever sees it may remove its files. A worker that has given its part leaves its files to rank 0.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import SamestepError, SnapshotError
from samestep.snapshot.commit import combined
from samestep.snapshot.files import write_whole
from samestep.snapshot.manifest import NAME, Manifest
from samestep.snapshot.part import Contribution, Part, Staging, contribution, write_part
from samestep.snapshot.read import directory_name, fault, inspect, list_snapshots
from samestep.snapshot.retention import Retention
from samestep.snapshot.state import copy_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Event = tuple[str, dict[str, Any]]

FIRST_PAUSE_SECONDS: Final = 0.005
LONGEST_PAUSE_SECONDS: Final = 0.25
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ADVICE: Final = {
    errno.ENOSPC: "free some space there, or lower keep_last and keep_best",
    errno.EDQUOT: "free some of the quota there, or lower keep_last and keep_best",
    errno.EACCES: "make the directory writable",
    errno.EPERM: "make the directory writable",
    errno.EROFS: "choose a directory that is writable",
    errno.ENOENT: "leave the run's directory in place while the run writes to it",
}


@dataclass(frozen=True)
class _Save:
    """One snapshot that is being written by this worker."""

    directory: Path
    step: int
    attempt: str
    workers: int
    mine: Contribution
    data: memoryview
    info: Mapping[str, Any]
    score: float | None
    stall_seconds: float

    def data_path(self, rank: int) -> Path:
        return self.directory / f"tensors-{self.attempt}-{rank}-of-{self.workers}.safetensors"

    def part_path(self, rank: int) -> Path:
        return self.directory / f"part-{self.attempt}-{rank}.json"

    def failed_path(self, rank: int) -> Path:
        return self.directory / f"failed-{self.attempt}-{rank}.txt"


class _ToldError(SnapshotError):
    """A failure of another worker, in its own words."""


class SnapshotWriter:
    """Writes one worker's part of the snapshots in a run's directory, which all workers share.

    `attempt` is equal on all workers and differs between any two starts of the run. All workers make the same calls of
    `save`. `report(kind, **fields)` is called by the thread that calls these methods: when a snapshot is whole, failed,
    or removed since newer ones are there. After `timeout_seconds` other workers are waited for no longer.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        workers: int,
        attempt: str,
        keep_last: int,
        keep_best: int,
        report: Callable[..., object],
        timeout_seconds: float = 1800.0,
    ) -> None:
        if not _ATTEMPT.fullmatch(attempt):
            raise SnapshotError(f"attempt={attempt!r} was given; expected letters, digits, dots, dashes and underscores")
        self._directory = directory
        self._rank = rank
        self._workers = workers
        self._attempt = attempt
        self._report = report
        self._timeout_seconds = timeout_seconds
        self._retention = Retention(directory, keep_last, keep_best)
        self._staging = Staging()
        self._saves = 0
        self._pending: Future[list[Event]] | None = None
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()

    def save(
        self, step: int, shared: Mapping[str, Any], own: Mapping[str, Any], info: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Copy the state and start to write it; a save before it is waited for first.

        `shared` maps names to states that are equal on all workers: each writes its share of the tensors, rank 0 what is
        plain. `own` maps names to states of which this worker holds a part: slices (`TensorSlice`), or tensors and plain
        values under keys that only it has. What several workers hold there must be equal. `info` is plain; the snapshots of
        the highest `score` are kept. Raises `SnapshotError` if a state cannot be held or the save before it failed.
        """
        self.wait()
        started = time.perf_counter()
        mine, values = contribution(shared, own, self._rank, self._workers)
        data = self._staging.copy(values)
        stall_seconds = time.perf_counter() - started
        self._saves += 1  # a step that is saved again gets files of its own
        save = _Save(
            directory=self._directory / directory_name(step),
            step=step,
            attempt=f"{self._attempt}.{self._saves}",
            workers=self._workers,
            mine=mine,
            data=data,
            info=copy_plain(dict(info), "info"),
            score=None if score is None else float(score),
            stall_seconds=stall_seconds,
        )
        self._pending = Future()
        self._thread = threading.Thread(target=self._run, args=(save, self._pending), name=f"write {save.directory.name}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the last save is whole. Raises `SnapshotError`, once, if it failed."""
        if self._thread is not None:
            self._thread.join()
            self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise `SnapshotError`, once, if the last save has failed by now."""
        if self._pending is None or not self._pending.done():
            return
        pending, self._pending, self._thread = self._pending, None, None
        if error := pending.exception():
            with suppress(SamestepError):  # a full disk may take no event either
                self._report("snapshot_failed", reason=str(error))
            raise error
        for kind, fields in pending.result():
            self._report(kind, **fields)

    def close(self, grace_seconds: float = 5.0) -> None:
        """Give a save that is under way `grace_seconds` to become whole, then give it up; no save may follow."""
        if self._thread is not None:
            self._thread.join(grace_seconds)
        self._given_up.set()
        with suppress(SnapshotError):  # it was reported
            self.wait()

    def _run(self, save: _Save, pending: Future[list[Event]]) -> None:
        try:
            pending.set_result(self._write(save))
        except BaseException as error:  # noqa: BLE001  raised again by whoever waits
            pending.set_exception(error)

    def _write(self, save: _Save) -> list[Event]:
        started = time.perf_counter()
        try:
            save.directory.mkdir(parents=True, exist_ok=True)
            part = write_part(save.data_path(self._rank), save.mine, save.data, self._go_on)
            write_whole(save.part_path(self._rank), part.to_bytes())
            manifest = self._commit(save) if self._rank == 0 else None
        except Exception as error:
            failure = self._failure(save, error)
            self._discard(save)
            with suppress(OSError):
                save.failed_path(self._rank).write_text(str(failure))
            raise failure from error
        if manifest is None:
            self._wait_for_commit(save)
            return []
        event = {"step": save.step, "path": str(save.directory), "bytes": manifest.size, "score": save.score}
        seconds = {"stall_seconds": save.stall_seconds, "seconds": time.perf_counter() - started}
        return [("snapshot", {**event, **seconds}), *self._tidy(save, manifest)]

    def _commit(self, save: _Save) -> Manifest:
        """Wait for all parts and write the manifest."""
        parts = {save.part_path(rank).name: rank for rank in range(self._workers)}

        def missing() -> str:
            late = [rank for name, rank in parts.items() if name not in self._present(save)]
            return f"worker {', '.join(map(str, late))} did not write its part" if late else ""

        self._wait_until_nothing_is(missing)
        manifest = combined(
            [Part.from_bytes(save.part_path(rank).read_bytes()) for rank in range(self._workers)],
            step=save.step,
            attempt=save.attempt,
            info=save.info,
            score=save.score,
        )
        write_whole(save.directory / NAME, manifest.to_bytes())
        return manifest

    def _wait_for_commit(self, save: _Save) -> None:
        own_part = save.part_path(self._rank).name
        try:
            self._wait_until_nothing_is(lambda: "worker 0 did not write the manifest" if own_part in self._present(save) else "")
        except _ToldError:
            self._discard(save)
            raise
        except Exception as error:
            raise self._failure(save, error) from error

    def _tidy(self, save: _Save, manifest: Manifest) -> list[Event]:
        """Remove what the new manifest does not name, then older snapshots once the new one was seen whole."""
        named = {NAME, *(file.name for file in manifest.files)}
        try:
            for path in save.directory.iterdir():
                if path.name not in named:
                    path.unlink()
            inspect(save.directory)
            return [("snapshot_removed", {"path": str(path)}) for path in self._retention.apply(save.directory)]
        except (OSError, SnapshotError) as error:
            return [("snapshot_not_removed", {"reason": str(error)})]

    def _present(self, save: _Save) -> set[str]:
        """Return the names of the files in the snapshot's directory. Raises the failure that another worker left there."""
        present = {path.name for path in save.directory.iterdir()}
        for rank in range(self._workers):
            if save.failed_path(rank).name in present:
                told = save.failed_path(rank).read_text()
                raise _ToldError(told or f"worker {rank} could not write its part of snapshot {save.directory.name}, nor why")
        return present

    def _wait_until_nothing_is(self, missing: Callable[[], str]) -> None:
        """Poll until `missing` says nothing. Raises `SnapshotError` with what it says when time is up."""
        deadline = time.monotonic() + self._timeout_seconds
        pause = FIRST_PAUSE_SECONDS
        while what := missing():
            if self._given_up.wait(pause):
                raise SnapshotError(f"{what} before this worker stopped")
            if time.monotonic() > deadline:
                raise SnapshotError(f"{what} within {self._timeout_seconds:g} seconds")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise SnapshotError("this worker stopped")

    def _discard(self, save: _Save) -> None:
        """Remove this worker's files of a failed save; rank 0, which will not commit it, everybody's."""
        for rank in range(self._workers) if self._rank == 0 else [self._rank]:
            for path in (save.part_path(rank), save.data_path(rank)):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _failure(self, save: _Save, error: Exception) -> SnapshotError:
        if isinstance(error, _ToldError):
            return error
        reason = str(error) if isinstance(error, (OSError, SnapshotError)) else f"{type(error).__name__}: {error}"
        advice = _ADVICE.get(error.errno or 0) if isinstance(error, OSError) else None
        newest = next((path.name for path in reversed(list_snapshots(self._directory)) if not fault(path, inspect)), None)
        return SnapshotError(
            f"snapshot {save.directory} could not be written: worker {self._rank}: {reason}"
            + (f"; {advice}" if advice else "")
            + (f". The newest whole snapshot is {newest}: the run can resume from it" if newest else ". There is no whole snapshot yet")
        )
