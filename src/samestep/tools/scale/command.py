"""`samestep scale`: measure a job at several numbers of workers, say what limits it, and what to expect of more."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.errors import ConfigError, LaunchError

# Whatever knows of tensors is imported where it is needed, so that help comes at once.
if TYPE_CHECKING:
    import argparse

    from samestep.tools.scale.advice import Memory
    from samestep.tools.scale.model import Network
    from samestep.tools.scale.study import Study
    from samestep.tools.scale.trials import Trial, Trials

DEFAULT_STEPS: Final = 20
DEFAULT_REPEATS: Final = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "-n",
        "--workers",
        default="1,2",
        metavar="N,N,…",
        help="numbers of workers to measure (default: 1,2)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        help=f"steps of a run (default: {DEFAULT_STEPS})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=DEFAULT_REPEATS,
        help=f"runs a size, in turns (default: {DEFAULT_REPEATS})",
    )
    parser.add_argument(
        "--lanes",
        type=int,
        help="lanes of every run (default: the script's own, or the largest number of workers)",
    )
    network = parser.add_argument_group(
        "the network to be (default: this machine's loopback, measured)"
    )
    network.add_argument(
        "--latency", type=float, metavar="S", help="seconds a message between hosts, as in 20e-6"
    )
    network.add_argument(
        "--bandwidth",
        type=float,
        metavar="B",
        help="bytes a second of a host's link, as in 12.5e9 for 100 Gbit/s",
    )
    network.add_argument(
        "--workers-per-host",
        type=int,
        metavar="N",
        help="workers that share a host and its link (default: the most measured)",
    )
    advice = parser.add_argument_group("the learning rate of larger batches")
    advice.add_argument("--learning-rate", type=float, metavar="RATE", help="the one of now")
    advice.add_argument(
        "--batch-size-now",
        type=int,
        metavar="N",
        help="the global batch size it belongs to (default: the job's)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="draw a picture: .svg, .png or .pdf"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument(
        "script", help="the training script; it must track its model and optimizer (run.track)"
    )
    parser.add_argument("arguments", nargs="...", help="the script's own arguments")


def main(options: argparse.Namespace) -> int:
    """Measure, print, draw; returns 0. Raises `ConfigError`, `LaunchError` where the script fails, and `RecordError`."""
    sizes = _sizes(options.workers)
    _check(options, max(sizes))
    study = _study(options, sizes)
    from samestep.tools.scale.text import lines_of

    sys.stdout.write("\n".join([*lines_of(study), ""]))
    if options.json is not None:
        options.json.write_text(json.dumps(study.to_json(), indent=1) + "\n")
    if options.out is not None:
        from samestep.tools.scale.picture import draw

        draw(study, options.out)
    return 0


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,3}", part) for part in parts):
        raise ConfigError(f"-n {text} was given; expected numbers of workers such as 1,2,4")
    return sorted(set(map(int, parts)))


def _check(options: argparse.Namespace, most_workers: int) -> None:
    """Raise `ConfigError` for values that cannot be used, before anything is measured."""
    from samestep.tools.scale.picture import check_can_draw
    from samestep.tools.scale.timing import FEWEST_RECORDED

    if options.steps < FEWEST_RECORDED:
        raise ConfigError(
            f"--steps {options.steps} was given; expected at least {FEWEST_RECORDED}, since the first and last are left out"
        )
    for name in ("repeats", "lanes", "workers_per_host", "batch_size_now"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} was given; expected at least 1")
    if options.lanes is not None and options.lanes < most_workers:
        raise ConfigError(
            f"--lanes {options.lanes} was given with -n {most_workers}; expected at least a lane a worker"
        )
    for name in ("latency", "bandwidth", "learning_rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} was given; expected a number above 0"
            )
    if (options.latency is None) != (options.bandwidth is None):
        raise ConfigError(
            "one of --latency and --bandwidth was given; expected both, or neither for this machine's loopback"
        )
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(
            f"--json {options.json} was given, and there is no directory {options.json.parent}; make it, or give another"
        )
    if options.out is not None:
        check_can_draw(options.out)


def _study(options: argparse.Namespace, sizes: list[int]) -> Study:
    from samestep.cgroups import available_bytes
    from samestep.tools.scale.study import Setting, Study
    from samestep.tools.scale.trials import Trials

    load = os.getloadavg()[0]
    trials = Trials([options.script, *options.arguments], options.steps, options.lanes)
    # The largest first: where the script leaves lanes open, it settles them for all.
    rounds = [[trials.run(workers) for workers in reversed(sizes)] for _ in range(options.repeats)]
    job = rounds[0][0].job
    timings = {
        some[0].workers: [trial.timing for trial in some] for some in zip(*rounds, strict=True)
    }
    memory = _memory(trials, rounds[0][-1])
    setting = Setting(
        _room(job.device, job.threads),
        load,
        available_bytes() or 0,
        options.learning_rate,
        options.batch_size_now,
    )
    return Study(
        job,
        timings,
        _network(options, job.nbytes, sizes),
        options.latency is not None,
        memory,
        setting,
    )


def _memory(trials: Trials, trial: Trial) -> Memory | None:
    """Measure once more with twice the lanes, where there are samples for them: what a smaller lane batch saves."""
    from samestep.tools.scale.advice import memory_of

    lanes, batch_size = 2 * trial.job.lanes, trial.job.batch_size
    if batch_size is None or batch_size < lanes or trial.job.device != "cpu":
        return None
    try:
        return memory_of(trial, trials.run(trial.workers, lanes))
    # the script takes no other lanes; what was measured with its own stands
    except LaunchError as error:
        sys.stderr.write(f"memory is left out, since with {lanes} lanes {error}\n")
        return None


def _network(options: argparse.Namespace, nbytes: int, sizes: list[int]) -> Network:
    from samestep.tools.scale.links import measure_links
    from samestep.tools.scale.model import Link, Network

    sys.stderr.write("measuring links …\n")
    memory, between = measure_links(nbytes)
    if options.latency is not None:
        between = Link(options.latency, options.bandwidth)
    return Network(memory, between, options.workers_per_host or max(sizes))


def _room(device: str, threads: int) -> int:
    """Return for how many workers this machine has a GPU, or a core for each of their threads."""
    import torch

    from samestep.tools.doctor.resources import usable_cores
    from samestep.tools.doctor.system import System

    if device == "cuda":
        return torch.cuda.device_count()
    return max(1, int((usable_cores(System()) or 1) // threads))
