"""Time of the page's server to read a record of many points, and to answer for a curve.

usage: python -m benchmarks.watching [--points 1000000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import spread
from samestep.watch.runs import open_views

SMOOTH, SPAN = 0.9, 900


def write(directory: Path, points: int) -> float:
    """Write the record of a run with one scalar; return its megabytes."""
    file = directory / "events.jsonl"
    with file.open("w") as lines:
        started = {
            "time": 0.0,
            "event": "started",
            "step": 0,
            "lanes": 8,
            "workers": [{"rank": 0, "host": "here", "pid": 1}],
            "config": {},
        }
        lines.write(f"{json.dumps(started)}\n")
        for step in range(points):
            value = 1 / (step + 1)
            parts = {
                "values": {"loss": value},
                "low": {"loss": 0.9 * value},
                "high": {"loss": 1.1 * value},
            }
            lines.write(
                json.dumps(
                    {"time": 0.01 * step, "event": "scalars", "step": step, "epoch": 0, **parts}
                )
                + "\n"
            )
    return file.stat().st_size / 1e6


def measure(directory: Path, points: int) -> dict[str, float]:
    """Return the seconds of each request, by name."""
    (view,) = open_views(directory).values()
    middle = points // 2
    asked: dict[str, Callable[[], object]] = {
        "read": view.refresh,
        "the whole curve": lambda: view.curve("loss"),
        "smoothed, the first time": lambda: view.curve("loss", smooth=SMOOTH),
        "smoothed again": lambda: view.curve("loss", smooth=SMOOTH),
        f"{SPAN + 1} points, exact": lambda: view.curve("loss", start=middle, end=middle + SPAN),
    }
    found = {}
    for what, ask in asked.items():
        began = time.perf_counter()
        ask()
        found[what] = time.perf_counter() - began
    return found


def main() -> None:
    """Measure, and print medians with their range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--points", type=int, default=1_000_000, help="points of the curve (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    options = parser.parse_args()
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"{options.points} points, {write(Path(folder), options.points):.0f} MB, "
            f"{options.rounds} rounds; milliseconds"
        )
        for _ in range(options.rounds):
            for what, seconds in measure(Path(folder), options.points).items():
                found[what].append(1000 * seconds)
    for what, milliseconds in found.items():
        print(f"  {what:26} {spread(milliseconds)}")


if __name__ == "__main__":
    main()
