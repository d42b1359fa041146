"""A user's function that is called beside training for every file of a snapshot."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from samestep.config import Config
from samestep.errors import SnapshotError
from samestep.record.sinks.base import find_function
from samestep.snapshot.manifest import NAME
from samestep.snapshot.mirror import Background, Mirror
from samestep.snapshot.read import inspect
from samestep.snapshot.remote import Remote

CLOSING_SECONDS = 2.0


class Transfer:
    """Calls a function with the path of every file of each whole snapshot, the manifest last; one after the other.

    What it raises is told, and the rest of that snapshot left out. `report(kind, **fields)` is
    called from another thread.
    """

    def __init__(self, function: Callable[[Path], object], report: Callable[..., object]) -> None:
        self._function = function
        self._report = report
        self._waiting: deque[Path] = deque()
        self._background = Background("transfer snapshots", self._make_pass)

    def snapshot_is_whole(self, path: Path) -> None:
        """Have its files transferred."""
        self._waiting.append(path)
        self._background.ask()

    def finish(self) -> None:
        """Return when all calls are over."""
        self._background.wait()

    def close(self) -> None:
        """Begin no further call."""
        self._waiting.clear()
        self._background.close(CLOSING_SECONDS)

    def _make_pass(self) -> None:
        while self._waiting:
            self._transfer(self._waiting.popleft())

    def _transfer(self, snapshot: Path) -> None:
        try:
            names = [*(file.name for file in inspect(snapshot).files), NAME]
        except SnapshotError:
            return  # newer ones took its place meanwhile
        path = snapshot
        try:
            for path in (snapshot / name for name in names):
                self._function(path)
        except BaseException as error:  # noqa: BLE001  not even sys.exit() there stops training
            reason = f"{type(error).__name__}: {error}"
            self._report("transfer_failed", path=str(path), reason=reason)
            logging.getLogger("samestep").warning(
                "the function for saved files failed with %s: %s", path, reason
            )


class Hook(Protocol):
    """Does something with snapshots in a thread of its own."""

    def snapshot_is_whole(self, path: Path) -> None:
        """Take note of it, in no time."""

    def finish(self) -> None:
        """Return when all is done. Raises `SnapshotError`."""

    def close(self) -> None:
        """Stop soon."""


class PostCommitHooks:
    """Passes whole snapshots on to those who take them, and what these have to tell to the record; often there are none."""

    def __init__(
        self,
        takers: Sequence[Hook] = (),
        told: SimpleQueue[tuple[str, dict[str, Any]]] | None = None,
    ) -> None:
        self._takers = takers
        self._told = told or SimpleQueue()

    def snapshot_is_whole(self, path: Path) -> None:
        """Pass a snapshot on."""
        for taker in self._takers:
            taker.snapshot_is_whole(path)

    def tell(self, report: Callable[..., object]) -> None:
        """Report what happened since the last call, in the thread of this one."""
        while True:
            try:
                kind, fields = self._told.get_nowait()
            except Empty:
                return
            report(kind, **fields)

    def finish(self) -> None:
        """Return when all is done. Raises `SnapshotError` of what could not be."""
        for taker in self._takers:
            taker.finish()

    def close(self) -> None:
        """Stop soon."""
        for taker in self._takers:
            taker.close()


def open_hooks(config: Config, *, acts: bool, attempt: str, start: int) -> PostCommitHooks:
    """Begin what the options `remote` and `transfer` ask for; one worker `acts`. `start` is the step that the run continues from, or -1.

    Raises `ConfigError` for what could never work.
    """
    told: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()

    def report(kind: str, **fields: Any) -> None:
        told.put((kind, fields))

    if not acts or config.dir is None:
        return PostCommitHooks()
    function = None if config.transfer is None else find_function(config.transfer)
    remote = None if config.remote is None else Remote(config.remote)
    if remote is not None:
        remote.storage.open()
    takers: list[Hook] = []
    if function is not None:
        takers.append(Transfer(function, report))
    if remote is not None:
        aside = None if config.resume == "auto" else (start, f"superseded-{attempt}")
        mirror = Mirror(
            remote,
            config.dir,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            report=report,
            set_aside=aside,
        )
        takers.append(mirror)
    return PostCommitHooks(takers, told)
