"""Where a start of a run begins: its directory, and the snapshot that it resumes from."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from samestep.comm.base import World
from samestep.comm.together import call_once
from samestep.config import Config, is_url
from samestep.data.exclude import NAME, Exclusion, merged, read_loops, write_loops
from samestep.errors import ConfigError, SnapshotError
from samestep.masking import mask_urls
from samestep.record import Record
from samestep.record.files import is_locked_by, locked_by
from samestep.run.process import announce
from samestep.snapshot.in_memory import InMemorySnapshots
from samestep.snapshot.owner import START_SECONDS, store
from samestep.snapshot.read import Snapshot, list_snapshots, load_together, step_of
from samestep.snapshot.resume import (
    Downloads,
    find_owner,
    last_own_step,
    load_best,
    load_from,
    load_newest,
)


class SharedDirectory:
    """Checks that all workers have the same directory, and that all hosts share it."""

    def __init__(self, config: Config, world: World) -> None:
        """Raise `ConfigError` if workers have different directories, or hosts do not share them."""
        self._config, self._world = config, world
        directory = config.dir
        # What rank 0 wrote into the lock is a text that no other directory contains.
        lock = locked_by(directory) if directory is not None and world.rank == 0 else ""
        rows = world.all_gather_json([str(directory), lock], "starting")
        first, self._lock = rows[0]  # until all hosts have seen what rank 0 wrote
        for rank, (path, _) in enumerate(rows):
            if path != first:
                raise ConfigError(
                    f"dir must be the same on all workers, got {first} on worker 0 and {path} on"
                    f" worker {rank}; leave times and process ids out of its name"
                )
        if config.snapshot_every is not None:  # otherwise `run.track` checks it
            self.check()

    def check(self) -> None:
        """Raise `ConfigError` if hosts do not share the directory; collective, checked once."""
        directory, lock = self._config.dir, self._lock
        if directory is None or lock is None:
            return
        # worker 0 had written by then: NFS remembers for a while that a file was not there
        row = [socket.gethostname(), is_locked_by(directory, lock, self._config.timeout)]
        for rank, (host, sees) in enumerate(self._world.all_gather_json(row, "starting")):
            if not sees:
                raise ConfigError(
                    f"dir must be shared by all hosts, but worker {rank} on {host} does not see"
                    f" what worker 0 wrote to {directory}; use a directory on a file system such as"
                    " NFS, or, to record the run without snapshots, set snapshot_every=None and"
                    " track nothing"
                )
        self._lock = None  # all hosts have seen it


class Start:
    """Where this start of a run begins: at a snapshot, or anew.

    All workers create it, and call `find_snapshot` and `load_best`, together. `owner` is the run in
    `dir`.
    """

    def __init__(
        self,
        source: Config,
        world: World,
        record: Record,
        describe_run: Callable[[], Mapping[str, str]],
        call_at_close: Callable[[Callable[[], object]], object],
        *,
        has_begun: bool,
    ) -> None:
        """`source` has the places of snapshots, which a run that only reads never writes to.

        `describe_run` returns what a snapshot must agree with. A run that `has_begun` goes on after
        its workers were killed.
        """
        self._source, self._world, self._record, self._has_begun = source, world, record, has_begun
        self._config = config = source.without_writing() if source.read_only else source
        self._has_resumed = False
        self.owner, self.remote_owner = find_owner(config, world, describe_run, has_begun=has_begun)
        if self.remote_owner is not None:
            call_at_close(self.remote_owner.close)

    def find_snapshot(self, in_memory: InMemorySnapshots) -> Snapshot | None:
        """Load the snapshot that the run resumes from, the same one on all workers.

        A run that had begun before its workers were killed continues from its newest snapshot, in
        memory or on disk, whatever `resume` says.
        """
        config = self._config
        if config.read_only:
            resumed = self._find_of_others(in_memory)
        else:
            # a remote that has just failed is asked once more, without retries
            responds = self.remote_owner is None or self.remote_owner.responds
            resumed = self._find(config, in_memory, START_SECONDS if responds else 0.0)
        self._has_resumed = resumed is not None
        if resumed is None:
            return None
        self._note_origin(resumed)
        named = step_of(Path(config.resume)) if config.resume != "auto" else None
        if resumed.step == named or (config.resume != "auto" and not self._has_begun):
            # Whoever names a snapshot wants to train on, even if the run had finished.
            resumed.state["run"].update(finished=False, ended=False)
        return resumed

    def _find(
        self, config: Config, in_memory: InMemorySnapshots, listing_seconds: float = START_SECONDS
    ) -> Snapshot | None:
        """Load the snapshot; a failed listing of the remote is repeated for `listing_seconds`."""
        world, has_begun = self._world, self._has_begun

        def report_rejected(event: str, **fields: str) -> None:
            self._record.event(event, **fields)
            if world.rank == 0:
                logging.getLogger("samestep").warning("skipped: %s", fields["reason"])

        if has_begun or config.resume == "auto":
            # Once the run has begun, its local state is newer than any remote copy.
            downloads = None
            if not has_begun and config.remote is not None and config.dir is not None:
                seconds = listing_seconds
                downloads = Downloads(config.remote, config.dir, world, listing_seconds=seconds)
            memory = in_memory if has_begun else None  # otherwise of another history
            newest = load_newest(config.dir, world, report_rejected, memory, downloads, self.owner)
            if newest is not None:
                return newest
        if config.resume in {"auto", "never"}:  # nothing was found, or nothing is wanted
            return None
        if is_url(config.resume) and config.dir is not None:
            return load_from(config.resume, config.dir, world)
        return load_together(Path(config.resume), world)

    def _find_of_others(self, in_memory: InMemorySnapshots) -> Snapshot | None:
        """Load the snapshot and write nothing into `dir`, where another run may train.

        If that removes all snapshots that were there, look again. Remote snapshots are downloaded
        into a temporary directory; those in `dir` are preferred.
        """
        config, world = self._source, self._world
        local = replace(config, remote=None)
        while not is_url(config.resume):
            paths = list_snapshots(config.dir) if config.dir is not None else []
            before = world.broadcast_json(list(map(str, paths)), "choosing a snapshot")
            try:
                newest = self._find(local, in_memory)
            except SnapshotError:
                still_there = any(path.exists() for path in map(Path, before))
                if config.resume != "auto" or world.broadcast_json(
                    still_there, "choosing a snapshot"
                ):
                    raise
            else:
                if newest is not None or config.remote is None or config.resume == "never":
                    return newest
                break
        # A folder of the same name on each host; its workers see it.
        name = world.broadcast_json(f"samestep-{uuid.uuid4().hex}", "choosing a snapshot")
        directory = Path(tempfile.gettempdir()) / name
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            snapshot = self._find(replace(config, dir=directory), in_memory)
            world.barrier("loading a snapshot")  # all have read it
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return snapshot

    def _note_origin(self, resumed: Snapshot) -> None:
        """Note where the run in `dir` started; say if that is no snapshot of its own."""
        if (owner := self.owner) is None:
            return
        self.owner = started = owner.started_from(resumed)
        if self._world.rank > 0 or self._config.dir is None:
            return
        if text := owner.describe_start(resumed):
            announce(text)
        if started != owner:
            store(self._config.dir, started)
            if self.remote_owner is not None:
                self.remote_owner.update(started)

    def config_of_run(self, resumed: Snapshot | None, devices: int) -> Config:
        """Return the options with the run's lanes, and with all batches that it leaves out."""
        config = with_skipped_batches(self._config, resumed)
        return replace(config, lanes=resolve_lanes(config, self._world.size, devices, resumed))

    def last_own_step(self, resumed: Snapshot | None) -> int:
        """Return the newest step of this run's own history, -1 if it begins now."""
        return last_own_step(self._config, resumed, self.owner)

    def set_others_aside(self, resumed: Snapshot | None, attempt: str) -> None:
        """Move snapshots of other histories to a separate directory if `resume` names the start.

        Otherwise the next `resume="auto"` would load the newest of them.
        """
        config = self._config
        if config.dir is None or config.resume == "auto":
            return
        start = self.last_own_step(resumed)
        current = None if resumed is None else resumed.path  # perhaps a download
        later = [path for path in list_snapshots(config.dir) if (step_of(path) or 0) > start]
        others = [path for path in later if current is None or path.resolve() != current.resolve()]
        aside = config.dir / f"superseded-{attempt}"
        for path in others:
            aside.mkdir(exist_ok=True)
            path.rename(aside / path.name)  # nothing is removed: the user may want them
        if others:
            names = [path.name for path in others]
            self._record.event("snapshots_set_aside", path=str(aside), snapshots=names)

    def describe(self, config: Config, resumed: Snapshot | None) -> str:
        """Return what a user wants to know when workers have started, with these options."""
        lanes, size, folder = config.lanes or 1, self._world.size, config.dir
        workers, before = f"{size} worker{'s' * (size != 1)}", size
        if resumed is not None:
            workers, before = (
                f"resumed at step {resumed.step}, {workers}",
                resumed.info.get("workers", size),
            )
        text = f"{workers}{f' (was {before})' * (before != size)}, {lanes} lane{'s' * (lanes != 1)}"
        if config.skip_batches is not None:
            text += f", without the batches of steps {config.skip_batches}"
        if skipped := [] if resumed is None else resumed.state["run"].get("skipped_steps", []):
            text += f", {len(skipped)} batch{'es' * (len(skipped) != 1)} skipped so far"
        if config.read_only:
            source = self._source.dir or self._source.remote
            return f"{text};{f' reads {source}, and' if source else ''} saves nothing"
        if folder is None:
            return f"{text}; without a directory (--dir), nothing is saved"
        return f"{text}, {folder} (watch: samestep watch {folder})"

    def load_best(self) -> Snapshot:
        """Load the snapshot with the highest score. Errors are those of the caller."""
        source = self._source
        if source.dir is None or source.keep_best < 1:
            raise ConfigError(
                "run.best_snapshot requires dir and a keep_best of at least 1, got"
                f" dir={source.dir} and keep_best={source.keep_best}"
            )
        # a run that only reads downloads nothing into the directory
        remote = None if source.read_only else source.remote
        return load_best(source.dir, remote, self._world, self._record.event)

    def check_read(self) -> None:
        """Raise `SnapshotError` in a run that only reads, if there was nothing to read."""
        source = self._source
        place = source.dir or source.remote
        if source.read_only and not self._has_resumed and place and source.resume != "never":
            raise SnapshotError(f"{mask_urls(str(place))} has no complete snapshot to read")


