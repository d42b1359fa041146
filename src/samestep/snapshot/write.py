"""Write snapshots beside training: what training waits for is the copy of this worker's pieces of tensors to host memory."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep.errors import SamestepError, SnapshotError
from samestep.snapshot.commit import CommitProtocol, ToldError, combined
from samestep.snapshot.files import sync, write_whole
from samestep.snapshot.manifest import NAME, Manifest
from samestep.snapshot.part import Contribution, Staging, contribution, data_bytes, write_part
from samestep.snapshot.read import directory_name, fault, inspect, list_snapshots
from samestep.snapshot.retention import Retention
from samestep.snapshot.state import copy_plain

Event = tuple[str, dict[str, Any]]

GIVING_UP_SECONDS: Final = 2.0
_ATTEMPT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
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

    step: int
    meeting: CommitProtocol
    mine: Contribution
    data: memoryview
    info: Mapping[str, Any]
    score: float | None
    stall_seconds: float


class SnapshotWriter:
    """Writes one worker's part of the snapshots in a run's directory, which all workers share.

    `attempt` is equal on all workers and differs between any two starts of the run. All workers
    make the same calls of `save`. `report(kind, **fields)` is called by the thread that calls these
    methods: when a snapshot is whole, failed, or removed since newer ones are there.
    `when_whole(path)` is called on rank 0, by a thread of its own, and returns at once. After
    `timeout_seconds` other workers are waited for no longer.
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
        when_whole: Callable[[Path], object] = lambda _: None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        if not _ATTEMPT.fullmatch(attempt):
            raise SnapshotError(
                f"attempt={attempt!r} was given; expected letters, digits, dots, dashes and underscores"
            )
        self._directory = directory
        self._rank = rank
        self._workers = workers
        self._attempt = attempt
        self._report = report
        self._when_whole = when_whole
        self._timeout_seconds = timeout_seconds
        self._retention = Retention(directory, keep_last, keep_best)
        self._staging = Staging()
        self._preparation: threading.Thread | None = None
        self._saves = 0
        self._pending: Future[list[Event]] | None = None
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()

    def prepare(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Get memory ready, in the background, so that the first `save` of such states need not wait for it.

        Raises `SnapshotError` if a state cannot be held.
        """
        mine, values = contribution(shared, own, self._rank, self._workers)
        pinned = any(tensor.is_cuda for tensor in values)

        def reserve() -> None:
            with suppress(RuntimeError):  # without enough memory: the save will say so
                self._staging.reserve(data_bytes(mine.pieces), pinned=pinned)

        self._preparation = threading.Thread(target=reserve, name="prepare snapshots", daemon=True)
        self._preparation.start()

    def save(
        self,
        step: int,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        info: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Copy the state and start to write it; a save before it is waited for first.

        `shared` maps names to states that are equal on all workers: each writes its share of the
        tensors, rank 0 what is plain. `own` maps names to states of which this worker holds a part:
        slices (`TensorSlice`), or tensors and plain values under keys that only it has. What
        several workers hold there must be equal. `info` is plain; the snapshots of the highest
        `score` are kept. Raises `SnapshotError` if a state cannot be held or the save before it
        failed.
        """
        self.wait()
        started = time.perf_counter()
        self._end_preparation()
        mine, values = contribution(shared, own, self._rank, self._workers)
        data = self._staging.copy(mine.pieces, values)
        stall_seconds = time.perf_counter() - started
        self._saves += 1  # a step that is saved again gets files of its own
        save = _Save(
            step=step,
            meeting=CommitProtocol(
                directory=self._directory / directory_name(step),
                attempt=f"{self._attempt}.{self._saves}",
                rank=self._rank,
                workers=self._workers,
                timeout_seconds=self._timeout_seconds,
                given_up=self._given_up,
            ),
            mine=mine,
            data=data,
            info=copy_plain(dict(info), "info"),
            score=None if score is None else float(score),
            stall_seconds=stall_seconds,
        )
        self._pending = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(save, self._pending),
            name=f"write {directory_name(step)}",
            daemon=True,
        )
        self._thread.start()

    def _end_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.join()
            self._preparation = None

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
        """Give a save that is under way `grace_seconds` to become whole, then give it up; no save may follow.

        What hangs even then, in a file system that does not answer, ends with the process and harms
        no snapshot.
        """
        self._end_preparation()
        if self._thread is not None:
            self._thread.join(grace_seconds)
            self._given_up.set()
            self._thread.join(GIVING_UP_SECONDS)
        with suppress(SnapshotError):  # it was reported
            self.raise_if_failed()

    def _run(self, save: _Save, pending: Future[list[Event]]) -> None:
        try:
            pending.set_result(self._write(save))
        except BaseException as error:  # noqa: BLE001  raised again by whoever waits
            pending.set_exception(error)

    def _write(self, save: _Save) -> list[Event]:
        """Write this worker's part, and return what to report once the snapshot is whole. Raises `SnapshotError`."""
        started = time.perf_counter()
        meeting = save.meeting
        try:
            meeting.directory.mkdir(parents=True, exist_ok=True)
            meeting.give(write_part(meeting.data_path, save.mine, save.data, meeting.go_on))
            manifest = self._commit(save) if self._rank == 0 else None
        except Exception as error:
            failure = self._failure(meeting, error)
            meeting.fail(failure)
            raise failure from error
        if manifest is None:
            try:
                meeting.wait_for_commit()
            except Exception as error:
                raise self._failure(meeting, error) from error
            return []
        seconds = {"stall_seconds": save.stall_seconds, "seconds": time.perf_counter() - started}
        event = {
            "step": save.step,
            "path": str(meeting.directory),
            "bytes": manifest.size,
            "score": save.score,
            **seconds,
        }
        events = [("snapshot", event), *self._tidy(meeting.directory, manifest)]
        self._when_whole(meeting.directory)
        return events

    def _commit(self, save: _Save) -> Manifest:
        meeting = save.meeting
        manifest = combined(
            meeting.parts(),
            step=save.step,
            attempt=meeting.attempt,
            info=save.info,
            score=save.score,
        )
        write_whole(meeting.directory / NAME, manifest.to_bytes())
        sync(self._directory)
        return manifest

    def _tidy(self, directory: Path, manifest: Manifest) -> list[Event]:
        """Remove what the new manifest does not name, then older snapshots once the new one was seen whole."""
        named = {NAME, *(file.name for file in manifest.files)}
        try:
            for path in directory.iterdir():
                if path.name not in named:
                    path.unlink()
            inspect(directory)
            return [
                ("snapshot_removed", {"path": str(path)})
                for path in self._retention.apply(directory)
            ]
        except (OSError, SnapshotError) as error:
            return [("snapshot_not_removed", {"reason": str(error)})]

    def _failure(self, meeting: CommitProtocol, error: Exception) -> SnapshotError:
        """Say which snapshot could not be written, why, what to do, and which one there is."""
        if isinstance(error, ToldError):
            return error
        reason = (
            str(error)
            if isinstance(error, (OSError, SnapshotError))
            else f"{type(error).__name__}: {error}"
        )
        advice = _ADVICE.get(error.errno or 0) if isinstance(error, OSError) else None
        newest = next(
            (
                path.name
                for path in reversed(list_snapshots(self._directory))
                if not fault(path, inspect)
            ),
            None,
        )
        return SnapshotError(
            f"snapshot {meeting.directory} could not be written: worker {self._rank}: {reason}"
            + (f"; {advice}" if advice else "")
            + (
                f". The newest whole snapshot is {newest}: the run can resume from it"
                if newest
                else ". There is no whole snapshot yet"
            )
        )
