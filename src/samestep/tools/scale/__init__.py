"""The command `samestep scale`: its arguments, and the trials that it runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.errors import ConfigError
from samestep.launch.local import check_script

if TYPE_CHECKING:  # --help must not load torch
    from samestep.tools.scale.study import Study


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep scale` to its parser."""
    add = parser.add_argument
    workers = "worker counts to measure (default: 1,2)"
    add("-n", "--workers", default="1,2", metavar="N,N,…", help=workers)
    steps = "steps per run (default: 20)"
    add("--steps", type=int, default=20, metavar="N", help=steps)
    repeats = "runs per worker count, interleaved (default: 3)"
    add("--repeats", type=int, default=3, metavar="N", help=repeats)
    lanes = "lanes of every run (default: set by the script, or the largest worker count)"
    add("--lanes", type=int, metavar="N", help=lanes)
    add("--json", type=Path, metavar="FILE", help="write all results as JSON")
    add("script", help="training script")
    add("arguments", nargs="...", help="arguments of the script")


def main(options: argparse.Namespace) -> int:
    """Measure and print; return 0. Raises `ConfigError`, `LaunchError` and `RecordError`."""
    parts = [part.strip() for part in options.workers.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,3}", part) for part in parts):
        raise ConfigError(f"-n: expected worker counts such as 1,2,4, got {options.workers}")
    sizes = sorted(set(map(int, parts)))
    _check(options, max(sizes))
    study = _measure(options, sizes)
    from samestep.tools.scale.report import report_lines

    sys.stdout.write("\n".join([*report_lines(study), ""]))
    if options.json is not None:
        options.json.write_text(json.dumps(study.to_json(), indent=1) + "\n")
    return 0


def _check(options: argparse.Namespace, most_workers: int) -> None:
    """Raise `ConfigError` for unusable values, before anything is measured."""
    from samestep.tools.scale.timing import FEWEST_RECORDED

    check_script(options.script)
    if options.steps < FEWEST_RECORDED:
        raise ConfigError(
            f"--steps must be at least {FEWEST_RECORDED}, because the first and last are left out, "
            f"got {options.steps}"
        )
    for name in ("repeats", "lanes"):
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name} must be a positive number, got {count}")
    if options.lanes is not None and options.lanes < most_workers:
        raise ConfigError(
            f"--lanes must be at least the number of workers ({most_workers}), got {options.lanes}"
        )
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"--json: the directory {options.json.parent} does not exist; create it")


def _measure(options: argparse.Namespace, sizes: list[int]) -> Study:
    from samestep.tools.scale.study import Study
    from samestep.tools.scale.timing import TrialRunner

    load = os.getloadavg()[0]
    runner = TrialRunner([options.script, *options.arguments], options.steps, options.lanes)
    # largest first: if the script sets no lanes, its worker count sets them for all runs
    rounds = [[runner.run(workers) for workers in reversed(sizes)] for _ in range(options.repeats)]
    timings = dict(zip(reversed(sizes), zip(*rounds, strict=True), strict=True))
    capacity = _capacity(runner.workload.device, runner.workload.threads)
    return Study(runner.workload, timings, capacity, load)


def _capacity(device: str, threads: int) -> int:
    """Return the number of workers for which this machine has a GPU, or cores for their threads."""
    from samestep.host import usable_cores
    from samestep.launch.local import count_gpus

    return count_gpus() if device == "cuda" else max(1, usable_cores() // threads)
