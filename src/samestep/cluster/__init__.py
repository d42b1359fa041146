"""Where this process stands among the workers of a run, as whoever started it says in the environment."""

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
NUMBERS: Final = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_world_size",
}


@dataclass(frozen=True)
class ProcessInfo:
    """One worker's place: `rank` of `workers`, on its host `local_rank` of `local_world_size`, and where rank 0's store listens.

    `source` says which variables the rank is from, for errors: SLURM_PROCID=1 of
    SLURM_STEP_NUM_TASKS=4.
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
    """Read the place from the variables of torchrun, MPI, Slurm or Kubernetes. None of them: alone.

    A launcher that stands nearer to this process is believed before one that may have started it:
    `samestep run` and torchrun before mpirun, and that before Slurm. MASTER_ADDR and MASTER_PORT
    have the last word on where the workers meet.

    Raises `ConfigError` when variables are missing, are no numbers, or contradict each other.
    """
    started_by, told = _told(environment)
    if not told:
        return ProcessInfo(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            address=LOOPBACK,
            port=0,
            started_by="alone",
        )
    address, port = _meeting_point(told, environment)
    place = ProcessInfo(
        rank=told.rank.value,
        world_size=told.world_size.value,
        local_rank=told.local_rank.value,
        local_world_size=told.local_world_size.value,
        address=address,
        port=port,
        started_by=started_by,
        source=f"{told.rank.source} of {told.world_size.source}",
    )
    if (
        not place.local_rank < place.local_world_size <= place.world_size
        or not place.local_rank <= place.rank < place.world_size
    ):
        said = ", ".join(dict.fromkeys(getattr(told, name).source for name in NUMBERS.values()))
        raise ConfigError(
            f"{said} contradict each other; ranks count from 0 to the world size less 1; {told.what_to_do}"
        )
    return place


def _told(environment: Mapping[str, str]) -> tuple[StartedBy, LauncherVariables | None]:
    if environment.get(STARTED_BY) == "samestep":
        return "samestep", read_torchrun(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun", read_torchrun(environment)
    if told := read_mpi(environment):
        return "mpi", _undisputed(told, environment)
    if told := read_slurm(environment):
        return "slurm", _undisputed(told, environment)
    if told := read_pod(environment):
        return "kubernetes", told
    return "variables", read_torchrun(environment)


def _undisputed(told: LauncherVariables, environment: Mapping[str, str]) -> LauncherVariables:
    """Return what a launcher tells. Raises `ConfigError` where a variable of torchrun's, left by another launch, says something else."""
    variables = Variables(environment, "unset it")
    for name, field in NUMBERS.items():
        says = getattr(told, field)
        if name in environment and variables.number(name).value != says.value:
            raise ConfigError(
                f"{says.source} and {name}={environment[name]} contradict each other; unset those of {', '.join(NUMBERS)} that were left "
                "by another launch, or start workers with torchrun, which sets all of them"
            )
    return told


def _meeting_point(told: LauncherVariables, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and the port where workers meet: those given before those that the launcher's variables imply."""
    variables = Variables(
        environment, "give all workers the host of rank 0 and a port that is free there"
    )
    address = variables.host("MASTER_ADDR") if "MASTER_ADDR" in environment else told.address
    port = variables.port("MASTER_PORT") if "MASTER_PORT" in environment else told.port
    if address is None or port is None:
        missing = [
            name
            for name, value in {"MASTER_ADDR": address, "MASTER_PORT": port}.items()
            if value is None
        ]
        said = f"{told.rank.source} of {told.world_size.source}"
        raise ConfigError(
            f"{said} does not tell where rank 0 listens, and {', '.join(missing)} is not set; {variables.what_to_do}"
        )
    return address, port
