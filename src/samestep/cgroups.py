"""What this process may use: the limits that a container, Slurm or systemd set by control groups, of version 1 or 2.

All functions read the kernel's files by `read`, which returns None for one that is missing or
refused; nothing here raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Read = Callable[[str], str | None]

ROOT: Final = "/sys/fs/cgroup"
HYBRID: Final = f"{ROOT}/unified"  # of version 2, where version 1 has the root
MOST: Final = 1 << 60  # version 1 writes no limit as the largest number of whole pages


def read_file(path: str | Path) -> str | None:
    """Return what a file holds, without white space around it."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def available_bytes(read: Read = read_file) -> int | None:
    """Return how much memory can be had without swapping and within all limits; None where the system does not say."""
    of_host = numbers(read("/proc/meminfo")).get("MemAvailable")
    found = [None if of_host is None else 1024 * of_host, memory_left(read)]
    return min((count for count in found if count is not None), default=None)


def memory_left(read: Read = read_file) -> int | None:
    """Return how many bytes of the memory limit are left: what caches files can be had. None where there is no limit."""
    left = []
    for group in _groups(read, "memory"):
        # in version 1 the total has what groups below use, too
        counted = numbers(read(f"{group}/memory.stat"))
        used = sum(
            counted.get(f"total_{name}", counted.get(name, 0)) for name in ("anon", "rss", "shmem")
        )
        left += [
            max(0, limit - used)
            for limit in _limits(read, group, "memory.max", "memory.limit_in_bytes")
        ]
    return min(left, default=None)


def memory_limit(read: Read = read_file) -> int | None:
    """Return how many bytes of memory there may be, None where there is no limit."""
    groups = _groups(read, "memory")
    return min(
        (
            limit
            for group in groups
            for limit in _limits(read, group, "memory.max", "memory.limit_in_bytes")
        ),
        default=None,
    )


def process_limit(read: Read = read_file) -> int | None:
    """Return how many processes and threads there may be, None where there is no limit."""
    return min(
        (limit for group in _groups(read, "pids") for limit in _limits(read, group, "pids.max")),
        default=None,
    )


def cpu_quota(read: Read = read_file) -> float | None:
    """Return how many cores' time there is, None where there is no quota."""
    quotas = []
    for group in _groups(read, "cpu"):
        # "150000 100000", or "max 100000"
        allowed, _, period = (read(f"{group}/cpu.max") or "").partition(" ")
        quotas.append((_number(allowed), _number(period)))
        quotas.append(
            (
                _number(read(f"{group}/cpu.cfs_quota_us")),
                _number(read(f"{group}/cpu.cfs_period_us")),
            )
        )
    return min((allowed / period for allowed, period in quotas if allowed and period), default=None)


def numbers(text: str | None) -> dict[str, int]:
    """Return the numbers of a text that has a name and a number in each line, as /proc/meminfo."""
    words = (line.replace(":", " ").split() for line in (text or "").splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def _number(text: str | None) -> int | None:
    """Return a number; None for a word such as max, and for the -1 that is none."""
    return int(text) if text and text.isdecimal() else None


def _limits(read: Read, group: str, *names: str) -> Iterator[int]:
    for name in names:
        limit = _number(read(f"{group}/{name}"))
        if limit is not None and limit < MOST:
            yield limit


def _groups(read: Read, controller: str) -> Iterator[str]:
    """Yield the directories of the groups this process is in, for a controller, each with all above it.

    A container may see its own group as the root, and the path of another name space; so paths that
    are not there are harmless.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # one is a link to the other
        trees = {f"{ROOT}/{controllers}", f"{ROOT}/{controller}"} if controllers else {ROOT, HYBRID}
        parts = [part for part in path.split("/") if part]
        yield from (
            "/".join([tree, *parts[:count]])
            for tree in trees
            for count in range(len(parts), -1, -1)
        )
