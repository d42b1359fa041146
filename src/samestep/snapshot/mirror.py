"""A thread for what is done beside training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from samestep.errors import SnapshotError
from samestep.snapshot.manifest import NAME, Manifest
from samestep.snapshot.read import check, inspect, list_snapshots, step_of
from samestep.snapshot.remote import Remote
from samestep.snapshot.retention import choose
from samestep.storage import StorageError


class Background:
    """Makes a pass whenever it is asked to; what is asked for during a pass is one more. A pass handles its own errors."""

    def __init__(self, name: str, make_pass: Callable[[], None]) -> None:
        self._make_pass = make_pass
        self._changed = threading.Condition()
        self._asked = self._busy = self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have a pass made that begins after this call."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when every pass that was asked for is over."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._asked or self._busy))

    def close(self, grace_seconds: float) -> None:
        """Make no further pass, and wait for the one that runs for `grace_seconds`; what hangs even then ends with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(grace_seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._asked or self._closed)
                if self._closed:
                    return
                self._asked, self._busy = False, True
            self._make_pass()


CLOSING_SECONDS = 2.0


class Mirror:
    """Makes a remote storage hold the snapshots of a run's directory that are to stay, by `keep_last` and `keep_best` over both.

    It looks at what is there before every pass, so what a failure or the end of the process left
    undone is done by the next. `set_aside` is (a step, a folder): remote snapshots of later steps
    are another history's and moved to that folder first. `report(kind, **fields)` is called from
    another thread.
    """

    def __init__(
        self,
        remote: Remote,
        directory: Path,
        *,
        keep_last: int,
        keep_best: int,
        report: Callable[..., object],
        set_aside: tuple[int, str] | None = None,
    ) -> None:
        self._remote, self._directory = remote, directory
        self._keep_last, self._keep_best = keep_last, keep_best
        self._report = report
        self._set_aside = set_aside
        self._failure: str | None = None
        self._background = Background("copy snapshots", self._make_pass)
        self._background.ask()

    def snapshot_is_whole(self, _: Path) -> None:
        """Have it copied, unless newer ones come first."""
        self._background.ask()

    def finish(self) -> None:
        """Return when the remote holds all that it should. Raises `SnapshotError` if it does not."""
        self._background.wait()
        if self._failure is not None:
            raise SnapshotError(
                f"the last snapshot is whole in {self._directory}, and could not be copied to {self._remote.url}: {self._failure}. "
                "Start the run again once that works: nothing is trained twice, and only what is missing is sent"
            )

    def close(self) -> None:
        """Copy no more."""
        self._remote.storage.given_up.set()
        self._background.close(CLOSING_SECONDS)

    def _make_pass(self) -> None:
        try:
            self._copy()
        except Exception as error:  # noqa: BLE001  nothing that goes wrong here stops training
            reason = (
                str(error)
                if isinstance(error, SnapshotError)
                else f"{type(error).__name__}: {error}"
            )
            # it is told once, until it works again
            if self._failure is None and not self._remote.storage.given_up.is_set():
                self._report("remote_failed", url=self._remote.url, reason=reason)
                logging.getLogger("samestep").warning(
                    "%s; it is tried again at the next snapshot", reason
                )
            self._failure = reason
        else:
            self._failure = None

    def _copy(self) -> None:
        names = self._remote.names()
        if self._set_aside is not None:
            names = self._without_later(names, *self._set_aside)
            self._set_aside = None
        there = {
            Path(name): manifest for name in names if (manifest := self._inspect(name)) is not None
        }
        here = self._whole_here(there)
        newest = max((manifest.step for manifest in here.values()), default=-1)
        # later: another history's
        known = {
            path: manifest
            for path, manifest in {**there, **here}.items()
            if manifest.step <= newest
        }
        staying, horizon = choose(
            {path: known[path].score for path in known}, self._keep_last, self._keep_best
        )
        for path in sorted(staying & here.keys(), key=lambda path: here[path].step, reverse=True):
            if not _is_same(here[path], there.get(path)):
                self._send(self._directory / path)
        for path in map(Path, names):
            step = step_of(path) or 0
            if path not in staying and (
                step < horizon or (step < newest and not self._remote.has_manifest(path.name))
            ):
                self._remote.remove(path.name)
                self._report("snapshot_removed", path=f"{self._remote.url}/{path}")

    def _whole_here(self, there: Mapping[Path, Manifest]) -> dict[Path, Manifest]:
        """Return the whole snapshots of the directory by name; those that are still to be sent are read for that, every byte."""
        found = {}
        for path in list_snapshots(self._directory):
            with suppress(SnapshotError):
                name, manifest = Path(path.name), inspect(path)
                found[name] = manifest if _is_same(manifest, there.get(name)) else check(path)
        return found

    def _without_later(self, names: list[str], start: int, folder: str) -> list[str]:
        later = [name for name in names if (step_of(Path(name)) or 0) > start]
        for name in later:
            self._remote.set_aside(name, folder)
        if later:
            self._report(
                "snapshots_set_aside", path=f"{self._remote.url}/{folder}", snapshots=later
            )
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
            return  # newer ones took its place meanwhile
        fields = {
            "url": f"{self._remote.url}/{path.name}",
            "bytes": sent,
            "seconds": time.perf_counter() - started,
        }
        self._report("snapshot_copied", step=step_of(path), **fields)


def _is_same(one: Manifest, other: Manifest | None) -> bool:
    return other is not None and one.attempt == other.attempt
