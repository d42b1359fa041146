"""A fake machine: files, environment, commands, limits and file systems as a test defines them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from samestep.tools.doctor.system import Case, Finding, System


class Interface(NamedTuple):
    """A network interface, as psutil describes it."""

    isup: bool
    speed: int


class Space(NamedTuple):
    """The size of a file system, as `shutil.disk_usage` describes it."""

    total: int
    free: int


GIGABYTE = 1 << 30
ETHERNET = Interface(isup=True, speed=10_000)
LOOPBACK = Interface(isup=True, speed=0)
LIMITS = {
    resource.RLIMIT_MEMLOCK: (None, None),
}
FILES = {
    "proc/self/cgroup": "0::/\n",
    "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n",
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
        limits: Mapping[int, tuple[int | None, int | None]] | None = None,
        interfaces: Mapping[str, Interface] | None = None,
        kind: str = "xfs",
        spaces: Mapping[str, Space] | None = None,
    ) -> None:
        super().__init__(environment or {}, root)
        for name, content in {**FILES, **(files or {})}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        self._commands, self._limits = commands or {}, {**LIMITS, **(limits or {})}
        self._interfaces = interfaces or {"eth0": ETHERNET, "lo": LOOPBACK}
        self._mounts, self._spaces = [("/", "ext4"), (str(root), kind)], spaces or {}

    def run(self, *command):
        return self._commands.get(" ".join(command))

    def usable_cores(self):
        return 8

    def process_limits(self, kind):
        return self._limits[kind]

    def interfaces(self):
        return self._interfaces

    def interface_towards(self, host):
        return "lo" if host.startswith("127.") else "eth0"

    def mounts(self):
        return self._mounts

    def space(self, path):
        return self._spaces.get(path, Space(100 * GIGABYTE, 50 * GIGABYTE))


def case_of(
    root: Path,
    *,
    workers: int = 2,
    torch: Mapping[str, Any] | None = None,
    failure: str = "",
    **system: Any,
) -> Case:
    """Return a run of 2 workers on a healthy machine with 8 cores, except for what is given."""
    return Case(FakeSystem(root, **system), root / "run", workers, torch or {}, failure)


def results(check: Callable[[Case], Iterator[Finding]], case: Case) -> list[tuple[str, str]]:
    """Return the severity of each finding, and its text with the fix."""
    return [(finding.severity, f"{finding.text} {finding.fix}".strip()) for finding in check(case)]


def only_result(
    check: Callable[[Case], Iterator[Finding]], root: Path, **options: Any
) -> tuple[str, str]:
    """Return the only finding of a check on a machine with these options, ("", "") without one."""
    (result,) = results(check, case_of(root, **options)) or [("", "")]
    return result
