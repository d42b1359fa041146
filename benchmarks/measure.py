"""Run a command for the figures that it prints; format medians with their range."""

from __future__ import annotations

import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Sequence

LIMIT_SECONDS = 500  # for one run, which may hang


def values_in(text: str) -> dict[str, list[float]]:
    """Return all values of `name=value` in a text, by name."""
    values = defaultdict(list)
    for name, value in re.findall(r"(\w+)=([\d.]+)", text):
        values[name].append(float(value))
    return values


def printed(command: Sequence[str]) -> dict[str, list[float]]:
    """Return everything that the workers of a command print as `name=value`, by name.

    The exit status does not matter, since gloo sometimes aborts a worker that exits.
    """
    return values_in(_run(command)[0])


def figures(command: Sequence[str]) -> dict[str, float]:
    """Return the same as means over workers. Raises `SystemExit` if the command prints nothing."""
    output, errors = _run(command)
    means = {name: statistics.fmean(values) for name, values in values_in(output).items()}
    if not means:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors}")
    return means


def _run(command: Sequence[str]) -> tuple[str, str]:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            return process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # launchers then end their workers
            raise SystemExit(
                f"{' '.join(command)} still ran after {LIMIT_SECONDS} seconds"
            ) from None


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return a median with its range, with `digits` decimal places."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{statistics.median(values):8.{digits}f} ({low} to {high})"
