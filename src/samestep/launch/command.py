"""`samestep run`: start local workers from the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from samestep.config import Config, parse
from samestep.errors import ConfigError
from samestep.launch.cluster_spec import add_node_arguments, cluster_spec
from samestep.launch.local import run_script

EXAMPLES = """\
examples:
  samestep run -n 2 train.py --epochs 10
  samestep run -n 4 --lanes 8 --dir runs/one -m recipes.vit
  samestep run -n 4 --mode dp train.py
  samestep run -n 3 --dir runs/one --resume runs/one/step-00001200 train.py
  samestep run --nodes 2 --master node1:29400 --token-file run.token -n 4 train.py        (the same on both hosts)
  samestep run --hosts hosts.txt -n 4 train.py

The script calls samestep.init(); options given here have the last word over its arguments. What follows the script belongs to it.
Ctrl-C and SIGTERM let workers snapshot for up to 30 seconds; a second Ctrl-C does not wait.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep run`: one flag for every option of a run."""
    parser.usage = "%(prog)s [-n N] [--OPTION VALUE ...] [-m] script ..."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "-n",
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="workers to start on this machine (default: 1)",
    )
    parser.add_argument(
        "--mode",
        choices=("ddp", "dp"),
        default="ddp",
        help="ddp: N workers with a device each (default); dp: one worker with N devices, as by -n 1 --devices N",
    )
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="the script is the name of a module, as in python -m",
    )
    add_options(parser)
    add_node_arguments(parser)
    parser.add_argument("script", help="a Python script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option of a run, as in --snapshot-every for snapshot_every."""
    group = parser.add_argument_group("options of the run, as in samestep.init")
    for option in fields(Config):
        default = "" if option.default is None else f" (default: {str(option.default).lower()})"
        group.add_argument(
            _flag(option.name), metavar="VALUE", help=f"{option.metadata['description']}{default}"
        )


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run that were given on the command line, by name. Raises `ConfigError` that names the flag."""
    given = {name: text for name, text in vars(arguments).items() if text is not None}
    return {
        option.name: parse(option.name, given[option.name], _flag(option.name))
        for option in fields(Config)
        if option.name in given
    }


def main(arguments: argparse.Namespace) -> int:
    """Run the script; return the exit status."""
    workers, options = arguments.workers, given_options(arguments)
    if arguments.mode == "dp":
        if "devices" in options:
            raise ConfigError(
                "--devices was given with --mode dp, where -n is the number of devices; give one of the two"
            )
        workers, options["devices"] = 1, arguments.workers
    if arguments.hosts is not None:
        from samestep.launch.ssh import run_on_hosts

        return run_on_hosts(arguments, options)
    gathering = cluster_spec(arguments)
    run_script(
        arguments.script,
        arguments.arguments,
        workers,
        options,
        as_module=arguments.module,
        gathering=gathering,
    )
    return 0


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
