"""The command `samestep scale`: its arguments, and the trials that it runs."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.errors import ConfigError, LaunchError

if TYPE_CHECKING:  # --help must not load torch
    from samestep.tools.scale.study import Study
    from samestep.tools.scale.trials import MemoryModel, Trial, TrialRunner

PICTURE_SUFFIXES: Final = (".svg", ".png", ".pdf")


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
    add("--out", type=Path, metavar="FILE", help="write a picture (.svg, .png or .pdf)")
    add("--json", type=Path, metavar="FILE", help="write all results as JSON")
    add("script", help="training script; it must track its model and optimizer (run.track)")
    add("arguments", nargs="...", help="arguments of the script")

    title = "network to predict for (default: this machine's loopback, measured)"
    add = parser.add_argument_group(title).add_argument
    latency = "seconds per message between hosts, for example 20e-6"
    add("--latency", type=float, metavar="SECONDS", help=latency)
    bandwidth = "bytes per second of a host's link, for example 12.5e9 for 100 Gbit/s"
    add("--bandwidth", type=float, metavar="BYTES", help=bandwidth)
    per_host = "workers that share a host and its link (default: the largest worker count)"
    add("--workers-per-host", type=int, metavar="N", help=per_host)

    add = parser.add_argument_group("learning rate for larger batches").add_argument
    add("--learning-rate", type=float, metavar="RATE", help="the current learning rate")
    batch_size = "the global batch size of that learning rate (default: that of the script)"
    add("--batch-size-now", type=int, metavar="N", help=batch_size)


def main(options: argparse.Namespace) -> int:
    """Measure, print, draw; return 0. Raises `ConfigError`, `LaunchError` and `RecordError`."""
    parts = [part.strip() for part in options.workers.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,3}", part) for part in parts):
        raise ConfigError(f"-n: expected worker counts such as 1,2,4, got {options.workers}")
    sizes = sorted(set(map(int, parts)))
    _check(options, max(sizes))
    study = _measure(options, sizes)
    from samestep.tools.scale.report import draw, report_lines

    sys.stdout.write("\n".join([*report_lines(study), ""]))
    if options.json is not None:
        options.json.write_text(json.dumps(study.to_json(), indent=1) + "\n")
    if options.out is not None:
        draw(study, options.out)
    return 0


def _check(options: argparse.Namespace, most_workers: int) -> None:
    """Raise `ConfigError` for unusable values, before anything is measured."""
    from samestep.tools.scale.model import FEWEST_RECORDED

    if options.steps < FEWEST_RECORDED:
        raise ConfigError(
            f"--steps must be at least {FEWEST_RECORDED}, because the first and last are left out, "
            f"got {options.steps}"
        )
    numbers = ("repeats", "lanes", "workers_per_host", "batch_size_now", "latency", "bandwidth")
    for name in (*numbers, "learning_rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be a positive number, got {value}")
    if options.lanes is not None and options.lanes < most_workers:
        raise ConfigError(
            f"--lanes must be at least the number of workers ({most_workers}), got {options.lanes}"
        )
    if (options.latency is None) != (options.bandwidth is None):
        raise ConfigError("expected both --latency and --bandwidth, or neither, got one of them")
    if options.out is not None:
        check_can_draw(options.out)
    for flag, path in (("--json", options.json), ("--out", options.out)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag}: the directory {path.parent} does not exist; create it")


def check_can_draw(path: Path) -> None:
    """Raise `ConfigError` unless a picture can be drawn to a file with this name."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        suffixes = ", ".join(PICTURE_SUFFIXES)
        raise ConfigError(f"--out: expected a name that ends in one of {suffixes}, got {path}")
    try:
        import matplotlib as mpl  # noqa: F401  an optional dependency
    except ImportError:
        raise ConfigError('--out needs matplotlib: pip install "samestep[plot]"') from None


def _measure(options: argparse.Namespace, sizes: list[int]) -> Study:
    from samestep.host import available_bytes
    from samestep.tools.scale.network import LinkModel, Network, measure_links
    from samestep.tools.scale.study import Machine, Study
    from samestep.tools.scale.trials import TrialRunner

    load = os.getloadavg()[0]
    runner = TrialRunner([options.script, *options.arguments], options.steps, options.lanes)
    # largest first: if the script sets no lanes, its worker count sets them for all runs
    rounds = [[runner.run(workers) for workers in reversed(sizes)] for _ in range(options.repeats)]
    workload = rounds[0][0].workload
    by_size = [[trial.timing for trial in trials] for trials in zip(*rounds, strict=True)]
    timings = dict(zip(reversed(sizes), by_size, strict=True))
    memory = _measure_memory(runner, rounds[0][-1])
    machine = Machine(_capacity(workload.device, workload.threads), load, available_bytes() or 0)
    sys.stderr.write("measuring links …\n")
    memory_link, between = measure_links(workload.nbytes)
    if is_given := options.latency is not None:
        between = LinkModel(options.latency, options.bandwidth)
    network = Network(memory_link, between, options.workers_per_host or max(sizes))
    rate, batch_size = options.learning_rate, options.batch_size_now
    return Study(workload, timings, network, is_given, memory, machine, rate, batch_size)


def _measure_memory(runner: TrialRunner, trial: Trial) -> MemoryModel | None:
    """Repeat a trial with twice the lanes, if the batch is large enough, and compare."""
    from samestep.tools.scale.trials import fit_memory

    workload, lanes = trial.workload, 2 * trial.workload.lanes
    if workload.device != "cpu" or (workload.batch_size or 0) < lanes:
        return None
    try:
        return fit_memory(trial, runner.run(trial.workers, lanes))
    except LaunchError as error:  # the script requires its own lanes; all else is measured
        sys.stderr.write(f"memory was not measured: with {lanes} lanes: {error}\n")
        return None


def _capacity(device: str, threads: int) -> int:
    """Return the number of workers for which this machine has a GPU, or cores for their threads."""
    import torch

    from samestep.tools.doctor.resources import usable_cores
    from samestep.tools.doctor.system import System

    if device == "cuda":
        return torch.cuda.device_count()
    return max(1, int((usable_cores(System()) or 1) // threads))
