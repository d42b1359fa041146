"""What is trained on a cluster and with what, as the command line says for any of them."""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.config import PREFIX, merge
from samestep.errors import ConfigError
from samestep.launch.command import add_options, given_options

if TYPE_CHECKING:
    from collections.abc import Mapping

GRACE_SECONDS: Final = 120
MOST_GRACE_SECONDS: Final = 65535  # as sbatch --signal takes them
PRINTED: Final = "-"  # in place of a file
STOPPED: Final = 128 + 15  # exit status of a worker that took a snapshot on SIGTERM


@dataclass(frozen=True)
class Training:
    """A script and its workers. `environment` holds the options of the run, `arguments` are those of Python."""

    name: str
    nodes: int
    workers_per_node: int
    cpus_per_worker: int | None
    memory: str | None
    directory: str
    grace_seconds: int
    environment: Mapping[str, str]
    arguments: tuple[str, ...]


def add_training_arguments(parser: argparse.ArgumentParser, node: str) -> None:
    """Add what all clusters are told; `node` is what one of them calls the place of some workers."""
    parser.add_argument("--name", help="name of the job (default: the script's)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help=f"{node}s (default: 1)")
    parser.add_argument(
        "-n", "--workers", type=int, default=1, metavar="N", help=f"workers a {node} (default: 1)"
    )
    parser.add_argument("--gpus", metavar="N", help=f"GPUs a {node}")
    parser.add_argument(
        "--cpus", type=int, metavar="N", help="CPUs a worker; its loader processes need some"
    )
    parser.add_argument("--memory", metavar="SIZE", help=f"memory a {node}")
    parser.add_argument(
        "--output", metavar="FILE", help="write the job to a file and do not submit it"
    )
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="the script is the name of a module, as in python -m",
    )
    add_options(parser)
    parser.add_argument("script", help="a Python script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def training_of(arguments: argparse.Namespace) -> Training:
    """Return what the command line asks for. Raises `ConfigError` that names the flag."""
    for flag in ("nodes", "workers", "cpus"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} {value} was given; expected at least 1")
    options = given_options(arguments)
    if arguments.dir is None:
        raise ConfigError(
            "no --dir was given; expected a directory that all nodes see, from which a job that was stopped goes on"
        )
    grace = merge({"grace_period": GRACE_SECONDS, **options}, {}).grace_period
    if not 0 < grace <= MOST_GRACE_SECONDS:
        raise ConfigError(
            f"--grace-period {arguments.grace_period} was given; expected seconds above 0 and at most {MOST_GRACE_SECONDS}"
        )
    texts = {f"{PREFIX}{name.upper()}": str(getattr(arguments, name)) for name in options}
    stem = arguments.script.rpartition(".")[2] if arguments.module else Path(arguments.script).stem
    return Training(
        name=arguments.name or re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "train",
        nodes=arguments.nodes,
        workers_per_node=arguments.workers,
        cpus_per_worker=arguments.cpus,
        memory=arguments.memory,
        directory=arguments.dir,
        grace_seconds=math.ceil(grace),
        environment={f"{PREFIX}GRACE": str(GRACE_SECONDS), **texts},
        arguments=(*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments),
    )


def check_matches(flag: str, value: str | None, pattern: str, expected: str) -> None:
    """Raise `ConfigError` for a value that was given and has another form than `expected` says."""
    if value is not None and not re.fullmatch(pattern, value):
        raise ConfigError(f"{flag} {value!r} was given; expected {expected}")


def hand_over(text: str, output: str | None) -> bool:
    """Write a job to a file, or for `PRINTED` to the terminal; tell whether that was asked for, and no more is to be done."""
    if output == PRINTED:
        sys.stdout.write(text)
    elif output is not None:
        try:
            Path(output).write_text(text)
        except OSError as error:
            raise ConfigError(
                f"--output {output} was given, and cannot be written: {error}"
            ) from error
    return output is not None
