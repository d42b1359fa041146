"""How much memory this host could still give."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of version 2, as a container sees its own


def available_bytes() -> int | None:
    """Return what can be had without swapping, and within the limit of this container; None where the system does not say."""
    found = []
    with suppress(OSError, KeyError):
        found.append(1024 * _numbers(MEMINFO)["MemAvailable"])
    with suppress(OSError, KeyError, ValueError):  # where there is no limit it is the word "max"
        used = _numbers(CGROUP / "memory.stat")  # what caches files there can be had
        found.append(int((CGROUP / "memory.max").read_text()) - used["anon"] - used["shmem"])
    return min(found, default=None)


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file that has a name and a number in each line."""
    lines = (line.replace(":", "").split() for line in path.read_text(encoding="ascii").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
