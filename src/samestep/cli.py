"""The command line: `samestep COMMAND …`. A command is imported when it is called."""

from __future__ import annotations

import argparse
import atexit
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final, NamedTuple, NoReturn

from samestep.errors import SamestepError
from samestep.host import RED, colored, printable


class Command(NamedTuple):
    """A command: `module` has add_arguments(parser), and main(arguments) -> exit status.

    `left` says what is left of it after Ctrl-C, unless the `KeyboardInterrupt` does.
    """

    module: str
    summary: str
    left: str = ""


NOTHING_LEFT: Final = "; its runs were in temporary folders, which are removed"
COMMANDS: Final = {
    "run": Command("samestep.launch.local", "run a script with one or more workers"),
    "adopt": Command("samestep.tools.adopt", "plan how a training script moves to samestep"),
    "verify": Command(
        "samestep.tools.verify", "check that all worker counts give the same steps", NOTHING_LEFT
    ),
    "replay": Command("samestep.tools.replay", "repeat a step of a run and show each lane"),
    "compare": Command("samestep.tools.compare", "find the first step at which two runs differ"),
    "which": Command("samestep.tools.which", "print which steps of a run have used a sample"),
    "receipt": Command(
        "samestep.tools.receipt", "write and check a file that says what a run was", NOTHING_LEFT
    ),
    "fork": Command("samestep.tools.fork", "start a run that shares the first steps of another"),
    "forget": Command("samestep.tools.forget", "train again from before some samples were used"),
    "watch": Command("samestep.watch", "serve a web page that shows live runs"),
    "report": Command("samestep.watch.report", "write curves, tables and images to one HTML file"),
    "scale": Command(
        "samestep.tools.scale", "measure a script's scaling and predict larger runs", NOTHING_LEFT
    ),
    "doctor": Command("samestep.tools.doctor", "check this machine and recommend changes"),
    "submit": Command("samestep.tools.submit", "submit a run to Slurm or Kubernetes"),
    "snapshots": Command("samestep.tools.snapshots", "list, check and export a run's snapshots"),
    "examples": Command("samestep.tools.examples", "copy the recipes, to start from their scripts"),
    "skill": Command("samestep.tools.skill", "print the instructions for coding assistants"),
}
EXIT_INTERRUPTED: Final = 130  # like a shell after SIGINT
EXIT_BROKEN_PIPE: Final = 141  # like a shell after SIGPIPE: the reader closed the output


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's arguments) and return its exit status."""
    overview = _overview()
    parsed = overview.parse_args(argv)
    if parsed.command == "help":  # `samestep help`, `samestep help COMMAND`
        parsed.command, parsed.arguments = next(iter(parsed.arguments), None), ["--help"]
    if parsed.command is None:
        overview.print_help()
        return 0
    if parsed.command not in COMMANDS:
        overview.error(f"unknown command {parsed.command!r}{_meant(parsed.command, COMMANDS)}")
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see _set_environment
        return _run(parsed.command, parsed.arguments)
    except SamestepError as error:
        title = colored("error:", RED, sys.stderr)
        text = printable(str(error))  # it may name what others wrote
        print(f"samestep: {title} {text}", file=sys.stderr)  # noqa: T201  stderr may be None
        return error.status
    except KeyboardInterrupt as interrupt:
        if parsed.command != "watch":  # which has no other end
            left = printable(str(interrupt)) or COMMANDS[parsed.command].left
            text = f"samestep: {parsed.command} was interrupted{left}"
            print(text, file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED


def _run(name: str, arguments: Sequence[str]) -> int:
    """Import a command, run it, and return its exit status."""
    command = COMMANDS[name]
    module = import_module(command.module)
    parser = _Parser(
        prog=f"samestep {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    # flags between positional arguments; commands that run a script leave the rest to it
    parse = parser.parse_intermixed_args if name == "snapshots" else parser.parse_args
    status: int = module.main(parse(arguments))
    return status


def main_and_exit() -> NoReturn:
    """Run the command and exit without unloading torch, which takes Python half a second."""
    _set_environment()
    try:
        status = main()
        atexit._run_exitfuncs()  # noqa: SLF001  os._exit skips them
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the file was closed
            stream.flush()
    except BrokenPipeError:
        status = EXIT_BROKEN_PIPE
    os._exit(status)


def _set_environment() -> None:
    """Start `samestep run` again with variables that are read only when Python starts.

    With PYTHONHASHSEED=0, strings have the same hashes, and sets the same order, in the workers of
    all hosts and after a resume. With only two entries per size in malloc's cache of small blocks
    (tcache), such blocks rarely settle behind large gradients, which then find the same place in
    every step. Variables that are set remain.
    """
    arguments = sys.argv[1:]
    is_this_process = sys.orig_argv[len(sys.orig_argv) - len(arguments) :] == arguments
    if arguments[:1] == ["run"] and is_this_process and "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=2")
        # until `main`: a KeyboardInterrupt while Python starts ends in a traceback of its own
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with suppress(OSError):
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  no shell


class _Parser(argparse.ArgumentParser):
    """A parser that suggests an option for one that is misspelled."""

    def error(self, message: str) -> NoReturn:
        flags = re.findall(r"--[\w-]+", message)
        valid_flags = set(re.findall(r"--[\w-]+", self.format_help()))
        unknown = [flag for flag in flags if flag not in valid_flags]
        super().error(message + (_meant(unknown[0], valid_flags) if unknown else ""))


def _meant(text: str, names: Iterable[str]) -> str:
    from difflib import get_close_matches  # only for errors: importing it takes 2 ms

    matches = get_close_matches(text, names, 1, cutoff=0.65)
    return f"; did you mean {matches[0]}?" if matches else ""


def _overview() -> argparse.ArgumentParser:
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
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="show the version")
    hidden = argparse.SUPPRESS  # listed in the description
    parser.add_argument("command", metavar="COMMAND", nargs="?", help=hidden)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=hidden)
    return parser


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from samestep.record.events import samestep_version

        print(f"samestep {samestep_version()}")  # noqa: T201
        parser.exit()
