"""`samestep submit slurm`: an sbatch script; and the arguments that Kubernetes shares."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from samestep.config import PREFIX, TOKEN, merge
from samestep.errors import ConfigError, LaunchError
from samestep.host import SIGNALED
from samestep.launch.local import add_options, given_options

SUMMARY: Final = "write an sbatch script that requeues itself after a snapshot, and submit it"
TIME: Final = r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}"
GRACE_SECONDS: Final = 120
MOST_GRACE_SECONDS: Final = 65535  # the limit of sbatch --signal
PRINTED: Final = "-"  # instead of a file name
STOPPED: Final = SIGNALED + signal.SIGTERM  # exit status after a snapshot on SIGTERM


@dataclass(frozen=True)
class Training:
    """A script and its workers: `environment` has the options of the run, `arguments` Python's."""

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
    """Add the arguments that Slurm and Kubernetes share; `node` is "node" or "pod"."""
    add = parser.add_argument
    add("--name", help="name of the job (default: the name of the script)")
    add("--nodes", type=int, default=1, metavar="N", help=f"{node}s (default: 1)")
    workers = f"workers per {node} (default: 1)"
    add("-n", "--workers", type=int, default=1, metavar="N", help=workers)
    add("--gpus", metavar="N", help=f"GPUs per {node}")
    add("--cpus", type=int, metavar="N", help="CPUs per worker and its loader processes")
    add("--memory", metavar="SIZE", help=f"memory per {node}")
    add("--output", metavar="FILE", help="write the job to FILE instead of submitting it")
    add("-m", "--module", action="store_true", help="treat script as a module name")
    add_options(parser)
    add("script", help="a Python script, or a module with -m")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def training_of(arguments: argparse.Namespace) -> Training:
    """Return the job that the command line describes. Raises `ConfigError` naming a wrong flag."""
    for flag in ("nodes", "workers", "cpus"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} must be at least 1, got {value}")
    options = given_options(arguments)
    if arguments.dir is None:
        raise ConfigError("--dir is required: a directory that all nodes share, to resume from")
    grace = merge({"grace_period": GRACE_SECONDS, **options}, {}).grace_period
    if not 0 < grace <= MOST_GRACE_SECONDS:
        expected = f"above 0 and at most {MOST_GRACE_SECONDS} seconds"
        raise ConfigError(f"--grace-period must be {expected}, got {arguments.grace_period}")
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
        environment={f"{PREFIX}GRACE_PERIOD": str(GRACE_SECONDS), **texts},
        arguments=(*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments),
    )


def check_matches(flag: str, value: str | None, pattern: str, expected: str) -> None:
    """Raise `ConfigError` if a value is given and does not match the pattern."""
    if value is not None and not re.fullmatch(pattern, value):
        raise ConfigError(f"{flag} must be {expected}, got {value!r}")


