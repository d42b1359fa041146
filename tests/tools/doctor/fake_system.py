"""A fake machine: files, environment, commands, limits and file systems as a test defines them."""

from __future__ import annotations

import resource
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.tools.doctor.system import (
    UNLIMITED,
    Case,
    Folder,
    Interface,
    Memory,
    Section,
    Space,
    System,
)

GIGABYTE = 1 << 30
DIRECTORY = Path("/runs/one")
ETHERNET = Interface("eth0", up=True, megabits=10_000, addresses=["10.0.0.5", "fe80::1"])
LOOPBACK = Interface("lo", up=True, megabits=None, addresses=["127.0.0.1"])
LIMITS = {
    resource.RLIMIT_NOFILE: (65536, 65536),
    resource.RLIMIT_NPROC: (96343, 96343),
    resource.RLIMIT_MEMLOCK: (UNLIMITED, UNLIMITED),
}
FILES = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Abacus 8000\n",
    "proc/self/cgroup": "0::/\n",
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}


class FakeSystem(System):
    """A machine with `files` below a root, outputs of `commands` by their words, and `spaces`."""

    def __init__(
        self,
        root: Path,
        *,
        files: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        commands: Mapping[str, str] | None = None,
        limits: Mapping[int, tuple[int | str, int | str]] | None = None,
        memory: Memory | None = None,
        interfaces: Sequence[Interface] = (ETHERNET, LOOPBACK),
        kind: str = "xfs",
        spaces: Mapping[str, Space] | None = None,
        lacking: Collection[str] = (),
        folder: Folder | None = None,
    ) -> None:
        super().__init__(environment or {}, root)
        for name, content in {**FILES, **(files or {})}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        self._commands, self._limits = commands or {}, {**LIMITS, **(limits or {})}
        self._memory = memory or Memory(64 * GIGABYTE, swap=0, swap_used=0)
        self._interfaces, self._lacking = interfaces, lacking
        self._mounts, self._spaces = [("/", "ext4"), ("/runs", kind)], spaces or {}
        self._folder = folder or Folder(DIRECTORY, writable=True, locks=True)

    def run(self, *command):
        return self._commands.get(" ".join(command))

    def has_command(self, name):
        return any(command.split()[0] == name for command in self._commands)

    def cores(self):
        return 12, 8

    def memory(self):
        return self._memory

    def process_limits(self, kind):
        return self._limits[kind]

    def lacking_calls(self):
        return list(self._lacking)

    def interfaces(self):
        return list(self._interfaces)

    def interface_towards(self, host):
        return "lo" if host.startswith("127.") else "eth0"

    def mounts(self):
        return self._mounts

    def space(self, path):
        return self._spaces.get(path, Space(100 * GIGABYTE, 50 * GIGABYTE, 1_000_000))

    def folder(self, path):
        return self._folder


def case_of(
    root: Path,
    *,
    workers: int = 2,
    torch: Mapping[str, Any] | None = None,
    failure: str = "",
    **system: Any,
) -> Case:
    """Return a run of 2 workers on a healthy machine with 8 cores, except for what is given."""
    return Case(FakeSystem(root, **system), DIRECTORY, workers, torch or {}, failure)


def findings(section: Section, severity: str) -> str:
    """Return the findings of a severity, each with its fix, or "" if there is none."""
    return "\n".join(
        f"{finding.text} {finding.fix}"
        for finding in section.findings
        if finding.severity == severity
    )
