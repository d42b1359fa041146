"""What is done with snapshots once they are whole, beside training: copies in remote storage, a user's function."""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from samestep.record.sinks.function import find_function
from samestep.snapshot.remote.copies import Remote
from samestep.snapshot.remote.mirror import Mirror
from samestep.snapshot.remote.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from samestep.config import Config


class Taker(Protocol):
    """Does something with snapshots in a thread of its own."""

    def snapshot_is_whole(self, path: Path) -> None:
        """Take note of it, in no time."""

    def finish(self) -> None:
        """Return when all is done. Raises `SnapshotError`."""

    def close(self) -> None:
        """Stop soon."""


class Afterwards:
    """Passes whole snapshots on to those who take them, and what these have to tell to the record; often there are none."""

    def __init__(
        self,
        takers: Sequence[Taker] = (),
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


def open_afterwards(config: Config, *, acts: bool, attempt: str, start: int) -> Afterwards:
    """Begin what the options `remote` and `transfer` ask for; one worker `acts`. `start` is the step that the run continues from, or -1.

    Raises `ConfigError` for what could never work.
    """
    told: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()

    def report(kind: str, **fields: Any) -> None:
        told.put((kind, fields))

    if not acts or config.dir is None:
        return Afterwards()
    function = None if config.transfer is None else find_function(config.transfer)
    remote = None if config.remote is None else Remote(config.remote)
    if remote is not None:
        remote.storage.open()
    takers: list[Taker] = []
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
    return Afterwards(takers, told)
