"""Which run a directory, a remote storage and their snapshots belong to.

A run has a random id from its first start on. `run.json` has it, in the run's directory and at its
remote, and so has each snapshot. The one at the remote also says which directory writes there: not
all storages have locks, so its process rewrites the file every few seconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from samestep.config import Config, is_url
from samestep.errors import ConfigError, SnapshotError
from samestep.host import printable
from samestep.record.events import cannot_begin
from samestep.snapshot.read import Snapshot, list_snapshots, sort_snapshots
from samestep.storage import RETRIES, Retries, Storage, StorageError, read_regular, write_atomically

NAME: Final = "run.json"
LARGEST_BYTES: Final = 2**16
HEARTBEAT_SECONDS: Final = 10.0
LOST_SECONDS: Final = 30.0  # without a heartbeat, a process on another host is considered dead
POLL_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 2.0
START_SECONDS: Final = 15.0  # in which requests of a start are repeated, all together


@dataclass(frozen=True)
class Owner:
    """A run, as `run.json` describes it.

    `program` is a digest of its script, modules, arguments and settings. `holder` is a random name
    of the directory; at a remote, that of the directory that writes there, and "" if none does.
    `origin` is the run and the step of another run's snapshot that it started from. If it `adopts`
    snapshots without an id, they are of version 0.1 and were there before it. `beat` is the time
    of the last heartbeat, in seconds since 1970.
    """

    id: str
    dir: str = ""
    script: str = ""
    host: str = ""
    program: str = ""
    holder: str = ""
    origin: tuple[str, int] | None = None
    adopts: bool = False
    beat: float = 0.0

    def __str__(self) -> str:
        place = f"{self.script} in {self.dir}" + (f" on {self.host}" if self.host else "")
        return printable(f"{self.id} ({place})")[:500]

    @property
    def label(self) -> dict[str, str]:
        """What snapshots and the record say about their run."""
        return {"id": self.id, "dir": self.dir, "script": self.script}

    def owns(self, info: Mapping[str, Any], step: int) -> bool:
        """Return whether a snapshot with this `info` is the run's, or the one it started from."""
        other = _other(info)
        if other is None:
            return self.adopts
        return other.id == self.id or (other.id, step) == self.origin

    def started_from(self, snapshot: Snapshot) -> Owner:
        """Return the same run once it started from a snapshot that the user named."""
        other = _other(snapshot.info)
        if other is None:
            return self if snapshot.in_memory else replace(self, adopts=True)
        return self if other.id == self.id else replace(self, origin=(other.id, snapshot.step))

    def is_of_another_run(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot names another run."""
        other = _other(snapshot.info)
        return other is not None and other.id != self.id

    def describe_start(self, snapshot: Snapshot) -> str:
        """Return a line about the start from a snapshot that does not have the run's id, or ""."""
        other = _other(snapshot.info)
        if snapshot.in_memory or (other is not None and other.id == self.id):
            return ""
        if other is None:
            return f"{snapshot.path} has no id of a run (version 0.1): run {self.id} adopts it"
        return f"run {self.id} starts from step {snapshot.step} of run {other}"

    def check(self, snapshot: Snapshot) -> None:
        """Raise `ConfigError` if a snapshot that nobody named is of another run."""
        if snapshot.in_memory or self.owns(snapshot.info, snapshot.step):
            return
        other = _other(snapshot.info)
        name = "another run, which it does not name" if other is None else f"run {other}"
        raise ConfigError(
            f"{snapshot.path} is a snapshot of {name}, but this is run {self}. To start from it, "
            f"pass resume={snapshot.path}; for its weights alone, load them with "
            "ss.read_snapshot; otherwise move it out of the directory"
        )

    def to_bytes(self) -> bytes:
        """Return the content of `run.json`."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, place: str) -> Owner:
        """Read the content of `run.json` at `place`. Raises `SnapshotError` if it is damaged."""
        try:
            return cls.from_json(json.loads(data))
        except (LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise SnapshotError(
                f"{place}/{NAME} is damaged ({type(error).__name__}); remove it if you know whose "
                "snapshots these are"
            ) from error

    @classmethod
    def from_json(cls, content: Any) -> Owner:
        """Read the fields of a run. Raises `LookupError`, `TypeError` or other errors if wrong."""
        texts = {
            name: str(content[name])
            for name in ("id", "dir", "script", "host", "program", "holder")
        }
        origin = content["origin"]
        origin = None if origin is None else (str(origin[0]), int(origin[1]))
        return cls(
            **texts, origin=origin, adopts=content["adopts"] is True, beat=float(content["beat"])
        )


def _other(info: Mapping[str, Any]) -> Owner | None:
    """Return the run that a snapshot names, None if it names none."""
    label = info.get("run")
    if not isinstance(label, Mapping):
        return None
    texts = {name: str(label.get(name, "?")) for name in ("id", "dir", "script")}
    return Owner(**texts)  # type: ignore[arg-type]  # texts only


def names_remote(config: Config) -> bool:
    """Return whether the snapshot to resume from is named by its URL at the run's remote."""
    folder = config.resume.rstrip("/").rpartition("/")[0]
    return is_url(config.resume) and folder == (config.remote or "").rstrip("/")


def begin(
    directory: Path, config: Config, program: str, *, has_begun: bool
) -> tuple[Owner, RemoteOwner | None]:
    """Return the run in a directory, a new one at its first start, and its entry at the remote.

    A new directory goes on with the run at the remote if the user named one of its snapshots, or
    if script, modules, arguments and settings are the same, as on a replaced machine. Raises
    `ConfigError` if the remote is another run's, or if another process writes there.
    """
    stored, has_snapshots = load(directory), bool(list_snapshots(directory))
    owner = Owner(
        stored.id if stored else secrets.token_hex(8),
        str(directory.resolve()),
        os.path.abspath(sys.argv[0] or "."),  # noqa: PTH100  as it was typed, without links followed
        socket.gethostname(),
        program,
        stored.holder if stored else secrets.token_hex(8),
        stored.origin if stored else None,
        adopts=stored.adopts if stored else has_snapshots,
    )
    remote = None if config.remote is None else RemoteOwner(config.remote, owner)
    is_restart = has_begun and stored is not None
    if remote is not None and not is_restart:
        is_named = names_remote(config)
        is_new = (stored is None or not has_snapshots) and (
            is_named or config.resume in {"auto", "never"}  # otherwise of another history
        )
        owner = remote.decide_in_time(is_new=is_new, is_named=is_named)
    if remote is not None:
        at_once = remote.responds and not is_restart
        remote.start(owner, _holder(directory, owner), at_once=at_once)
    if owner != stored:  # after the remote, which may refuse this directory
        store(directory, owner)
    return owner, remote


def load(directory: Path) -> Owner | None:
    """Return the run of a directory, None if it has none yet. Raises `SnapshotError`."""
    try:
        return Owner.from_bytes(read_regular(directory / NAME, LARGEST_BYTES), str(directory))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(f"cannot read {directory / NAME}: {error.strerror}") from error


def store(directory: Path, owner: Owner) -> None:
    """Write the run of a directory. Raises `RecordError`."""
    try:
        write_atomically(directory / NAME, owner.to_bytes())
    except OSError as error:
        raise cannot_begin(directory, error) from error


def _holder(directory: Path, owner: Owner) -> str:
    """Return a name of this directory that its copies do not have."""
    return f"{owner.holder} {directory.stat().st_ino}"


class RemoteOwner:
    """The entry of a run at its remote, on the one worker that writes there.

    The directory's lock excludes other processes in the same directory. Those of other directories
    see the heartbeat.
    """

    def __init__(self, url: str, owner: Owner, retries: Retries = RETRIES) -> None:
        self._storage, self._owner = Storage(url, retries), owner
        self._lock = threading.Lock()  # held during requests, so training must not take it
        self._closed = threading.Event()
        self.responds = True
        self._is_held = False
        self._replaced = ""  # the id of a run without snapshots, whose remote this run takes
        self._fault = ""  # why the run must not write there
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The URL, without secrets."""
        return self._storage.url

    def _read(self) -> Owner | None:
        size = self._storage.size(NAME)
        if size is None:
            return None
        if size > LARGEST_BYTES:
            raise SnapshotError(f"{self.url}/{NAME} must have at most {LARGEST_BYTES} bytes")
        return Owner.from_bytes(self._storage.read(NAME, 0, size), self.url)

    def _names(self) -> list[str]:
        return [path.name for path in sort_snapshots(map(Path, self._storage.folders()))]

    def decide_in_time(self, *, is_new: bool, is_named: bool) -> Owner:
        """Do what `decide` does; of a remote that does not respond, `hold` asks during the run."""
        self._storage.retry_for(START_SECONDS)
        try:
            return self.decide(is_new=is_new, is_named=is_named)
        except StorageError:
            self.responds = False
            return self._owner

    def decide(self, *, is_new: bool, is_named: bool) -> Owner:
        """Return the run that goes on here; it may be that of the remote if the directory `is_new`.

        Raises `ConfigError` if the remote is another run's.
        """
        owner, entry = self._owner, self._read()
        if entry is None:
            if owner.adopts or not (names := self._names()):
                return owner
            if not is_new:
                raise ConfigError(
                    f"remote {self.url} has snapshots such as {names[-1]}, but no {NAME} that says "
                    f"whose they are, and run {owner} has others: use another remote, or an empty "
                    "dir to go on with them"
                )
            return replace(owner, adopts=True)
        if entry.id == owner.id:
            return owner
        listed = self._names() if entry.holder == "" else None
        if listed == []:  # it ended before its first snapshot
            self._replaced = entry.id
            return owner
        if not is_new or not (is_named or entry.program == owner.program):
            raise ConfigError(self._refusal(entry, listed, is_new=is_new))
        logging.getLogger("samestep").warning(
            "this is run %s at %s, which goes on in %s", entry, self.url, owner.dir
        )
        return replace(owner, id=entry.id, origin=entry.origin, adopts=entry.adopts)

    def _refusal(
        self, entry: Owner, names: list[str] | None = None, *, is_new: bool = False
    ) -> str:
        """Return why this run cannot use the remote, whose snapshots may be listed already."""
        names = self._names() if names is None else names
        owner = str(self._owner)
        if is_new:
            owner = f"a new one ({self._owner.script} in {self._owner.dir})"
            owner += " with other files, arguments or settings"
        advice = f"It has no snapshots: if that run is over, remove {self.url}/{NAME}"
        if names:
            advice = (
                f"To go on with that run here, pass resume={self.url}/{names[-1]} and an empty "
                "dir; to start a new run from its state, pass the same and another remote"
            )
        text = f"remote {self.url} belongs to run {entry}, but this is {owner}"
        return f"{text}: use another remote. {advice}"

    def start(self, owner: Owner, holder: str, *, at_once: bool) -> None:
        """Hold the remote until `close`; wait for the answer if `at_once`.

        Raises `ConfigError` if it is another run's, or if another process writes there.
        """
        self._owner = replace(owner, holder=holder)
        if at_once:
            try:
                with suppress(StorageError):  # the storage fails: later
                    self.hold()
            except SnapshotError as error:
                raise ConfigError(str(error)) from error
        self._storage.retry_for(math.inf)
        self._thread = threading.Thread(target=self._run, name="hold the remote", daemon=True)
        self._thread.start()

    def owns(self, info: Mapping[str, Any], step: int) -> bool:
        """Return whether a snapshot is the run's."""
        return self._owner.owns(info, step)

    def update(self, owner: Owner) -> None:
        """Note what changed about the run; the next heartbeat writes it."""
        self._owner = replace(owner, holder=self._owner.holder)

    def _run(self) -> None:
        pause = HEARTBEAT_SECONDS if self._is_held else 0.0
        while not self._closed.wait(pause):
            pause = HEARTBEAT_SECONDS
            with suppress(SnapshotError):  # the storage fails, or `check` raises it
                self.hold()
        with suppress(SnapshotError), self._lock:
            entry = self._read() if self._is_held else None
            if entry is not None and entry.holder == self._owner.holder:
                self._storage.write(NAME, replace(self._owner, holder="").to_bytes())

    def hold(self) -> None:
        """Write the entry, and return once it is there.

        Raises `SnapshotError` if the remote is another run's or process's, and `StorageError`.
        """
        with self._lock:
            try:
                self._hold()
            except StorageError:
                raise
            except SnapshotError as error:
                self._fault = str(error)
                raise

    def _hold(self) -> None:
        entry = self._read()
        if entry is not None and entry.id not in {self._owner.id, self._replaced}:
            raise SnapshotError(self._refusal(entry))
        if entry is not None and entry.holder not in {"", self._owner.holder}:
            if self._is_held:
                raise SnapshotError(
                    f"a process in {entry.dir} on host {entry.host} writes to {self.url} as well, "
                    f"so run {self._owner.id} trains twice, and this process, in "
                    f"{self._owner.dir}, stops: keep only one of both"
                )
            self._wait_for_heartbeat(entry)
        owner = replace(self._owner, beat=time.time())
        if entry is not None:
            self._storage.write(NAME, owner.to_bytes())
        else:
            try:
                self._storage.create(NAME, owner.to_bytes())
            except StorageError as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
                self._hold()  # another run was faster
                return
        if not self._is_held and (written := self._read()) != owner:  # two have waited for a third
            raise SnapshotError(
                f"another process, of run {written}, began to write to {self.url} at the same time"
            )
        self._is_held = True

    def _wait_for_heartbeat(self, entry: Owner) -> None:
        """Raise `SnapshotError` if another process rewrites the entry."""
        logging.getLogger("samestep").warning(
            "the last process that wrote to %s, in %s on host %s, may still run; waiting up to "
            "%g s for a sign of life", self.url, entry.dir, entry.host, LOST_SECONDS,
        )  # fmt: skip
        deadline = time.monotonic() + LOST_SECONDS
        while time.monotonic() < deadline and not self._closed.wait(
            min(POLL_SECONDS, LOST_SECONDS / 30)
        ):
            now = self._read()
            if now is None or now.holder == "":
                return  # it has ended
            if now != entry:
                raise SnapshotError(
                    f"another process, of run {now}, writes to {self.url}: wait until it has "
                    "ended, or stop it; a run of its owner needs another remote"
                )

    def check(self) -> None:
        """Raise `SnapshotError` if the remote became another run's or process's."""
        if self._fault:
            raise SnapshotError(self._fault)

    def close(self) -> None:
        """Release the remote; storage that hangs is not waited for."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            self._storage.given_up.set()
