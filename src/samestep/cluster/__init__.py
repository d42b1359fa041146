"""The position of this process among the workers of a run, as its launcher's environment says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

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

StartedBy = Literal["alone", "samestep", "torchrun", "mpi", "slurm", "kubernetes", "variables"]

STARTED_BY: Final = "SAMESTEP_INTERNAL_STARTED_BY"
NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class ProcessInfo:
    """One worker: `rank` of `world_size`, and `local_rank` of `local_world_size` on its host.

    `address` and `port` are where rank 0's store listens. `source` says for error messages which
    variables the rank is from, such as SLURM_PROCID=1 of SLURM_STEP_NUM_TASKS=4.
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

    Without any of them the process is alone. The innermost launcher wins: `samestep run` and
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
        return "mpi", _without_conflict(found, environment)
    if found := read_slurm(environment):
        return "slurm", _without_conflict(found, environment)
    if found := read_pod(environment):
        return "kubernetes", found
    return "variables", read_torchrun(environment)


def _without_conflict(
    found: LauncherVariables, environment: Mapping[str, str]
) -> LauncherVariables:
    """Return `found`. Raises `ConfigError` if torchrun's variables, left set, contradict it."""
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
    """Return rank 0's address and port: those that are set, or those that the launcher implies."""
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
