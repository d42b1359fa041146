"""The command line: `samestep COMMAND …`. Commands are imported when they are called, so help comes at once."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, NoReturn

from samestep.errors import ConfigError, SamestepError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Command:
    """A sub-command: `module` has add_arguments(parser) and main(arguments), which returns the exit status."""

    module: str
    summary: str


COMMANDS: Final = {
    "run": Command(
        "samestep.launch.command", "start workers on this machine and run a script in each"
    ),
    "verify": Command(
        "samestep.tools.verify",
        "run a script at several numbers of workers and compare every bit after each step",
    ),
    "watch": Command("samestep.watch.command", "serve a page that shows runs as they go"),
    "report": Command(
        "samestep.watch.report",
        "write a run's curves, tables and images into one HTML file that stands alone",
    ),
    "plot": Command("samestep.watch.plot", "draw runs' curves into a picture"),
    "scale": Command(
        "samestep.tools.scale.command",
        "measure a script at several numbers of workers, and say what limits it and what to expect of more",
    ),
    "doctor": Command(
        "samestep.tools.doctor",
        "tell what this machine has, measure it, and say what to change",
    ),
    "submit": Command(
        "samestep.tools.submit",
        "write a job of Slurm or Kubernetes that goes on after preemption, and submit it",
    ),
    "snapshots": Command(
        "samestep.tools.snapshots", "list, check and export the snapshots of a run"
    ),
}
EXIT_FAILURE: Final = 1
EXIT_WRONG_USE: Final = 2  # as argparse has it
EXIT_INTERRUPTED: Final = 130  # as a shell reports SIGINT
EXIT_BROKEN_PIPE: Final = 141  # and SIGPIPE: whoever reads the output has seen enough


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's arguments) names; return the exit status."""
    given = _parser().parse_args(argv)
    command = COMMANDS[given.command]
    module = import_module(command.module)
    parser = argparse.ArgumentParser(
        prog=f"samestep {given.command}",
        description=f"{_sentence(command.summary)}.",
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    try:
        status: int = module.main(parser.parse_args(given.arguments))
    except SamestepError as error:
        # to nobody where it is closed
        print(f"samestep: error: {error}", file=sys.stderr)  # noqa: T201
        return _status(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _status(error: SamestepError) -> int:
    if isinstance(error, WorkerError):
        return error.status
    return EXIT_WRONG_USE if isinstance(error, ConfigError) else EXIT_FAILURE


def main_and_exit() -> NoReturn:
    """Run the command and end the process at once: taking torch apart, as Python does at its end, takes half a second."""
    try:
        status = main()
        # they are run, and only what comes after them is left out
        atexit._run_exitfuncs()  # noqa: SLF001
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the file was closed
            stream.flush()
    except BrokenPipeError:
        status = EXIT_BROKEN_PIPE
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="samestep",
        description="Train a PyTorch model on any number of workers: every number of workers takes the same step, bit for bit.",
        epilog="\n".join(
            [
                "commands:",
                *(f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()),
                "",
                "samestep COMMAND --help tells more.",
            ],
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"samestep {_version()}")
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    return parser


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:]


def _version() -> str:
    try:
        return version("samestep")
    except PackageNotFoundError:
        return "(not installed)"
