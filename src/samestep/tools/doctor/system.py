"""The one place where the examination looks at the machine: files of /proc and /sys, commands, directories. Tests fabricate another."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from samestep.cluster.interfaces import interface_towards
from samestep.host import missing_system_calls, read_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNLIMITED: Final = "unlimited"
COMMAND_SECONDS: Final = 3.0  # for a command that tells of hardware; one that hangs tells nothing

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Space:
    """What a file system has, in bytes, and how many more files it can hold: None where it does not count them."""

    total_bytes: int
    free_bytes: int
    free_files: int | None


@dataclass(frozen=True)
class Folder:
    """The nearest directory to a path that exists already; `locks`: whether files can be locked there, None where none can be written."""

    path: Path
    writable: bool
    locks: bool | None


class System:
    """This machine. What is missing or refused is None, or empty; nothing here raises."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, root: Path = Path("/")
    ) -> None:
        self.environment: Mapping[str, str] = os.environ if environment is None else environment
        self._root = root

    def text(self, path: str) -> str | None:
        """Return what a file holds, without white space around it."""
        return read_file(self._root / path.lstrip("/"))

    def number(self, path: str) -> int | None:
        """Return the number that a file holds, None where it is a word such as max."""
        return whole_number(self.text(path))

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, in order."""
        try:
            return sorted(entry.name for entry in (self._root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    def space(self, path: str) -> Space | None:
        """Return what the file system at a path has."""
        try:
            told = os.statvfs(self._root / path.lstrip("/"))
        except OSError:
            return None
        return Space(
            told.f_frsize * told.f_blocks,
            told.f_frsize * told.f_bavail,
            told.f_favail if told.f_files else None,
        )

    def run(self, *command: str) -> str | None:
        """Return what a command prints, None where it fails."""
        return _run(command)

    def has_command(self, name: str) -> bool:
        """Tell whether a command is installed."""
        return shutil.which(name) is not None

    def lacking_calls(self) -> list[str]:
        """Return which of the kernel's calls that workers need to share memory do not work here."""
        return missing_system_calls()

    def interface_towards(self, host: str) -> str | None:
        """Return the network interface by which a host is reached."""
        return interface_towards(host)

    def folder(self, path: Path) -> Folder:
        """Return what can be done where a run's directory is, or would be."""
        return _folder(path)


def as_fact(system: System, limit: Number | None) -> Number | str | None:
    """Return the limit of a control group as a fact: a number, unlimited, or None where the system does not tell of groups."""
    return UNLIMITED if limit is None and system.text("/proc/self/cgroup") is not None else limit


def whole_number(text: str | None) -> int | None:
    """Return the number that a text is; None where it is none."""
    try:
        return int(text or "")
    except ValueError:
        return None


@cache
def _run(command: Sequence[str]) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=COMMAND_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.decode(errors="replace").strip()
    return None


def _folder(path: Path) -> Folder:
    path = path.absolute()
    existing = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    try:
        with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=existing) as folder:
            return Folder(existing, writable=True, locks=_has_locks(Path(folder)))
    except OSError:
        return Folder(existing, writable=False, locks=None)


def _has_locks(folder: Path) -> bool:
    """Take the lock that the record of a run takes, so that two runs cannot write into one directory."""
    with (folder / "lock").open("wb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in {errno.EACCES, errno.EAGAIN}
    return True
