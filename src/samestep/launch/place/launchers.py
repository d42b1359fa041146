"""What torchrun, MPI and Kubernetes tell a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

from samestep.launch.place.told import LOOPBACK, PORTS, Number, Told, Variables

if TYPE_CHECKING:
    from collections.abc import Mapping

NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# where not set, all workers are on one host
LOCAL: Final = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}
VARIABLES: Final = (*NEEDED, *LOCAL)
WHAT_TO_DO: Final = (
    f"set all of {', '.join(NEEDED)} as torchrun does, or unset all to run one worker alone"
)

OPEN_MPI: Final = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
# MPICH's and Intel MPI's mpiexec
HYDRA: Final = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MPI_WHAT_TO_DO: Final = f"start workers with mpirun, or unset its variables and {WHAT_TO_DO}"

# a TrainJob's, from which torchrun reads options
TRAIN_JOB: Final = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
POD_WHAT_TO_DO: Final = f"start workers with torchrun, or {WHAT_TO_DO}"


def told_by_variables(environment: Mapping[str, str]) -> Told | None:
    """Return the place that RANK, WORLD_SIZE and so on say, as torchrun sets them; None where none is set."""
    if not any(name in environment for name in VARIABLES):
        return None
    variables = Variables(environment, WHAT_TO_DO)
    variables.require(*NEEDED, beside=tuple(LOCAL))
    local = [name if name in environment else default for name, default in LOCAL.items()]
    rank, workers, local_rank, local_workers = variables.numbers("RANK", "WORLD_SIZE", *local)
    return Told(rank, workers, local_rank, local_workers, WHAT_TO_DO)


def told_by_mpi(environment: Mapping[str, str]) -> Told | None:
    """Return the place that `mpirun` gave; None where it started one process or none. Its port is derived from PMIX_NAMESPACE."""
    if any(name in environment for name in OPEN_MPI):
        names = OPEN_MPI
    elif "PMI_RANK" in environment and (
        "MPI_LOCALNRANKS" in environment or "SLURM_STEP_ID" not in environment
    ):
        names = HYDRA  # srun --mpi=pmi2 sets the first two as well
    else:
        return None
    rank, workers, local_rank, local_workers = Variables(environment, MPI_WHAT_TO_DO).numbers(
        *names
    )
    if workers.value == 1:
        return None
    address = LOOPBACK if local_workers.value == workers.value else None
    job = environment.get("PMIX_NAMESPACE")
    port = PORTS[crc32(job.encode(errors="replace")) % len(PORTS)] if job else None
    return Told(rank, workers, local_rank, local_workers, MPI_WHAT_TO_DO, address, port)


def told_in_pod(environment: Mapping[str, str]) -> Told | None:
    """Return the place of a pod of Kubernetes that runs one worker: of an Indexed Job, a PyTorchJob or a TrainJob; None in no such pod."""
    in_pod = "KUBERNETES_SERVICE_HOST" in environment or "JOB_COMPLETION_INDEX" in environment
    if not in_pod or any(name in environment for name in LOCAL):
        return None
    if "WORLD_SIZE" in environment:
        rank = "RANK" if "RANK" in environment else "JOB_COMPLETION_INDEX"
        return _pod(environment, rank, *NEEDED[1:])
    return _pod(environment, *TRAIN_JOB) if "PET_NNODES" in environment else None


def _pod(environment: Mapping[str, str], rank: str, workers: str, address: str, port: str) -> Told:
    variables = Variables(environment, POD_WHAT_TO_DO)
    variables.require(rank, workers, address, port)
    # a number, or a word where torchrun is to find one
    processes = environment.get("PET_NPROC_PER_NODE", "1")
    if processes.isdigit() and processes != "1":
        raise variables.error("PET_NPROC_PER_NODE", "1 where a pod runs one worker")
    return Told(
        rank=variables.number(rank),
        workers=variables.number(workers),
        local_rank=Number(0, "a pod's only worker"),
        local_workers=Number(1, "a pod's only worker"),
        what_to_do=POD_WHAT_TO_DO,
        address=variables.host(address),
        port=variables.port(port),
    )
