"""The hosts of a run: flags of `samestep run`, the token that hosts share, and hosts files."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from samestep.comm.link import parse_address
from samestep.config import TOKEN
from samestep.errors import ConfigError
from samestep.host import read_secret

MIN_TOKEN: Final = 16  # characters; short tokens can be guessed offline from a recorded handshake
CREATE_TOKEN: Final = (
    'create one with `python -c "import secrets; print(secrets.token_hex())"` '
    f"and set it on all hosts, in {TOKEN} or in a file given by --token-file"
)
NODES_HELP: Final = f"""\
For a handful of hosts. On many, start the workers with torchrun, Slurm, Kubernetes or Ray.
Run the same command on each host, or use --hosts. All hosts of a run share a secret token.
To create one: python -c "import secrets; print(secrets.token_hex())"
Set it on all hosts, in {TOKEN} or in a file given by --token-file.
"""
MAX_NODES: Final = 256  # one host coordinates the others
MAX_HOSTS_FILE: Final = 1 << 20  # bytes
HOST_LINE: Final = re.compile(
    r"(?P<name>[A-Za-z0-9_](?:[A-Za-z0-9_.:%@-]*[A-Za-z0-9])?)"
    r"(?:\s+workers=(?P<workers>[1-9][0-9]{0,4}))?"
)


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about several hosts."""
    group = parser.add_argument_group("several hosts", NODES_HELP)
    nodes = "number of hosts; MIN:MAX lets hosts join and leave during the run (default: 1)"
    group.add_argument("--nodes", metavar="N", help=nodes)
    master = "address and free port of the first host; must be the same on all hosts"
    group.add_argument("--master", metavar="HOST:PORT", help=master)
    token = f"file with the token, readable only by you (default: the variable {TOKEN})"
    group.add_argument("--token-file", metavar="FILE", help=token)
    hosts = "run this command over ssh on the hosts in FILE, one per line: HOST [workers=N]"
    group.add_argument("--hosts", metavar="FILE", help=hosts)
    shell = "remote shell for --hosts, with its options (default: ssh)"
    group.add_argument("--ssh", metavar="COMMAND", help=shell)


@dataclass(frozen=True)
class Nodes:
    """A number of hosts from `min_nodes` to `max_nodes`, as in `--nodes`."""

    min_nodes: int
    max_nodes: int

    @classmethod
    def read(cls, text: str) -> Nodes:
        """Read N or MIN:MAX. Raises `ConfigError`."""
        match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
        nodes = match and cls(int(match[1]), int(match[2] or match[1]))
        if not nodes or not 1 <= nodes.min_nodes <= nodes.max_nodes:
            raise ConfigError(
                f"--nodes must be a number of hosts such as 2, or a range such as 1:4; got {text}"
            )
        if nodes.max_nodes > MAX_NODES:
            raise ConfigError(
                f"--nodes must be at most {MAX_NODES}, because one host coordinates all others, "
                f"got {text}; start the workers of more hosts with torchrun, Slurm's srun or one "
                "Kubernetes pod each"
            )
        return nodes

    def __str__(self) -> str:
        low, high = self.min_nodes, self.max_nodes
        return str(high) if low == high else f"{low}:{high}"


@dataclass(frozen=True)
class ClusterSpec:
    """The address of a run's first host, the token that all hosts share, and their number."""

    master: tuple[str, int]
    token: str = field(repr=False)
    nodes: Nodes


def cluster_spec(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> ClusterSpec | None:
    """Return the hosts of a run, None for this host alone. Raises `ConfigError`."""
    nodes = Nodes.read(arguments.nodes or "1")
    if arguments.ssh is not None:
        raise ConfigError(f"--ssh {arguments.ssh!r} requires --hosts, which lists the hosts")
    if arguments.master is None:
        if nodes.max_nodes > 1:
            raise ConfigError(
                f"--nodes {arguments.nodes} requires --master HOST:PORT, the address of the first "
                "host and the same on all hosts; or --hosts FILE to start all of them from here"
            )
        return None
    if arguments.nodes is None:
        raise ConfigError(f"--master {arguments.master} requires --nodes, the number of hosts")
    master = parse_address(arguments.master, "--master")
    token = read_token(arguments, environment)
    if token is None:
        raise ConfigError(f"--nodes {arguments.nodes} requires a token; {CREATE_TOKEN}")
    return ClusterSpec(master, token, nodes)


def read_token(arguments: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Return the token from its file or variable, None without either. Raises `ConfigError`."""
    if arguments.token_file is None:
        return _checked(environment[TOKEN], TOKEN) if TOKEN in environment else None
    name = f"--token-file {arguments.token_file}"
    return _checked(read_secret(Path(arguments.token_file), name), name)


def _checked(token: str, name: str) -> str:
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{name} must have at least {MIN_TOKEN} characters, got {len(token)}; {CREATE_TOKEN}"
        )
    return token


@dataclass(frozen=True)
class Host:
    """A line of a hosts file: a name for the remote shell, and the workers if the line has them."""

    name: str
    workers: int | None

    @property
    def address(self) -> str:
        """The host without a user."""
        return self.name.rpartition("@")[2]


def read_hosts(path: Path) -> list[Host]:
    """Read a hosts file. Raises `ConfigError` that names the file and the line."""
    name = f"--hosts {path}"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_HOSTS_FILE + 1).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if len(text) > MAX_HOSTS_FILE:
        raise ConfigError(f"{name} must have at most {MAX_HOSTS_FILE} bytes, one line per host")
    return parse_hosts(text, name)


def parse_hosts(text: str, name: str) -> list[Host]:
    """Read one host per line, `HOST [workers=N]`; # starts a comment. Raises `ConfigError`."""
    lines: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        where = f"{name}, line {number}"
        match = HOST_LINE.fullmatch(content)
        if not match:
            expected = "expected HOST or HOST workers=N, as in node1 workers=4"
            raise ConfigError(f"{where}: {expected}; got {content[:100]!r}")
        host = Host(match["name"], int(match["workers"]) if match["workers"] else None)
        if host.address in lines:
            first = f"has the same host as line {lines[host.address]}"
            raise ConfigError(f"{where}: {content[:100]!r} {first}; list each host once")
        lines[host.address] = number
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"{name} has no host; add one per line, as in node1 workers=4")
    return hosts
