"""Choose and load the snapshot that a run resumes from, and download it if it is remote."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from samestep.comm.base import World
from samestep.comm.together import call_once, run_together
from samestep.config import Config, is_url
from samestep.errors import ConfigError, SamestepError, SnapshotError
from samestep.snapshot.commit import rank_scores
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.manifest import NAME
from samestep.snapshot.owner import Owner, RemoteOwner, begin, names_remote
from samestep.snapshot.read import Snapshot, inspect, list_snapshots, load_together, step_of
from samestep.snapshot.remote import RemoteDirectory, superseded
from samestep.storage import StorageError


@dataclass(frozen=True)
class _Result:
    """The result of a worker's job: names, or a fault; `unanswered` if the storage failed."""

    names: list[str]
    fault: str = ""
    unanswered: bool = False


class Downloads:
    """The snapshots below a URL, for download into a run's directory.

    Every call is collective and has the same result on all workers. Raises `ConfigError` on rank 0
    if the URL cannot be used.
    """

    def __init__(
        self, url: str, directory: Path, world: World, *, listing_seconds: float = math.inf
    ) -> None:
        """`listing_seconds` limits the time in which a failed listing is repeated."""
        self._remote, self._directory, self._world = RemoteDirectory(url), directory, world
        self._unanswered, self._listing_seconds = "", listing_seconds
        self.url = self._remote.url
        if world.rank == 0:
            self._remote.storage.open()  # a wrong URL ends the run, a failing storage does not

    def names(self, report: Callable[..., object]) -> list[str]:
        """Return the names of snapshots that rank 0 finds, in the order of steps.

        Those of another history that are not set aside yet are left out.
        If the storage fails, calls `report("remote_failed", url=..., reason=...)` and returns none.
        """
        # one listing, the same for all workers
        job = self._current_names if self._world.rank == 0 else None
        listing = self._run_together(job, "looking for remote snapshots")[0]
        if listing.unanswered:
            report("remote_failed", url=self.url, reason=listing.fault)
        return listing.names

    def _current_names(self) -> list[str]:
        storage = self._remote.storage
        storage.retry_for(self._listing_seconds)
        try:
            names, pending = self._remote.names(), superseded(self._directory, self.url)
        finally:
            storage.retry_for(math.inf)
        if pending is None:
            return names
        return [name for name in names if (step_of(Path(name)) or 0) <= pending[0]]

    def load(self, name: str) -> Snapshot:
        """Download a snapshot and load it. Raises `SnapshotError`.

        Rank 0 downloads first. On hosts that do not see its copy in the directory, one worker then
        downloads another.
        """

        def fetch() -> list[str]:
            return [str(self._remote.fetch(name, self._directory))]

        # Two collective rounds. In the second, rank 0 and workers that see its copy have no job but
        # still answer.
        for is_first in (True, False):
            if self._world.rank == 0:
                fetches = is_first
            else:
                fetches = not is_first and not (self._directory / name / NAME).exists()
            results = self._run_together(fetch if fetches else None, "downloading a snapshot")
            if faults := [result.fault for result in results if result.fault]:
                raise SnapshotError(faults[0])
        return load_together(self._directory / name, self._world)

    def scores(self, names: list[str]) -> dict[str, float | None]:
        """Return the scores of those snapshots that are complete, as rank 0 reads them."""

        def read() -> list[str]:
            scores = {}
            for name in names:
                try:
                    scores[name] = self._remote.inspect(name).score
                except StorageError:  # it says nothing about the snapshot
                    raise
                except SnapshotError:
                    continue
            return [json.dumps(scores)]

        job = read if self._world.rank == 0 else None
        result = self._run_together(job, "comparing remote snapshots")[0]
        if result.fault:
            raise SnapshotError(result.fault)
        scores: dict[str, float | None] = json.loads(result.names[0])
        return scores

    def raise_if_unanswered(self) -> None:
        """Raise `SnapshotError` if the storage failed to list or send a snapshot."""
        if self._unanswered:
            raise SnapshotError(
                f"{self._unanswered}. The storage may hold the snapshot to resume from, and "
                f"{self._directory} has none: start the run again once the storage works, or with "
                "resume='never'"
            )

    def _run_together(self, job: Callable[[], list[str]] | None, what: str) -> list[_Result]:
        """Run the workers' jobs and return the results by rank."""
        gathered = run_together(self._world, lambda: asdict(_run(job)), what)
        results = [_Result(**fields) for fields in gathered]
        unanswered = (result.fault for result in results if result.unanswered)
        self._unanswered = next(unanswered, self._unanswered)
        return results


