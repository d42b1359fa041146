"""Run a command for the figures that it prints, and tell medians with the lowest and highest."""

from __future__ import annotations

import re
import statistics
import subprocess
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_SECONDS = 300  # for one run, whose workers may wait for each other for ever


def figures(command: Sequence[str]) -> dict[str, float]:
    """Return what a job prints as `name=value`, by name; where several workers print it, their mean.

    The exit status does not count, since gloo sometimes aborts a worker that has told its figures and leaves.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed, complaints = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # launchers end their workers then
            raise SystemExit(f"{' '.join(command)} still ran after {LIMIT_SECONDS} seconds") from None
    found = defaultdict(list)
    for name, value in re.findall(r"(\w+)=([\d.]+)", printed):
        found[name].append(float(value))
    if not found:
        raise SystemExit(f"{' '.join(command)} failed:\n{complaints}")
    return {name: statistics.mean(values) for name, values in found.items()}


def spread(values: Sequence[float]) -> str:
    """Return a median with the lowest and highest."""
    return f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"
