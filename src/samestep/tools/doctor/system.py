"""Access to this machine, and the types that all checks share."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from samestep.cluster import interface_towards
from samestep.host import read_file, usable_cores

COMMAND_SECONDS: Final = 3.0  # a command that queries hardware may hang


@dataclass(frozen=True)
class Finding:
    """One sentence, and the command or option that fixes it.

    A "problem" would make a run fail, lose its files or very slow; a "note" may slow it down.
    """

    severity: Literal["problem", "note"]
    text: str
    fix: str


note, problem = partial(Finding, "note"), partial(Finding, "problem")


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

    @staticmethod
    @cache
    def run(*command: str) -> str | None:
        """Return the output of a command, or None if it fails."""
        with suppress(OSError, subprocess.SubprocessError):
            null, limit = subprocess.DEVNULL, COMMAND_SECONDS
            output = subprocess.check_output(command, stdin=null, stderr=null, timeout=limit)
            return output.decode(errors="replace").strip()
        return None

    def in_pod(self) -> bool:
        """Return whether this process runs in a Kubernetes pod."""
        return "KUBERNETES_SERVICE_HOST" in self.environment

    def usable_cores(self) -> int:
        """Return the number of cores that this process may use."""
        return usable_cores(self.text)

    def process_limits(self, kind: int) -> tuple[int | None, int | None]:
        """Return the soft and the hard limit of a `kind` that `resource` defines, None if none."""
        limits = resource.getrlimit(kind)
        soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
        return soft, hard

    def interfaces(self) -> dict[str, Any]:
        """Return the network interfaces: `isup`, and `speed` in Mbit/s or 0, by name."""
        with suppress(OSError):
            return dict(sorted(psutil.net_if_stats().items()))
        return {}

    def interface_towards(self, host: str) -> str | None:
        """Return the network interface through which a host is reached."""
        return interface_towards(host)

    def mounts(self) -> list[tuple[str, str]]:
        """Return mount points with the kinds of their file systems, in the order of mounting."""
        with suppress(OSError):
            return [(mount.mountpoint, mount.fstype) for mount in psutil.disk_partitions(all=True)]
        return []

    def space(self, path: str) -> Any:
        """Return the `total` and `free` bytes of the file system at a path."""
        with suppress(OSError):
            return shutil.disk_usage(self._root / path.lstrip("/"))
        return None


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
