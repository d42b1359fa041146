"""How all workers of a run come by a snapshot from remote storage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from samestep.comm.base import World
from samestep.errors import ConfigError, SamestepError, SnapshotError
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import Snapshot, load, step_of
from samestep.snapshot.remote import Remote
from samestep.storage import StorageError

PULSE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class _Answer:
    """What came of a worker's job: names, or a fault, be it that the storage left it `unanswered`."""

    names: list[str]
    fault: str = ""
    unanswered: bool = False


class Downloads:
    """The snapshots below a URL, which are downloaded into a run's directory. Every call is collective, with one result for all.

    Raises `ConfigError` on rank 0 where the URL could never be used.
    """

    def __init__(self, url: str, directory: Path, world: World) -> None:
        self._remote, self._directory, self._world = Remote(url), directory, world
        self._unanswered = ""
        self.url = self._remote.url
        if world.rank == 0:
            self._remote.storage.open()

    def names(self, report: Callable[..., object]) -> list[str]:
        """Return the names of the snapshots in order of steps, as rank 0 finds them; none where the storage does not answer.

        That is told by `report("remote_failed", url=..., reason=...)`.
        """
        found = self._together(
            self._remote.names if self._world.rank == 0 else None, "looking for remote snapshots"
        )[0]
        if found.unanswered:
            report("remote_failed", url=self.url, reason=found.fault)
        return found.names

    def load(self, name: str) -> Snapshot:
        """Download a snapshot and load it. Raises `SnapshotError`.

        Rank 0 downloads first, then whoever does not see in the directory what rank 0 brought
        there: one worker of each such host.
        """

        def fetch() -> list[str]:
            return [str(self._remote.fetch(name, self._directory))]

        for comes_first in (True, False):
            is_asked = (
                comes_first
                if self._world.rank == 0
                else not (comes_first or (self._directory / name / NAME).exists())
            )
            for answer in self._together(fetch if is_asked else None, "downloading a snapshot"):
                if answer.fault:
                    raise SnapshotError(answer.fault)
        return load(self._directory / name)

    def _together(self, job: Callable[[], list[str]] | None, what: str) -> list[_Answer]:
        """Return by rank what came of the workers' jobs; all meet every second meanwhile, so nobody waits for another for long."""
        answer: Future[_Answer] = Future()
        threading.Thread(
            target=lambda: answer.set_result(_answer(job)), name=what, daemon=True
        ).start()
        told: list[Any] = [None]
        while None in told:
            wait([answer], PULSE_SECONDS)
            told = self._world.all_gather_json(
                asdict(answer.result()) if answer.done() else None, what
            )
        answers = [_Answer(**fields) for fields in told]
        self._unanswered = next(
            (answer.fault for answer in answers if answer.unanswered), self._unanswered
        )
        return answers

    def raise_if_unanswered(self) -> None:
        """Raise `SnapshotError` if the storage did not tell, or give, all that it holds."""
        if self._unanswered:
            raise SnapshotError(
                f"{self._unanswered}. What the run would resume from may be there, and there is none in {self._directory}: "
                "start it again once that works, or with resume='never'"
            )


def load_from(url: str, directory: Path, world: World) -> Snapshot:
    """Download one snapshot by its URL into a run's directory and load it; collective. Raises `ConfigError`, or `SnapshotError`."""
    folder, _, name = url.rstrip("/").rpartition("/")
    if step_of(directory / name) is None:
        raise ConfigError(
            f"resume={url!r} was given; expected the URL of a snapshot, such as {url.rstrip('/')}/step-00001200"
        )
    return Downloads(folder, directory, world).load(name)


def _answer(job: Callable[[], list[str]] | None) -> _Answer:
    try:
        return _Answer([] if job is None else job())
    except SamestepError as error:
        return _Answer([], str(error), unanswered=isinstance(error, (StorageError, ConfigError)))
    # whatever it is, the others must not wait for the answer
    except Exception as error:  # noqa: BLE001
        return _Answer([], f"{type(error).__name__}: {error}", unanswered=True)
