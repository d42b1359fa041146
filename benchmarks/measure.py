"""Run a command for the figures that it prints, and tell medians with the lowest and highest."""

from __future__ import annotations

import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Sequence

LIMIT_SECONDS = 300  # for one run, whose workers may wait for each other for ever


def values_in(text: str) -> dict[str, list[float]]:
    """Return every value of what is written as `name=value` in a text, by name; of other names, none."""
    found = defaultdict(list)
    for name, value in re.findall(r"(\w+)=([\d.]+)", text):
        found[name].append(float(value))
    return found


def printed(command: Sequence[str]) -> dict[str, list[float]]:
    """Return everything that the workers of a command print as `name=value`, by name, however the command ends.

    The exit status does not count, since gloo sometimes aborts a worker that has told its figures
    and leaves.
    """
    return values_in(_run(command)[0])


def figures(command: Sequence[str]) -> dict[str, float]:
    """Return the same as means over the workers that print it. Ends this process, with the command's complaints, where there is none."""
    told, complaints = _run(command)
    found = {name: statistics.fmean(values) for name, values in values_in(told).items()}
    if not found:
        raise SystemExit(f"{' '.join(command)} failed:\n{complaints}")
    return found


def _run(command: Sequence[str]) -> tuple[str, str]:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            return process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # launchers end their workers then
            raise SystemExit(
                f"{' '.join(command)} still ran after {LIMIT_SECONDS} seconds"
            ) from None


def spread(values: Sequence[float]) -> str:
    """Return a median with the lowest and highest."""
    return f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"
