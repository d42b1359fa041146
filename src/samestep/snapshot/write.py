"""Write snapshots in the background; training only waits for a copy in host memory."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from samestep.errors import SamestepError, SnapshotError
from samestep.record.chain import EVENT, STATE
from samestep.snapshot.commit import CommitProtocol, PeerFailedError, Retention, combine
from samestep.snapshot.digest import run_state, state_digest
from samestep.snapshot.files import DataFile
from samestep.snapshot.manifest import Manifest
from samestep.snapshot.part import (
    Contribution,
    Part,
    StagingBuffer,
    contribution_of,
    gpu_of,
    write_part,
)
from samestep.snapshot.read import directory_name, fault, inspect, list_snapshots, step_of
from samestep.snapshot.state import States, copy_plain
from samestep.storage import make_folder

Event = tuple[str, dict[str, Any]]  # its kind and fields

GIVE_UP_SECONDS: Final = 2.0  # for the thread, to notice that it must end
COMMIT_SECONDS: Final = 1800.0  # at least, for the parts of all workers
DIGEST_SECONDS: Final = 600.0  # for that of the last snapshot, at the end of a run
_ATTEMPT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ADVICE: Final = {
    errno.ENOSPC: "free some space there, or lower keep_last and keep_best",
    errno.EDQUOT: "free some of the quota there, or lower keep_last and keep_best",
    errno.EACCES: "make the directory writable",
    errno.EPERM: "make the directory writable",
    errno.EROFS: "choose a directory that is writable",
    errno.ENOENT: "do not move or remove the run's directory while it is running",
}


class SnapshotWriter:
    """Writes one worker's part of the snapshots in a run's directory, which all workers share.

    `attempt` is equal on all workers and differs between any two starts of the run. All workers
    make the same calls of `save`. `report(kind, **fields)` runs in the thread that calls these
    methods, when a snapshot was committed, failed, or was removed because newer ones exist.
    `before_commit()` and `on_commit(path)` run on rank 0 in the writer's thread: the first makes
    durable what the run recorded before the snapshot, and the second must return immediately. The
    writer waits for other workers for at most `timeout_seconds`.
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
        verified: Sequence[Path] = (),
        report: Callable[..., object],
        before_commit: Callable[[], object] = lambda: None,
        on_commit: Callable[[Path], object] = lambda _: None,
        on_news: Callable[[], object] = lambda: None,
        timeout_seconds: float = COMMIT_SECONDS,
    ) -> None:
        if not _ATTEMPT.fullmatch(attempt):
            raise SnapshotError(
                f"attempt must have letters, digits, dots, dashes and underscores, got {attempt!r}"
            )
        self._directory, self._attempt, self._timeout_seconds = directory, attempt, timeout_seconds
        self._rank, self._workers = rank, workers
        self._report, self._before_commit, self._on_commit = report, before_commit, on_commit
        self._on_news = on_news  # called by a thread when `raise_if_failed` has something to do
        self._retention = Retention(directory, keep_last, keep_best, verified)
        self._staging = StagingBuffer()
        self._preparation: threading.Thread | None = None  # allocates the buffer
        self._saves = 0
        # this worker's data file of the last snapshot, for another save of its step
        self._committed: dict[Path, DataFile] = {}
        # the commit of the last save, on this worker
        self.pending: Future[list[Event]] | None = None
        self._thread: threading.Thread | None = None  # writes the last save, then tidies up
        self._tidied: deque[Event] = deque()  # what follows commits, for the caller's thread
        self._is_digested = threading.Event()  # the last committed snapshot, on rank 0
        self._is_digested.set()
        self._given_up = threading.Event()

    def prepare(self, shared: States, own_states: States) -> None:
        """Allocate memory in the background, so that the first `save` need not wait for it.

        Raises `SnapshotError` for an unsupported state.
        """
        contribution, values = contribution_of(shared, own_states, self._rank, self._workers)
        device = gpu_of(values)

        def reserve() -> None:
            with suppress(RuntimeError):  # the save reports that there is not enough memory
                self._staging.reserve(contribution.file_bytes, device)

        self._preparation = threading.Thread(target=reserve, name="prepare snapshots", daemon=True)
        self._preparation.start()

    def save(
        self,
        step: int,
        shared: States,
        own_states: States,
        info: States,
        score: float | None = None,
        stage: Callable[[Contribution, Sequence[torch.Tensor]], memoryview | None] | None = None,
    ) -> None:
        """Copy the state and start to write it, after the previous save finished.

        `shared` maps names to states that are equal on all workers: each worker writes its share of
        the tensors, and rank 0 writes the plain values. `own_states` maps names to states of which
        this worker has a part: slices (`TensorSlice`), or tensors and plain values under keys that
        only it has. Values that several workers have there must be equal. `info` has plain values.
        The snapshots with the highest `score` stay. `stage` may copy the data file into other
        memory, which must stay until the save is committed: see `pending`. Raises
        `SnapshotError` for an unsupported state, or if the previous save failed.
        """
        self.wait()  # blocks training only if the disk is slower than the interval between saves
        started = time.perf_counter()
        if self._preparation is not None:
            self._preparation.join()  # both would allocate the buffer
        # `values` are 1-D, mostly views of tensors that the next step changes
        contribution, values = contribution_of(shared, own_states, self._rank, self._workers)
        data = None if stage is None else stage(contribution, values)
        if data is None:
            data = self._staging.copy(contribution, values)
        stall_seconds = time.perf_counter() - started
        self._saves += 1  # saving a step again writes other files
        path = self._directory / directory_name(step)
        attempt = f"{self._attempt}.{self._saves}"
        protocol = CommitProtocol(
            path, attempt, self._rank, self._workers, self._timeout_seconds, self._given_up
        )
        score = None if score is None else float(score)
        info = copy_plain(dict(info), "info")  # the caller may change it meanwhile
        merge = partial(combine, step=step, attempt=attempt, info=info, score=score)
        event = {"step": step, "path": str(path), "score": score, "stall_seconds": stall_seconds}
        work = partial(self._write, protocol, contribution, data, merge, event)
        self.pending, before = Future(), self._thread
        if self._rank == 0:
            self._is_digested.clear()
        write = partial(self._run, work, self.pending, path, before)
        # daemon: a file system that hangs must not keep the process alive
        self._thread = threading.Thread(target=write, name=f"write {path.name}", daemon=True)
        self._thread.start()

    def wait(self, tidy_seconds: float = 0.0) -> None:
        """Wait until the last save is committed, then `tidy_seconds` for old ones to be removed.

        With `tidy_seconds`, wait for its digest as well. Raises `SnapshotError`, once, if the save
        failed.
        """
        if self.pending is not None:
            wait([self.pending])
        if tidy_seconds:
            self._is_digested.wait(DIGEST_SECONDS)
        if self._thread is not None:
            self._thread.join(tidy_seconds)  # 0.0: do not wait
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise `SnapshotError`, once, if the last save has already failed."""
        if self.pending is not None and self.pending.done():
            pending, self.pending = self.pending, None  # first, so that it is raised once
            self._report_outcome(pending)
        while self._tidied:
            kind, fields = self._tidied.popleft()
            self._report(kind, **fields)

    def _report_outcome(self, pending: Future[list[Event]]) -> None:
        if error := pending.exception():
            with suppress(SamestepError):  # a full disk may not store an event either
                self._report("snapshot_failed", reason=str(error))
            raise error
        for kind, fields in pending.result():
            self._report(kind, **fields)

    def close(self, grace_seconds: float = 5.0) -> None:
        """Wait `grace_seconds` for a pending save to be committed, then give it up.

        No save may follow. If the file system does not respond, the writer's thread ends with the
        process, which damages no snapshot.
        """
        if self._preparation is not None:
            self._preparation.join()
        if self._thread is not None:
            self._thread.join(grace_seconds)
            self._given_up.set()  # it reports a failure, so that other workers need not wait
            self._thread.join(GIVE_UP_SECONDS)
        with suppress(SnapshotError):  # it was reported
            self.raise_if_failed()

    def _write(
        self,
        protocol: CommitProtocol,
        contribution: Contribution,
        data: memoryview,
        merge: Callable[[Sequence[Part]], Manifest],
        event: dict[str, Any],
    ) -> list[Event]:
        """Write this worker's part and return the events to report after the commit."""
        started = time.perf_counter()
        directory = protocol.directory
        try:
            # an interruption is harmless: data comes first, then the part that vouches for it,
            # then the manifest that names all data
            make_folder(directory, parents=True)
            path = protocol.data_path(self._rank)
            earlier = self._committed.get(directory)
            part = write_part(path, contribution, data, protocol.raise_if_given_up, earlier)
            protocol.send_part(part)
            if self._rank == 0:
                manifest = merge(protocol.receive_parts())
                self._before_commit()
                protocol.commit(manifest)
        except Exception as error:
            failure = self._failure(directory, error)
            protocol.report_failure(failure)
            raise failure from error
        # an error is not reported to the others: the snapshot may be committed all the same
        if self._rank > 0:
            try:
                protocol.wait_for_commit()
            except Exception as error:
                raise self._failure(directory, error) from error
        self._committed = {directory: part.file}
        if self._rank > 0:
            return []
        event |= {"bytes": manifest.size, "seconds": time.perf_counter() - started}
        self._on_commit(directory)  # hooks have their own threads
        return [("snapshot", event)]

    def _run(
        self,
        write: Callable[[], list[Event]],
        pending: Future[list[Event]],
        directory: Path,
        before: threading.Thread | None,
    ) -> None:
        try:
            pending.set_result(write())
        except BaseException as error:  # noqa: BLE001  raised again by `raise_if_failed`
            pending.set_exception(error)
            self._on_news()
            self._is_digested.set()
            return  # old snapshots stay
        self._on_news()
        if before is not None:
            before.join()
        if self._rank == 0:
            self._tidied.extend(self._digest(directory))
            self._is_digested.set()
            self._tidied.extend(self._remove_old(directory))
            self._on_news()

    def _digest(self, directory: Path) -> list[Event]:
        """Return an event with the digest of a snapshot of a run that has a chain."""
        thread, started = threading.current_thread(), time.perf_counter()

        def is_given_up() -> bool:  # a newer one will have its own
            return self._given_up.is_set() or self._thread is not thread

        try:
            manifest = inspect(directory)
            head = run_state(manifest, STATE)
            digest = None if head is None else state_digest(directory, is_given_up)
        except (OSError, SnapshotError) as error:
            reason: dict[str, Any] = {"step": step_of(directory), "reason": str(error)}
            return [] if is_given_up() else [("state_failed", reason)]
        if digest is None:
            return []
        seconds = time.perf_counter() - started
        names = {"step": manifest.step, "chain": head, "digest": digest}
        return [(EVENT, {**names, "seconds": seconds})]

    def _remove_old(self, directory: Path) -> list[Event]:
        """Remove old snapshots if the new one is valid."""
        try:
            inspect(directory)  # a file system may lose what it accepted
            removed = self._retention.apply(directory)
        except (OSError, SnapshotError) as error:
            return [("snapshot_not_removed", {"reason": str(error)})]
        return [("snapshot_removed", {"path": str(path)}) for path in removed]

    def _failure(self, directory: Path, error: Exception) -> SnapshotError:
        """Describe which snapshot could not be written, why, and which one can be used instead."""
        if isinstance(error, PeerFailedError):
            return error
        reason = str(error)
        if not isinstance(error, (OSError, SnapshotError)):
            reason = f"{type(error).__name__}: {error}"
        elif isinstance(error, OSError) and (advice := _ADVICE.get(error.errno or 0)):
            reason += f"; {advice}"
        complete = (
            f"The newest complete snapshot is {path.name}: the run can resume from it"
            for path in reversed(list_snapshots(self._directory))
            if fault(path, inspect) is None
        )
        newest = next(complete, "There is no complete snapshot yet")
        return SnapshotError(
            f"snapshot {directory} could not be written: worker {self._rank}: {reason}. {newest}"
        )