def write_job(text: str, output: str | None, *, private: bool = False) -> None:
    """Write a job to a file, or to the terminal if the file is `PRINTED`.

    With `private`, only its owner may read the file, because it has a secret.
    """
    if output == PRINTED:
        sys.stdout.write(text)
    elif output is not None:
        try:
            mode = 0o600 if private else 0o666  # less the umask
            with open(output, "w", opener=partial(os.open, mode=mode)) as file:
                if private:
                    os.fchmod(file.fileno(), mode)  # of a file that existed before
                file.write(text)
        except OSError as error:
            raise ConfigError(f"cannot write --output {output}: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep submit slurm` to its parser."""
    parser.usage = "%(prog)s --dir DIR [--OPTION VALUE ...] [-m] script ..."
    parser.epilog = (
        "Workers start in the current directory. They get SIGTERM --grace-period seconds "
        f"(default here: {GRACE_SECONDS}) before the time limit."
    )
    add = parser.add_argument
    add("--time", metavar="LIMIT", help="time limit: minutes, 8:00:00 or 2-12:00:00")
    add("--partition", help="partition in which the job runs")
    add("--account", help="account that the job is charged to")
    sbatch = "any other option of sbatch, as in --sbatch=--qos=high; may be repeated"
    add("--sbatch", action="append", default=[], metavar="OPTION", help=sbatch)
    setup = (
        "shell command to run before the workers start, as in --setup 'source venv/bin/activate'; "
        "may be repeated. Workers then use the Python in PATH (default: the Python that runs this "
        "command)"
    )
    add("--setup", action="append", default=[], metavar="LINE", help=setup)
    dry_run = "print the script instead of submitting it"
    add("--dry-run", action="store_const", const=PRINTED, dest="output", help=dry_run)
    add_training_arguments(parser, "node")


def main(arguments: argparse.Namespace) -> int:
    """Write the script, or submit it and print the id of the job."""
    training = training_of(arguments)
    script = batch_script(training, arguments)
    if arguments.output != PRINTED:
        try:  # Slurm writes the job's output to this directory, but does not create it
            Path(training.directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create --dir {training.directory}: {error}") from error
    if arguments.output is None:
        print(submit(script))
    else:
        write_job(script, arguments.output)
    return 0


def find_program(name: str) -> str:
    """Return the path of the program that submits jobs. Raises `LaunchError` if it is missing."""
    if path := shutil.which(name):
        return path
    remedy = f"pass --output FILE, and submit the file where {name} is"
    raise LaunchError(f"{name} not found in PATH; {remedy}")


def submit(script: str) -> str:
    """Pass a script to sbatch and return the job's id. Raises `LaunchError` if sbatch fails."""
    command = [find_program("sbatch"), "--parsable"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaunchError(f"sbatch exited with status {done.returncode}: {done.stderr.strip()}")
    sys.stderr.write(done.stderr)
    return done.stdout.strip().partition(";")[0]


def batch_script(training: Training, arguments: argparse.Namespace) -> str:
    """Return the text of the script. Raises `ConfigError` for values that Slurm refuses."""
    gpus, cpus = arguments.gpus, training.cpus_per_worker
    check_matches("--time", arguments.time, TIME, "minutes, or a time such as 2-12:00:00")
    check_matches("--memory", training.memory, r"\d+[KMGT]?", "a size such as 64G")
    check_matches("--gpus", gpus, r"([\w.-]+:)?\d+", "a number, or KIND:NUMBER such as a100:4")
    directory = str(Path(training.directory).absolute())
    options = {
        "job-name": training.name,
        "nodes": training.nodes,
        "ntasks-per-node": training.workers_per_node,
        "cpus-per-task": cpus,
        "gpus-per-node": gpus,  # not per task: workers of a node access each other's GPUs
        "mem": training.memory,
        "time": arguments.time,
        "partition": arguments.partition,
        "account": arguments.account,
        "chdir": Path.cwd(),
        "output": f"{directory.replace('%', '%%')}/slurm-%j.out",
        "open-mode": "append",
        "signal": f"TERM@{training.grace_seconds}",  # to workers; B: would signal only the script
    }
    flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
    environment = {**training.environment, "SAMESTEP_DIR": directory}
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=0"]
    srun += [] if cpus is None else [f"--cpus-per-task={cpus}"]  # srun ignores that of sbatch
    srun += ["python" if arguments.setup else sys.executable, *training.arguments]
    lines = [
        "#!/bin/bash",
        *map(_directive, [*flags, "--requeue", *arguments.sbatch]),
        "",
        *arguments.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        "# Workers sign the objects that they exchange with a token that only this job has.",
        f"export {TOKEN}=$(head -c 32 /dev/urandom | od -A n -t x1 | tr -d ' \\n')",
        "# A requeued job resumes, whatever --resume was when it started.",
        '[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || export SAMESTEP_RESUME=auto',
        "",
        "# A worker that exits must not stop others that still write their part of the snapshot.",
        shlex.join(srun),
        "status=$?",
        f"# Workers exit with {STOPPED} after a snapshot on SIGTERM.",
        f'[ "$status" -ne {STOPPED} ] || scontrol requeue "$SLURM_JOB_ID"',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _directive(option: str) -> str:
    """Return the line for an option. In sbatch, a backslash is an escape, even in quotes."""
    if "\\" in option or not option.isprintable():
        raise ConfigError(f"sbatch accepts no backslash or control character, got {option!r}")
    return f"#SBATCH {shlex.quote(option)}"
