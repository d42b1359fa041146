"""The command line: `samestep COMMAND …`. A command is imported when it is called."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple, NoReturn

from samestep.errors import ConfigError, SamestepError, WorkerError


class Command(NamedTuple):
    """A command: `module` has add_arguments(parser), and main(arguments) -> exit status."""

    module: str
    summary: str


COMMANDS: Final = {
    "run": Command("samestep.launch.command", "run a script with one or more workers"),
    "verify": Command("samestep.tools.verify", "check that any worker count gives the same steps"),
    "watch": Command("samestep.watch.command", "serve a web page that shows live runs"),
    "report": Command("samestep.watch.report", "write curves, tables and images to one HTML file"),
    "plot": Command("samestep.watch.plot", "draw the curves of runs as an image"),
    "scale": Command(
        "samestep.tools.scale.cli", "measure a script's scaling and predict larger runs"
    ),
    "doctor": Command("samestep.tools.doctor", "check this machine and recommend changes"),
    "submit": Command("samestep.tools.submit", "submit a run to Slurm or Kubernetes"),
    "snapshots": Command("samestep.tools.snapshots", "list, check and export a run's snapshots"),
}
EXIT_FAILURE: Final = 1
EXIT_WRONG_USE: Final = 2  # like argparse
EXIT_INTERRUPTED: Final = 130  # like a shell after SIGINT
EXIT_BROKEN_PIPE: Final = 141  # like a shell after SIGPIPE: the reader closed the output


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's arguments) and return its exit status."""
    given = _parser().parse_args(argv)
    command = COMMANDS[given.command]
    module = import_module(command.module)
    parser = argparse.ArgumentParser(
        prog=f"samestep {given.command}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    try:
        status: int = module.main(parser.parse_args(given.arguments))
    except SamestepError as error:
        print(f"samestep: error: {error}", file=sys.stderr)  # noqa: T201  stderr may be None
        if isinstance(error, WorkerError):
            return error.status
        return EXIT_WRONG_USE if isinstance(error, ConfigError) else EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def main_and_exit() -> NoReturn:
    """Run the command and exit without unloading torch, which takes Python half a second."""
    try:
        status = main()
        atexit._run_exitfuncs()  # noqa: SLF001  os._exit skips them
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the file was closed
            stream.flush()
    except BrokenPipeError:
        status = EXIT_BROKEN_PIPE
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {COMMANDS[name].summary}" for name in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="samestep",
        usage="samestep [-h] [--version] COMMAND ...",
        description="Train a PyTorch model on any number of workers with the same results, "
        f"bit for bit.\n\ncommands:\n{commands}",
        epilog='Run "samestep COMMAND --help" for the arguments of a command.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"samestep {_version()}")
    hidden = argparse.SUPPRESS  # listed in the description
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=hidden)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=hidden)
    return parser


def _version() -> str:
    try:
        return version("samestep")
    except PackageNotFoundError:
        return "(not installed)"
