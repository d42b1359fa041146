"""A user's function that is called beside training for every file of a snapshot."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from samestep.errors import SnapshotError
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import inspect
from samestep.snapshot.remote.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
