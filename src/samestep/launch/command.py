"""The `samestep run` command."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from samestep.config import Config, flag_name, parse
from samestep.errors import ConfigError
from samestep.launch.cluster_spec import add_node_arguments, cluster_spec
from samestep.launch.local import run_script

EPILOG = """\
examples:
  samestep run -n 2 train.py --epochs 10
  samestep run -n 4 --lanes 8 --dir runs/one -m recipes.vit
  samestep run -n 4 --mode dp train.py
  samestep run -n 3 --dir runs/one --resume runs/one/step-00001200 train.py
  samestep run --nodes 2 --master node1:29400 --token-file run.token -n 4 train.py   # on both hosts
  samestep run --hosts hosts.txt -n 4 train.py

The script calls samestep.init(). Options given here override the arguments of that call. Everything
after the script is passed to the script. On Ctrl-C or SIGTERM, workers save a snapshot and exit
within the grace period; a second Ctrl-C kills them immediately.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep run`, with one flag for each option of a run."""
    parser.usage = "%(prog)s [-n N] [--OPTION VALUE ...] [-m] script ..."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    workers = "number of workers on this host (default: 1)"
    parser.add_argument("-n", "--workers", type=int, default=1, metavar="N", help=workers)
    mode = (
        "ddp: N workers with one device each; dp: one worker with N devices, like "
        "-n 1 --devices N (default: ddp)"
    )
    parser.add_argument("--mode", choices=("ddp", "dp"), default="ddp", help=mode)
    module = "run a module, like python -m, not a file"
    parser.add_argument("-m", "--module", action="store_true", help=module)
    add_options(parser)
    add_node_arguments(parser)
    parser.add_argument("script", help="Python script to run, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option of a run, such as --snapshot-every for snapshot_every."""
    group = parser.add_argument_group("options of the run, as in samestep.init")
    for option in fields(Config):
        text = option.metadata["description"]
        if option.default is not None:
            text += f" (default: {str(option.default).lower()})"
        group.add_argument(flag_name(option.name), metavar="VALUE", help=text)


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of a run by name. Raises `ConfigError` that names the flag."""
    return {
        option.name: parse(option.name, text, flag_name(option.name))
        for option in fields(Config)
        if (text := getattr(arguments, option.name, None)) is not None
    }


def main(arguments: argparse.Namespace) -> int:
    """Run the script; return the exit status."""
    workers, options = arguments.workers, given_options(arguments)
    if arguments.mode == "dp":
        if "devices" in options:
            raise ConfigError(
                "--devices cannot be combined with --mode dp, where -n is the number of devices"
            )
        workers, options["devices"] = 1, arguments.workers
    if arguments.hosts is not None:
        from samestep.launch.ssh import run_on_hosts

        return run_on_hosts(arguments, options)
    spec, script = cluster_spec(arguments), (arguments.script, arguments.arguments)
    run_script(*script, workers, options, as_module=arguments.module, spec=spec)
    return 0
