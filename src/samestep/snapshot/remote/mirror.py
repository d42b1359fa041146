"""A remote copy of a run's snapshots, kept beside training."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.errors import SnapshotError
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import check, inspect, list_snapshots, step_of
from samestep.snapshot.remote.background import Background
from samestep.snapshot.retention import choose
from samestep.storage import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from samestep.snapshot.manifest import Manifest
    from samestep.snapshot.remote.copies import Remote

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
