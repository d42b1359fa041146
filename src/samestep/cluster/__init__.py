"""This process's rank, world size and addresses, as its launcher's variables describe them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Literal

import psutil

from samestep.cluster.launchers import (
    LOOPBACK,
    LauncherVariables,
    Variables,
    read_mpi,
    read_pod,
    read_slurm,
    read_torchrun,
)
from samestep.errors import ConfigError

GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE: Final = "lo"
# an address for documentation (RFC 5737), reached only by the default route
OUTSIDE_ADDRESS: Final = "198.51.100.1"
_DISCARD_PORT: Final = 9


def interface_towards(host: str) -> str | None:
    """Return the network interface that reaches `host`, for GLOO_SOCKET_IFNAME; sends nothing.

    That is the loopback interface for a loopback address. For a name that resolves to one, such as
    a machine's own name in Debian's /etc/hosts, it is the interface of the default route. None if
    unknown.
    """
    if _is_loopback(host):
        return LOOPBACK_INTERFACE
    for target in (host, OUTSIDE_ADDRESS):
        own = _own_address_towards(target)
        if own and not _is_loopback(own):
            return _interface_with(own)
    return None


@contextmanager
def gloo_interface(host: str) -> Iterator[None]:
    """Let gloo listen where `host` reaches this machine, unless GLOO_SOCKET_IFNAME is set."""
    interface = None if GLOO_INTERFACE in os.environ else interface_towards(host)
    if interface:
        os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        if interface:
            del os.environ[GLOO_INTERFACE]


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_address_towards(host: str) -> str | None:
    with suppress(OSError, UnicodeError):  # an unknown host, or no route
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, _DISCARD_PORT, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket only looks up the route
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _interface_with(address: str) -> str | None:
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in found):
            return name
    return None


StartedBy = Literal["alone", "samestep", "torchrun", "mpi", "slurm", "kubernetes", "variables"]

STARTED_BY: Final = "SAMESTEP_INTERNAL_STARTED_BY"
NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class ProcessInfo:
    """One worker: `rank` of `world_size`, and `local_rank` of `local_world_size` on its host.

    Rank 0's store listens at `address` and `port`. For error messages, `source` names the variables
    that set the rank, such as SLURM_PROCID=1 of SLURM_STEP_NUM_TASKS=4.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    started_by: StartedBy
    source: str = ""


def find_process(environment: Mapping[str, str]) -> ProcessInfo:
    """Return this worker's position from the variables of torchrun, MPI, Slurm or Kubernetes.

    Without any of them, the process is alone. The innermost launcher wins: `samestep run` and
    torchrun over mpirun, and mpirun over Slurm. MASTER_ADDR and MASTER_PORT override the launcher's
    address and port.

    Raises `ConfigError` if variables are missing, are not numbers, or contradict each other.
    """
    started_by, found = _read_launcher(environment)
    if not found:
        return ProcessInfo(0, 1, 0, 1, LOOPBACK, 0, "alone")
    address, port = _address(found, environment)
    rank, world_size, local_rank, local_world_size = (number.value for number in found.numbers)
    if not local_rank < local_world_size <= world_size or not local_rank <= rank < world_size:
        sources = dict.fromkeys(number.source for number in found.numbers)
        raise ConfigError(
            f"{', '.join(sources)} contradict each other; "
            f"ranks count from 0 to the world size minus 1; {found.advice}"
        )
    return ProcessInfo(
        rank, world_size, local_rank, local_world_size, address, port, started_by, found.source
    )


def _read_launcher(environment: Mapping[str, str]) -> tuple[StartedBy, LauncherVariables | None]:
    if environment.get(STARTED_BY) == "samestep":
        return "samestep", read_torchrun(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun", read_torchrun(environment)
    if found := read_mpi(environment):
        return "mpi", _consistent(found, environment)
    if found := read_slurm(environment):
        return "slurm", _consistent(found, environment)
    if found := read_pod(environment):
        return "kubernetes", found
    return "variables", read_torchrun(environment)


def _consistent(found: LauncherVariables, environment: Mapping[str, str]) -> LauncherVariables:
    """Return `found`. Raises `ConfigError` if leftover torchrun variables contradict it."""
    variables = Variables(environment, "unset it")
    for name, number in zip(NUMBERS, found.numbers, strict=True):
        if name in environment and variables.number(name).value != number.value:
            raise ConfigError(
                f"{number.source} and {name}={environment[name]} contradict each other; unset the "
                f"variables of {', '.join(NUMBERS)} that another launch left, "
                "or start workers with torchrun, which sets all of them"
            )
    return found


def _address(found: LauncherVariables, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return rank 0's address and port, as set or as implied by the launcher."""
    variables = Variables(environment, "set rank 0's host, and a port that is free there, for all")
    address = variables.host("MASTER_ADDR") if "MASTER_ADDR" in environment else found.address
    port = variables.port("MASTER_PORT") if "MASTER_PORT" in environment else found.port
    if address is None or port is None:
        values = {"MASTER_ADDR": address, "MASTER_PORT": port}
        missing = " and ".join(name for name, value in values.items() if value is None)
        raise ConfigError(
            f"{found.source} does not say where rank 0 listens, and {missing} is not set; "
            f"{variables.advice}"
        )
    return address, port