def _run(job: Callable[[], list[str]] | None) -> _Result:
    try:
        return _Result([] if job is None else job())
    except SamestepError as error:
        return _Result([], str(error), unanswered=isinstance(error, (StorageError, ConfigError)))
    # the other workers wait for a result regardless
    except Exception as error:  # noqa: BLE001
        return _Result([], f"{type(error).__name__}: {error}", unanswered=True)


def load_from(url: str, directory: Path, world: World) -> Snapshot:
    """Download one snapshot by its URL into a run's directory and load it; collective.

    Raises `ConfigError` for the URL of anything else, and `SnapshotError`.
    """
    folder, _, name = url.rstrip("/").rpartition("/")
    if step_of(directory / name) is None:
        raise ConfigError(
            f"resume must be the URL of a snapshot, such as {url.rstrip('/')}/step-00001200, "
            f"got {url!r}"
        )
    return Downloads(folder, directory, world).load(name)


def find_owner(
    config: Config, world: World, describe_run: Callable[[], Mapping[str, str]], *, has_begun: bool
) -> tuple[Owner | None, RemoteOwner | None]:
    """Return the run in a directory, and on rank 0 its entry at the remote; collective.

    `describe_run` describes rank 0's program and options. Raises the errors of `begin` on rank 0,
    and `WorldError` on others.
    """
    directory = config.dir
    if directory is None:
        return None, None
    results: list[tuple[Owner, RemoteOwner | None]] = []

    def begin_run() -> dict[str, Any]:
        described = json.dumps(describe_run(), sort_keys=True)
        digest = hashlib.sha256(described.encode()).hexdigest()[:16]
        results.append(begin(directory, config, digest, has_begun=has_begun))
        return asdict(results[0][0])

    # the remote may not respond for a while
    owner = Owner.from_json(call_once(world, begin_run, "looking for the run"))
    return owner, results[0][1] if results else None


def load_best(
    directory: Path, url: str | None, world: World, report: Callable[..., object]
) -> Snapshot:
    """Load the snapshot with the highest score in a run's directory or remote storage; collective.

    Of equal scores, the earliest is the best. Raises `SnapshotError` if none has a score, or if the
    best one cannot be loaded.
    """
    downloads, remote = None, dict[str, float | None]()
    if url is not None:
        downloads = Downloads(url, directory, world)
        remote = downloads.scores(downloads.names(report))
        downloads.raise_if_unanswered()
    scores: dict[Path, float | None] = {Path(name): score for name, score in remote.items()}
    for path in list_snapshots(directory) if world.rank == 0 else ():
        with suppress(SnapshotError):
            scores[Path(path.name)] = inspect(path).score
    # rank 0's view: another host's listing may be older
    best: str | None = next(map(str, rank_scores(scores)), None)
    best = world.broadcast_json(best, "choosing the best snapshot")
    if best is None:
        raise SnapshotError(
            f"no snapshot in {directory} has a score; call run.snapshot(score=...) in the training"
        )
    is_local = world.broadcast_json(
        (directory / best / NAME).exists(), "choosing the best snapshot"
    )
    if is_local or downloads is None:
        return load_together(directory / best, world)
    return downloads.load(best)


@dataclass(frozen=True)
class _Candidate:
    """A snapshot to resume from; `reject(reason=...)` reports a fault in it."""

    step: int
    load: Callable[[], Snapshot]
    reject: Callable[..., object]
    was_committed: bool = False  # in the directory: a run must not start over beside it


