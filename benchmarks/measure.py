"""Measure commands in turn, and tell medians with the lowest and highest."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SAMESTEP = [sys.executable, "-m", "samestep", "run", "-n", "2"]


def figures(command: Sequence[str]) -> dict[str, float]:
    """Return what a job prints as `name=value`, by name."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", done.stdout)}
    if done.returncode != 0 or not found:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return found


def speed(command: Sequence[str]) -> float:
    """Return the samples a second that a job prints."""
    return figures(command)["samples_a_second"]


def seconds(command: Sequence[str]) -> float:
    """Return the wall time of a command."""
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - started


def compare(
    title: str, unit: str, measure: Callable[[Sequence[str]], float], ours: Sequence[str], theirs: Sequence[str], rounds: int
) -> None:
    """Measure both in turn and print medians, ranges and the ratio ours / theirs."""
    pairs = []
    for number in range(rounds):
        first, second = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        values = {id(command): measure(command) for command in (first, second)}
        pairs.append((values[id(ours)], values[id(theirs)]))
    ratios = [mine / other for mine, other in pairs]
    print(f"{title}, {rounds} rounds")
    for name, values_of in (("samestep", [mine for mine, _ in pairs]), ("peer", [other for _, other in pairs])):
        print(f"  {name:9} {spread(values_of)} {unit}")
    print(f"  ratio     {spread(ratios)}", flush=True)


def spread(values: Sequence[float]) -> str:
    """Return a median with the lowest and highest."""
    return f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"
