"""A machine for the examination that is none: files, environment, commands and file systems as a test gives them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.tools.doctor.case import Case
from samestep.tools.doctor.gpus import find_gpus
from samestep.tools.doctor.system import Folder, Space, System

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from samestep.tools.doctor.section import Section

GIGABYTE = 1 << 30
DIRECTORY = Path("/runs/one")
LIMITS = """
Limit                     Soft Limit           Hard Limit           Units
Max processes             96343                96343                processes
Max open files            {files:<20} {most_files:<20} files
Max locked memory         {locked:<20} {locked:<20} bytes
"""
HEALTHY = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Abacus 8000\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3,8-11\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/limits": LIMITS.format(files=65536, most_files=65536, locked="unlimited"),
    "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 8:2 / /runs rw - xfs /dev/sdb1 rw\n",
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
    "proc/net/fib_trie": "Main:\n  |-- 10.0.0.5\n    /32 host LOCAL\n  |-- 127.0.0.1\n    /32 host LOCAL\n"
    "  |-- 10.0.0.255\n    /32 link BROADCAST\n",
    "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask\n"
    "eth0 00000000 0100000A 3 0 0 0 00000000\neth0 0000000A 00000000 1 0 0 0 00FFFFFF\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/speed": "10000\n",
    "sys/class/net/lo/operstate": "unknown\n",
    "sys/devices/system/cpu/online": "0-11\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}


class Fabricated(System):
    """A machine with `files` under a root, None for one that is not there; `commands` by their words, and `spaces` by path."""

    def __init__(
        self,
        root: Path,
        files: Mapping[str, str | None],
        environment: Mapping[str, str],
        commands: Mapping[str, str],
        spaces: Mapping[str, Space],
        lacking: Collection[str],
        folder: Folder,
    ) -> None:
        super().__init__(environment, root)
        for name, content in {**HEALTHY, **files}.items():
            if content is not None:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(content)
        self._commands, self._spaces, self._lacking, self._folder = (
            commands,
            spaces,
            lacking,
            folder,
        )

    def space(self, path):
        return self._spaces.get(path, Space(100 * GIGABYTE, 50 * GIGABYTE, 1_000_000))

    def run(self, *command):
        return self._commands.get(" ".join(command))

    def has_command(self, name):
        return any(command.split()[0] == name for command in self._commands)

    def lacking_calls(self):
        return list(self._lacking)

    def interface_towards(self, host):
        return "lo" if host.startswith("127.") else "eth0"

    def folder(self, path):
        return self._folder


def case_of(
    root: Path,
    *,
    workers: int = 2,
    torch: Mapping[str, Any] | None = None,
    failure: str = "",
    files: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] | None = None,
    commands: Mapping[str, str] | None = None,
    spaces: Mapping[str, Space] | None = None,
    lacking: Collection[str] = (),
    folder: Folder | None = None,
) -> Case:
    """Return a healthy machine of 8 cores that differs in what is given, and a run of 2 workers on it."""
    folder = folder or Folder(DIRECTORY, writable=True, locks=True)
    system = Fabricated(
        root, files or {}, environment or {}, commands or {}, spaces or {}, lacking, folder
    )
    return Case(system, DIRECTORY, workers, find_gpus(system), torch or {}, failure)


def told(section: Section, tone: str) -> str:
    """Return what a section's findings of a tone say and what mends them, a line each; "" for none."""
    return "\n".join(
        f"{finding.text} {finding.mend}" for finding in section.findings if finding.tone == tone
    )
