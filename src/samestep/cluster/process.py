"""This process's rank, world size and addresses, as its launcher's variables describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from samestep.cluster.launchers import (
    LOOPBACK,
    LauncherVariables,
    Variables,
    read_mpi,
    read_pod,
    read_slurm,
    read_submitit,
    read_torchrun,
    refuse_unread,
)
from samestep.errors import ConfigError

StartedBy = Literal[
    "alone", "samestep", "torchrun", "mpi", "slurm", "submitit", "kubernetes", "variables", "group",
]  # fmt: skip

STARTED_BY: Final = "SAMESTEP_INTERNAL_STARTED_BY"
NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class ProcessInfo:
    """One worker: `rank` of `world_size`, and `local_rank` of `local_world_size` on its host.

    Rank 0's store listens at `address` and `port`. For error messages, `source` names the variables
    that set the rank, such as SLURM_PROCID=1 of SLURM_STEP_NUM_TASKS=4. Without `knows_host`, the
    local numbers assume a single host, and `samestep.comm.rendezvous.locate` finds the right ones.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    started_by: StartedBy
    source: str = ""
    knows_host: bool = True


Reader = Callable[[Mapping[str, str]], LauncherVariables | None]


def find_process(environment: Mapping[str, str]) -> ProcessInfo:
    """Return this worker's position from the variables of its launcher.

    Without any of them, the process is alone. The innermost launcher wins: `samestep run` and
    torchrun over mpirun, and mpirun over Slurm. MASTER_ADDR and MASTER_PORT override the launcher's
    address and port.

    Raises `ConfigError` if variables are missing, are not numbers, or contradict each other.
    """
    started_by, launcher = _read_launcher(environment)
    if not launcher:
        refuse_unread(environment)
        return ProcessInfo(0, 1, 0, 1, LOOPBACK, 0, "alone")
    address, port = _address(launcher, environment)
    rank, world_size, local_rank, local_world_size = (number.value for number in launcher.numbers)
    if not local_rank < local_world_size <= world_size or not local_rank <= rank < world_size:
        sources = dict.fromkeys(number.source for number in launcher.numbers)
        raise ConfigError(
            f"{', '.join(sources)} contradict each other; "
            f"ranks count from 0 to the world size minus 1; {launcher.advice}"
        )
    place = rank, world_size, local_rank, local_world_size
    knows_host = launcher.knows_host or world_size == 1
    return ProcessInfo(*place, address, port, started_by, launcher.source, knows_host)


def _read_launcher(environment: Mapping[str, str]) -> tuple[StartedBy, LauncherVariables | None]:
    if environment.get(STARTED_BY) == "samestep":
        return "samestep", read_torchrun(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun", read_torchrun(environment)
    readers: tuple[tuple[StartedBy, Reader], ...] = (
        ("mpi", read_mpi),
        ("slurm", read_slurm),
        ("submitit", read_submitit),
    )
    for started_by, read in readers:
        if launcher := read(environment):
            return started_by, _consistent(launcher, environment)
    if launcher := read_pod(environment):
        return "kubernetes", launcher
    return "variables", read_torchrun(environment)


def _consistent(launcher: LauncherVariables, environment: Mapping[str, str]) -> LauncherVariables:
    """Return `launcher`. Raises `ConfigError` if leftover torchrun variables contradict it."""
    variables = Variables(environment, "unset it")
    for name, number in zip(NUMBERS, launcher.numbers, strict=True):
        if name in environment and variables.number(name).value != number.value:
            raise ConfigError(
                f"{number.source} and {name}={environment[name]} contradict each other; unset the "
                f"variables of {', '.join(NUMBERS)} that another launch left, "
                "or start workers with torchrun, which sets all of them"
            )
    return launcher


def _address(launcher: LauncherVariables, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return rank 0's address and port, as set or as implied by the launcher."""
    variables = Variables(environment, "set rank 0's host, and a port that is free there, for all")
    address = variables.host("MASTER_ADDR") if "MASTER_ADDR" in environment else launcher.address
    port = variables.port("MASTER_PORT") if "MASTER_PORT" in environment else launcher.port
    if address is None or port is None:
        values = {"MASTER_ADDR": address, "MASTER_PORT": port}
        missing = " and ".join(name for name, value in values.items() if value is None)
        raise ConfigError(
            f"{launcher.source} does not say where rank 0 listens, and {missing} is not set; "
            f"{variables.advice}"
        )
    return address, port