def load_newest(
    directory: Path | None,
    world: World,
    report: Callable[..., object],
    in_memory: InMemorySnapshots | None = None,
    downloads: Downloads | None = None,
    owner: Owner | None = None,
) -> Snapshot | None:
    """Load the newest snapshot that is complete for every worker, None if there is none.

    Collective. The snapshot is in a run's directory, in memory or remote. The workers of a host
    check and load it together. Calls `report("snapshot_rejected", path=..., reason=...)` or
    `report("in_memory_snapshot_rejected", reason=...)` for each newer one with a fault. Raises
    `SnapshotError` if none can be loaded, but the directory, or a remote storage that failed, has
    one, and `ConfigError` if it is not of the run `owner`.
    """
    reason = ""  # why the newest one that was committed cannot be loaded
    for candidate in _candidates(directory, world, report, in_memory, downloads):
        snapshot, fault = None, ""
        try:
            snapshot = candidate.load()
        except (OSError, SnapshotError) as error:  # the other workers wait for this one's answer
            fault = str(error)
        # Collective: either all workers use a candidate, or all try the next older one.
        faults = list(filter(None, world.all_gather_json(fault, "loading a snapshot")))
        if not faults:
            if owner is not None and snapshot is not None:
                owner.check(snapshot)
            return snapshot
        candidate.reject(reason=faults[0])
        # A run must not silently start over beside snapshots that it cannot read now.
        if candidate.was_committed:
            reason = reason or faults[0]
    if downloads is not None:
        downloads.raise_if_unanswered()  # no snapshot was seen, but there may be one
    if reason:
        raise SnapshotError(
            f"no snapshot in {directory} can be loaded, not even the newest one: {reason}. Fix the"
            " cause, or start a new run with resume='never', which moves them aside"
        )
    return None


def _candidates(
    directory: Path | None,
    world: World,
    report: Callable[..., object],
    in_memory: InMemorySnapshots | None,
    downloads: Downloads | None,
) -> list[_Candidate]:
    """Return the snapshots that may be loaded, the newest first; collective."""
    candidates: list[_Candidate] = []
    if in_memory is not None:
        reject = partial(report, "in_memory_snapshot_rejected")
        keys = reversed(in_memory.find(report))  # of those of a step, the newest first
        candidates = [_Candidate(key.step, partial(in_memory.load, key), reject) for key in keys]
    committed: dict[str, bool] = {}
    if directory is not None:
        committed = {str(path): (path / NAME).exists() for path in list_snapshots(directory)}
        # Rank 0's view: another host's listing may be older, and all must try the same ones.
        committed = world.broadcast_json(committed, "choosing a snapshot")
    loads: dict[str, Callable[[], Snapshot]] = {
        path: partial(load_together, Path(path), world) for path in committed
    }
    if downloads is not None:
        for name in downloads.names(report):  # collective
            loads[f"{downloads.url}/{name}"] = partial(downloads.load, name)
    for location, load_it in loads.items():
        reject, step = partial(report, "snapshot_rejected", path=location), step_of(Path(location))
        candidates.append(_Candidate(step or 0, load_it, reject, committed.get(location, False)))
    # of candidates of the same step, the one that loads fastest stays first
    return sorted(candidates, key=attrgetter("step"), reverse=True)


def last_own_step(config: Config, resumed: Snapshot | None, owner: Owner | None = None) -> int:
    """Return up to which step snapshots in `dir` belong to the history that the run continues.

    It is -1 if none do: the run `owner` is new, or continues a snapshot of another run, one in
    another directory, or one that was downloaded from a URL other than `remote`. A snapshot of
    another run that nobody names is that with which the run in `dir` has begun.
    """
    is_named = config.resume != "auto"
    is_foreign = owner is not None and resumed is not None and owner.is_of_another_run(resumed)
    if resumed is None or config.dir is None or (is_foreign and is_named):
        return -1
    if resumed.in_memory:
        return resumed.step
    name = config.resume.rstrip("/").rpartition("/")[2]
    # Downloaded from elsewhere, a snapshot starts a new history in `dir`.
    is_elsewhere = is_url(config.resume) and not names_remote(config)
    is_in_dir = resumed.path.resolve().parent == config.dir.resolve()
    return resumed.step if is_in_dir and not (is_elsewhere and resumed.path.name == name) else -1
