"""Access to this machine, and the types that all checks share."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import psutil

from samestep.cluster import interface_towards
from samestep.host import missing_system_calls, read_file

UNLIMITED: Final = "unlimited"
COMMAND_SECONDS: Final = 3.0  # a command that queries hardware may hang
FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"

Limit = int | str  # a number, or UNLIMITED
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Finding:
    """One sentence, and the command or option that fixes it.

    A "problem" would make a run fail or very slow; a "note" may slow it down.
    """

    severity: Literal["problem", "note", "good"]
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Section:
    """Facts by name, as JSON values, and findings. A fact is None if the system does not report it.

    Names of facts end in their unit, such as `_bytes`.
    """

    name: str
    facts: Mapping[str, Any]
    findings: Sequence[Finding]


def good(text: str) -> Finding:
    """Return a finding that no action is needed."""
    return Finding("good", text)


def note(text: str, fix: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding("note", text, fix)


def problem(text: str, fix: str) -> Finding:
    """Return a finding that must be fixed."""
    return Finding("problem", text, fix)


@dataclass(frozen=True)
class Memory:
    """Memory and swap of this host in bytes."""

    total: int
    swap: int
    swap_used: int


@dataclass(frozen=True)
class Interface:
    """A network interface; `megabits` per second is None if the driver does not report it."""

    name: str
    up: bool
    megabits: int | None
    addresses: Sequence[str]


@dataclass(frozen=True)
class Space:
    """Size of a file system; `free_files` is None if it does not limit their number."""

    total_bytes: int
    free_bytes: int
    free_files: int | None


@dataclass(frozen=True)
class Folder:
    """The nearest existing directory of a path; `locks` is None if no file can be written there."""

    path: Path
    writable: bool
    locks: bool | None


class System:
    """This machine. Values that are missing or refused are None or empty; no method raises."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, root: Path = Path("/")
    ) -> None:
        self.environment: Mapping[str, str] = os.environ if environment is None else environment
        self._root = root

    def text(self, path: str) -> str | None:
        """Return the content of a file without surrounding white space."""
        return read_file(self._root / path.lstrip("/"))

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory."""
        with suppress(OSError):
            return sorted(entry.name for entry in (self._root / path.lstrip("/")).iterdir())
        return []

    def run(self, *command: str) -> str | None:
        """Return the output of a command, or None if it fails."""
        return _run(command)

    def has_command(self, name: str) -> bool:
        """Return whether a command is installed."""
        return shutil.which(name) is not None

    def in_pod(self) -> bool:
        """Return whether this process runs in a Kubernetes pod."""
        return "KUBERNETES_SERVICE_HOST" in self.environment or bool(self.names(SERVICE_ACCOUNT))

    def cores(self) -> tuple[int | None, int | None]:
        """Return the number of cores of this machine, and of those this process may use."""
        with suppress(OSError):
            return os.cpu_count(), len(os.sched_getaffinity(0))
        return os.cpu_count(), None

    def memory(self) -> Memory | None:
        """Return memory and swap of this host."""
        with suppress(OSError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # psutil warns about swap counters that are unused here
            swap = psutil.swap_memory()
            return Memory(psutil.virtual_memory().total, swap.total, swap.used)
        return None

    def group_limit(
        self, limit_of: Callable[[Callable[[str], str | None]], Number | None]
    ) -> Number | str | None:
        """Return a limit of a control group as a fact; None if this process is in no group."""
        limit = limit_of(self.text)
        return UNLIMITED if limit is None and self.text("/proc/self/cgroup") is not None else limit

    def process_limits(self, kind: int) -> tuple[Limit, Limit]:
        """Return the soft and the hard limit that `resource` defines for `kind`."""
        limits = resource.getrlimit(kind)
        soft, hard = (UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in limits)
        return soft, hard

    def lacking_calls(self) -> list[str]:
        """Return the system calls for shared memory between workers that do not work here."""
        return missing_system_calls()

    def interfaces(self) -> list[Interface]:
        """Return the network interfaces of this host, sorted by name."""
        found: list[Interface] = []
        with suppress(OSError):
            addresses = psutil.net_if_addrs()
            for name, state in sorted(psutil.net_if_stats().items()):
                entries = [each for each in addresses.get(name, ()) if each.family in FAMILIES]
                own = [entry.address.partition("%")[0] for entry in entries]
                found.append(Interface(name, state.isup, state.speed or None, own))
        return found

    def interface_towards(self, host: str) -> str | None:
        """Return the network interface through which a host is reached."""
        return interface_towards(host)

    def mounts(self) -> list[tuple[str, str]]:
        """Return mount points with the kinds of their file systems, in the order of mounting."""
        with suppress(OSError):
            return [(mount.mountpoint, mount.fstype) for mount in psutil.disk_partitions(all=True)]
        return []

    def space(self, path: str) -> Space | None:
        """Return the size of the file system at a path."""
        try:
            counts = os.statvfs(self._root / path.lstrip("/"))
        except OSError:
            return None
        files = counts.f_favail if counts.f_files else None
        return Space(counts.f_frsize * counts.f_blocks, counts.f_frsize * counts.f_bavail, files)

    def folder(self, path: Path) -> Folder:
        """Return the nearest existing directory of a path, and what can be done in it."""
        path = path.absolute()
        existing = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
        try:
            with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=existing) as folder:
                return Folder(existing, writable=True, locks=_can_lock(Path(folder) / "lock"))
        except OSError:
            return Folder(existing, writable=False, locks=None)


@dataclass(frozen=True)
class Case:
    """A run with `workers` on this `system` and its files in `directory`.

    `torch` is the report of the probe process; `failure` is the reason if there is none.
    """

    system: System
    directory: Path
    workers: int
    torch: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""


@cache
def _run(command: Sequence[str]) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        null, limit = subprocess.DEVNULL, COMMAND_SECONDS
        output = subprocess.check_output(command, stdin=null, stderr=null, timeout=limit)
        return output.decode(errors="replace").strip()
    return None


def _can_lock(path: Path) -> bool:
    """Take the lock that a run's record takes to keep a second run out of its directory."""
    with path.open("wb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in {errno.EACCES, errno.EAGAIN}
    return True
