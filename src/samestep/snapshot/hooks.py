"""The copies of a run's snapshots in a remote storage, made by a thread of one worker.

The function of the option `transfer` gets their files from the exporter, with the record.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from samestep.config import Config
from samestep.errors import SnapshotError
from samestep.snapshot.commit import choose, kept
from samestep.snapshot.manifest import NAME, Manifest
from samestep.snapshot.owner import RemoteOwner
from samestep.snapshot.read import check, inspect, list_snapshots, step_of
from samestep.snapshot.remote import RemoteDirectory, forget_superseded, set_superseded, superseded
from samestep.storage import StorageError

CLOSE_SECONDS: Final = 2.0


class Mirror:
    """Copies a run's snapshots to a remote storage, and removes old ones there.

    A thread makes a pass after commits; all requests during a pass cause one more. Every pass
    compares both sides, so it completes the work of an interrupted pass or process. `keep_last` and
    `keep_best` apply to the snapshots of both sides together. `set_aside` is (a step, a folder):
    remote snapshots of later steps belong to another history, and the first pass moves them to that
    folder. Snapshots of runs other than the `owner`'s stay where they are. `report(kind, **fields)`
    runs in the thread.
    """

    def __init__(
        self,
        remote: RemoteDirectory,
        directory: Path,
        *,
        keep_last: int,
        keep_best: int,
        report: Callable[..., object],
        set_aside: tuple[int, str] | None = None,
        owner: RemoteOwner | None = None,
    ) -> None:
        self._remote, self._directory, self._report = remote, directory, report
        self._owner = owner
        self._keep_last, self._keep_best, self._set_aside = keep_last, keep_best, set_aside
        self._failure: str | None = None
        self._changed = threading.Condition()  # guards the flags below
        self._busy = self._closed = False
        self._requested = True  # an earlier process may have left some to copy
        # It ends with the process: a storage that hangs must not keep a finished run alive.
        self._thread = threading.Thread(target=self._run, name="copy snapshots", daemon=True)
        self._thread.start()

    def on_commit(self, path: Path) -> None:
        """Request a pass that begins after this call, and return immediately."""
        with self._changed:
            self._requested = True  # also while a pass runs, which may have missed it
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the remote storage is complete. Raises `SnapshotError` if it is not."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._requested or self._busy))
        if self._failure is not None:
            raise SnapshotError(
                f"the last snapshot is complete in {self._directory}, but could not be copied to "
                f"{self._remote.url}: {self._failure}. Start the run again once the "
                "storage works; only missing files are sent, and no step is repeated"
            )

    def close(self) -> None:
        """Start no further pass. If the current one does not end soon, it ends with the process."""
        self._remote.storage.given_up.set()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._requested or self._closed)
                if self._closed:
                    return
                self._requested, self._busy = False, True
            try:
                # Without the lock: a pass takes long, and `on_commit` must not wait.
                self._make_pass()
            except BaseException:
                with self._changed:  # `finish` must not wait for a thread that has ended
                    self._requested = self._busy = False
                    self._closed = True
                    self._changed.notify_all()
                raise

    def _make_pass(self) -> None:
        try:
            self._copy()
        except Exception as error:  # noqa: BLE001  an error here does not stop training
            reason = str(error)
            if not isinstance(error, SnapshotError):
                reason = f"{type(error).__name__}: {error}"
            # reported once, until it works again
            if self._failure is None and not self._remote.storage.given_up.is_set():
                self._report("remote_failed", url=self._remote.url, reason=reason)
                logging.getLogger("samestep").warning("%s; retrying at the next snapshot", reason)
            self._failure = reason
        else:
            self._failure = None

    def _copy(self) -> None:
        # Both sides are listed again in every pass. Nothing is remembered, so it does not matter
        # where an earlier pass or process was interrupted.
        names = self._remote.names()
        if self._owner is not None:
            self._owner.hold()
        if self._set_aside is not None:
            # Before anything is compared: these would count as newer than what the run writes now.
            names = self._without_later(names, *self._set_aside)
            # if the move was interrupted, the next start repeats it
            forget_superseded(self._directory)
            self._set_aside = None
        manifests = {Path(name): self._inspect(name) for name in names}
        remote = {path: manifest for path, manifest in manifests.items() if manifest is not None}
        local = self._complete_local(remote)  # by name, as in the storage
        newest = max((manifest.step for manifest in local.values()), default=-1)
        # later remote steps belong to another history
        history = {
            path: manifest
            for path, manifest in {**remote, **local}.items()
            if manifest.step <= newest
        }
        # The best ones may be remote only, since the directory keeps its own selection.
        staying, is_old = choose(history, self._keep_last, self._keep_best)
        newest_first = sorted(local, key=lambda path: local[path].step, reverse=True)
        marked = kept({self._directory / path: local[path] for path in newest_first})
        staying |= {Path(path.name) for path in marked}
        # The newest first: it is the one that a run on another host would resume from.
        for path in sorted(staying & local.keys(), key=lambda path: local[path].step, reverse=True):
            if not _is_same(local[path], remote.get(path)):
                self._send(self._directory / path)
        # Removals come last, when the snapshots that stay are complete. One without a manifest was
        # left by an upload that did not end.
        for path in map(Path, names):
            step = step_of(path) or 0
            if path not in staying and (
                is_old(path) or (step < newest and not self._remote.has_manifest(path.name))
            ):
                self._remote.remove(path.name)
                self._report("snapshot_removed", path=f"{self._remote.url}/{path}")

    def _complete_local(self, remote: Mapping[Path, Manifest]) -> dict[Path, Manifest]:
        """Return the directory's complete snapshots, after reading every byte that will be sent."""
        manifests = {}
        for path in list_snapshots(self._directory):
            with suppress(SnapshotError):
                name, manifest = Path(path.name), inspect(path)
                if self._owner is not None and not self._owner.owns(manifest.info, manifest.step):
                    continue
                manifests[name] = manifest if _is_same(manifest, remote.get(name)) else check(path)
        return manifests

    def _without_later(self, names: list[str], start: int, folder: str) -> list[str]:
        later = [name for name in names if (step_of(Path(name)) or 0) > start]
        for name in later:
            self._remote.set_aside(name, folder)  # copied completely, then removed
        if later:
            url = f"{self._remote.url}/{folder}"
            self._report("snapshots_set_aside", path=url, snapshots=later)
        return [name for name in names if name not in later]

    def _inspect(self, name: str) -> Manifest | None:
        try:
            return self._remote.inspect(name)
        except StorageError:
            raise
        except SnapshotError:
            return None

    def _send(self, path: Path) -> None:
        started = time.perf_counter()
        try:
            sent = self._remote.send(path)
        except (OSError, SnapshotError):
            if (path / NAME).exists():
                raise
            return  # removed, because newer ones exist
        seconds, url = time.perf_counter() - started, f"{self._remote.url}/{path.name}"
        self._report("snapshot_copied", step=step_of(path), url=url, bytes=sent, seconds=seconds)


def _is_same(manifest: Manifest, other: Manifest | None) -> bool:
    return other is not None and manifest.attempt == other.attempt


def open_mirror(
    config: Config,
    *,
    attempt: str,
    start: int,
    owner: RemoteOwner | None,
    report: Callable[..., object],
) -> Mirror | None:
    """Return the mirror of the option `remote`, None without it.

    `start` is the step that the run continues from, or -1, and `owner` its entry at the remote.
    Raises `ConfigError` if an option is wrong.
    """
    if config.dir is None or config.remote is None:
        return None
    remote = RemoteDirectory(config.remote)
    remote.storage.open()
    set_aside = superseded(config.dir, remote.url)  # left by an earlier start
    if config.resume != "auto":
        # A move that was interrupted goes on, from the earlier of the two steps.
        start = min(start, set_aside[0]) if set_aside else start
        set_aside = start, f"superseded-{attempt}"
        # before the first pass, so that a kill does not lose it
        set_superseded(config.dir, remote.url, *set_aside)
    limits = {"keep_last": config.keep_last, "keep_best": config.keep_best}
    return Mirror(remote, config.dir, **limits, report=report, set_aside=set_aside, owner=owner)