def with_skipped_batches(config: Config, resumed: Snapshot | None) -> Config:
    """Return the options with the batches that are left out, also those that the snapshot names.

    A run that is started again without the option must not train on them. Raises `ConfigError` for
    those on which it has trained.
    """
    saved = None if resumed is None else resumed.state["run"].get("skip_batches")
    step = 0 if resumed is None or config.read_only else resumed.step
    left_out = sorted(replace(config, skip_batches=saved).skipped_steps, key=attrgetter("start"))
    for steps in config.skipped_steps:
        first = steps.start  # not known to be left out
        for others in left_out:
            first = others.stop if first in others else first
        if first < min(steps.stop, step):
            raise ConfigError(
                f"skip_batches={config.skip_batches} cannot leave out step {first}, because the run"
                f" resumes from step {step}, after an update with its batch; resume from an"
                f" earlier snapshot (resume=PATH), or leave out later steps only"
            )
    texts = ",".join(str(text) for text in (saved, config.skip_batches) if text)
    return replace(config, skip_batches=",".join(dict.fromkeys(texts.split(","))) or None)


def read_exclusion(
    config: Config, resumed: Snapshot | None, world: World
) -> tuple[Exclusion, Config]:
    """Return the samples that the run leaves out, and the options with the file that has them.

    They are those of the option, of the run's directory and of its snapshot, in which they stay, so
    that a later start needs no option. Collective; raises `ConfigError` and `DataError` on rank 0.
    """
    saved = {} if resumed is None else resumed.state["run"].get("exclude", {})

    def read() -> dict[str, list[int]]:
        kept = [] if config.dir is None else [config.dir / NAME]
        paths = [path for path in kept if path.exists()]
        paths += [] if config.exclude is None else [config.exclude]
        loops = merged([saved, *map(read_loops, paths)])
        if not any(loops.values()) and config.exclude is not None:
            announce(f"exclude={config.exclude} is empty: no sample is left out")
        if any(loops.values()) and config.dir is not None:
            write_loops(config.dir, loops)
        return {loop: indices for loop, indices in loops.items() if indices}

    loops = call_once(world, read, "reading which samples are left out")
    file = config.dir / NAME if loops and config.dir is not None else config.exclude
    return Exclusion(loops), replace(config, exclude=file)


def resolve_lanes(config: Config, workers: int, devices: int, resumed: Snapshot | None) -> int:
    """Return the number of lanes: as in the snapshot, as configured, or one per device.

    Each of the `workers` has `devices` devices.
    """
    total = workers * devices  # a lane is computed by one device
    if resumed is None:
        lanes = config.lanes or total
    else:
        lanes = int(resumed.info["lanes"])
        seed = int(resumed.info["seed"])
        pairs = ("lanes", config.lanes or lanes, lanes), ("seed", config.seed, seed)
        for name, configured, saved in pairs:
            if configured != saved and not config.read_only:
                raise ConfigError(
                    f"{name} must be {saved}, as in the snapshot that the run resumes from, got "
                    f"{configured}; it is fixed for a run: use {name}={saved}, or resume='never'"
                )
    if total > lanes:
        where = "" if resumed is None else " in the snapshot that the run resumes from"
        fix = "increase lanes" if resumed is None else "start fewer workers"
        raise ConfigError(
            f"lanes must be at least the number of devices ({total}), got {lanes}{where}; {fix}"
        )
    return lanes
