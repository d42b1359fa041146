"""The order in which several processes of pytest run tests: what takes longest begins first.

A slow test that begins last keeps one process busy while the others have nothing left to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

SLOWEST = Path(__file__).parent / "house" / "slowest.txt"
# one process starts what tests of such a folder share, instead of each that gets one of its modules
TOGETHER = ("tests/gpu", "tests/watch/browser")

T = TypeVar("T")


def group_of(name: str) -> str:
    """Return what keeps a test beside others: its module, or its folder if that shares a start."""
    path = name.partition("::")[0]
    folder = path.rpartition("/")[0]
    return folder if folder in TOGETHER else path


def seconds_of_groups() -> dict[str, float]:
    """Return the time of all listed tests of each group that has one."""
    seconds: dict[str, float] = {}
    for line in SLOWEST.read_text().splitlines():
        if not line.startswith("#"):
            duration, _, name = line.split()
            group = group_of(name)
            seconds[group] = seconds.get(group, 0.0) + float(duration)
    return seconds


def slow_ones_first(
    groups: Mapping[str, Sequence[T]], seconds: Mapping[str, float], processes: int
) -> list[T]:
    """Return the tests of all groups; the slow groups begin the shares of all processes.

    pytest-xdist gives each process an equal number of tests that follow each other. Once one has
    none left, it takes the last ones of another one.
    """
    shares: list[list[T]] = [[] for _ in range(processes)]
    loads = [0.0] * processes
    slow = [group for group in groups if group in seconds]
    for group in sorted(slow, key=lambda group: -seconds[group]):
        least = loads.index(min(loads))
        shares[least] += groups[group]
        loads[least] += seconds[group]
    others = [test for group, tests in groups.items() if group not in seconds for test in tests]
    left = sum(map(len, groups.values()))
    ordered: list[T] = []
    for number, share in enumerate(shares):
        size = left // (processes - number)
        left -= size
        others_here = max(0, size - len(share))
        ordered += [*share, *others[:others_here]]
        del others[:others_here]
    return ordered + others
