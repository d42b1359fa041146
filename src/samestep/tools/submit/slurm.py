"""`samestep submit slurm`: a batch script whose job goes back to the queue when it was stopped with a snapshot."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.errors import ConfigError, LaunchError
from samestep.tools.submit.training import (
    PRINTED,
    STOPPED,
    Training,
    add_training_arguments,
    check_matches,
    hand_over,
    training_of,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

SUMMARY: Final = "write an sbatch script that requeues itself after a snapshot, and submit it"
TIME: Final = r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "%(prog)s --dir DIR [--OPTION VALUE ...] [-m] script ..."
    parser.epilog = "Workers start in this directory. They get SIGTERM --grace-period seconds (default here: 120) before the time limit."
    parser.add_argument(
        "--time", metavar="LIMIT", help="time limit, such as 90 (minutes), 8:00:00 or 2-12:00:00"
    )
    parser.add_argument("--partition", help="partition to run in")
    parser.add_argument("--account", help="account to charge")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="further option of sbatch, as in --sbatch=--qos=high",
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="line of shell before the workers start, as in --setup 'source venv/bin/activate'; python is then looked up after it "
        "(default: the Python that runs this command)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_const",
        const=PRINTED,
        dest="output",
        help="print the script and do not submit it",
    )
    add_training_arguments(parser, "node")


def main(arguments: argparse.Namespace) -> int:
    """Write the script, or submit it and print the job's id."""
    training = training_of(arguments)
    script = batch_script(training, arguments)
    if arguments.output != PRINTED:
        _make_directory(training)
    if hand_over(script, arguments.output):
        return 0
    print(submit(script))
    return 0


def _make_directory(training: Training) -> None:
    """Make the run's directory, to which Slurm writes what the job prints, and which it does not make."""
    try:
        Path(training.directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--dir {training.directory} was given, and cannot be made: {error}"
        ) from error


def submit(script: str) -> str:
    """Hand a script to sbatch and return the job's id. Raises `LaunchError` with what sbatch said."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            "sbatch was not found; submit from a machine that has it, or write the script to a file by --output"
        )
    done = subprocess.run(
        [sbatch, "--parsable"], input=script, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LaunchError(f"sbatch ended with status {done.returncode}: {done.stderr.strip()}")
    sys.stderr.write(done.stderr)
    return done.stdout.strip().partition(";")[0]


def batch_script(training: Training, arguments: argparse.Namespace) -> str:
    """Return the text of the script. Raises `ConfigError` for what Slurm would not take."""
    check_matches(
        "--time", arguments.time, TIME, "minutes, or a time such as 8:00:00 or 2-12:00:00"
    )
    check_matches("--memory", training.memory, r"\d+[KMGT]?", "a size such as 64G")
    check_matches(
        "--gpus", arguments.gpus, r"([\w.-]+:)?\d+", "a number, or kind and number such as a100:4"
    )
    python = "python" if arguments.setup else sys.executable
    # srun takes none over from sbatch
    cpus = (
        [] if training.cpus_per_worker is None else [f"--cpus-per-task={training.cpus_per_worker}"]
    )
    environment = {**training.environment, "SAMESTEP_DIR": _absolute(training)}
    lines = [
        "#!/bin/bash",
        *(_directive(option) for option in _options(training, arguments, cpus)),
        "",
        *arguments.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        "# A job that was requeued goes on, however it began.",
        '[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || export SAMESTEP_RESUME=auto',
        "",
        "# One worker ends before another whose part of the snapshot takes longer: that must not end the other.",
        shlex.join(
            ["srun", "--kill-on-bad-exit=0", "--wait=0", *cpus, python, *training.arguments]
        ),
        "status=$?",
        f"# {STOPPED} is how workers end that took a snapshot on SIGTERM.",
        f'[ "$status" -ne {STOPPED} ] || scontrol requeue "$SLURM_JOB_ID"',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _options(training: Training, arguments: argparse.Namespace, cpus: list[str]) -> Iterator[str]:
    """Yield the options of sbatch."""
    yield f"--job-name={training.name}"
    yield f"--nodes={training.nodes}"
    yield f"--ntasks-per-node={training.workers_per_node}"
    yield from cpus
    given = {
        # and not a task: workers of a node reach each other's GPUs
        "gpus-per-node": arguments.gpus,
        "mem": training.memory,
        "time": arguments.time,
        "partition": arguments.partition,
        "account": arguments.account,
    }
    yield from (f"--{name}={value}" for name, value in given.items() if value is not None)
    yield f"--chdir={Path.cwd()}"
    yield f"--output={_absolute(training).replace('%', '%%')}/slurm-%j.out"
    yield "--open-mode=append"
    yield "--requeue"
    # to workers; with B: it would end this script instead
    yield f"--signal=TERM@{training.grace_seconds}"
    yield from arguments.sbatch


def _directive(option: str) -> str:
    """Write an option as a line that sbatch reads: it knows quotes, but takes a backslash for an escape within them too."""
    if "\\" in option or not option.isprintable():
        raise ConfigError(
            f"{option!r} was given to sbatch; expected no backslash, line break or other control character"
        )
    return f"#SBATCH {shlex.quote(option)}"


def _absolute(training: Training) -> str:
    return str(Path(training.directory).absolute())
