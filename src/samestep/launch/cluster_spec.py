"""The flags of `samestep run` for several hosts: how many, where they meet, and the token that they share."""

from __future__ import annotations

import argparse
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from samestep.comm.link import parse_address
from samestep.config import TOKEN
from samestep.errors import ConfigError

LEAST_TOKEN: Final = 16  # characters: who listens to a hello can try short tokens at leisure
MOST_TOKEN: Final = 4096  # bytes of a token file
HOW_TO_MAKE_ONE: Final = (
    'make one by `python -c "import secrets; print(secrets.token_hex())"`\n'
    f"and give the same to all of them, in {TOKEN} or in a file after --token-file"
)


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about other hosts."""
    group = parser.add_argument_group(
        "several hosts", f"All hosts of a run share a token; {HOW_TO_MAKE_ONE}."
    )
    group.add_argument(
        "--nodes", metavar="N", help="hosts that run this same command, or LEAST:MOST (default: 1)"
    )
    group.add_argument(
        "--master",
        metavar="HOST:PORT",
        help="where they meet: an address of one of them, and a port that is free there",
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"file with the token, which only you may read (default: the variable {TOKEN})",
    )
    group.add_argument(
        "--hosts",
        metavar="FILE",
        help="start this command by ssh on the hosts of a file: a line each, HOST [workers=N]",
    )
    group.add_argument(
        "--ssh",
        metavar="COMMAND",
        help="the remote shell for --hosts, with its options (default: ssh)",
    )


@dataclass(frozen=True)
class Nodes:
    """From `least` to `most` hosts, as `--nodes` says."""

    least: int
    most: int

    @classmethod
    def read(cls, text: str) -> Nodes:
        """Read N or LEAST:MOST. Raises `ConfigError`."""
        found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
        nodes = found and cls(int(found[1]), int(found[2] or found[1]))
        if not nodes or not 1 <= nodes.least <= nodes.most:
            raise ConfigError(
                f"--nodes {text} was given; expected a number of hosts such as 2, or the least and the most, such as 1:4"
            )
        return nodes

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class ClusterSpec:
    """Where the hosts of a run meet, how many of them, and the token that all of them hold."""

    master: tuple[str, int]
    token: str = field(repr=False)
    nodes: Nodes


def cluster_spec(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> ClusterSpec | None:
    """Return where this host meets others; None for a run on this host alone. Raises `ConfigError` that names the flag."""
    nodes = Nodes.read(arguments.nodes or "1")
    if arguments.ssh is not None:
        raise ConfigError(
            f"--ssh {arguments.ssh!r} was given without --hosts, which tells where to start"
        )
    if arguments.master is None:
        if nodes.most > 1:
            raise ConfigError(
                f"--nodes {arguments.nodes} was given without --master; expected the same --master HOST:PORT on all hosts, the address of "
                "one of them; or --hosts FILE to start them from here"
            )
        return None
    if arguments.nodes is None:
        raise ConfigError(
            f"--master {arguments.master} was given without --nodes; expected how many hosts meet there"
        )
    master = parse_address(arguments.master, "--master")
    token = read_token(arguments, environment)
    if token is None:
        raise ConfigError(f"--nodes {arguments.nodes} was given, and no token; {HOW_TO_MAKE_ONE}")
    return ClusterSpec(master, token, nodes)


def read_token(arguments: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Return the token of the file or variable, None where neither is given. Raises `ConfigError` where it is of no use."""
    if arguments.token_file is None:
        return _long_enough(environment[TOKEN], TOKEN) if TOKEN in environment else None
    path = Path(arguments.token_file)
    name = f"--token-file {path}"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MOST_TOKEN).decode().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} was given, and cannot be read: {error}") from error
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{name} was given, and others may read it; expected a file of yours alone: chmod 600 {path}"
        )
    return _long_enough(text, name)


def _long_enough(token: str, name: str) -> str:
    if len(token) < LEAST_TOKEN:
        raise ConfigError(
            f"{name} has {len(token)} characters; expected at least {LEAST_TOKEN}: {HOW_TO_MAKE_ONE}"
        )
    return token
