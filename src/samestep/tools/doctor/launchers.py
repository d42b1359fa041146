"""Who starts workers here, by the environment: torchrun, MPI, Slurm, Kubernetes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from samestep.cluster import ProcessInfo, find_process
from samestep.errors import ConfigError
from samestep.tools.doctor.section import Section, change, good, note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding
    from samestep.tools.doctor.system import System

COMMANDS: Final = ("sinfo", "srun", "sbatch", "mpirun", "torchrun", "kubectl", "docker")
ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
# Values that tell of the job; any other variable might be a secret.
SHOWN: Final = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    ),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    *(
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_NODEID",
    ),
    *("SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT"),
    *(
        "KUBERNETES_SERVICE_HOST",
        "JOB_COMPLETION_INDEX",
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
    ),
)


def examine(case: Case) -> Section:
    """Tell of launchers."""
    system = case.system
    place = _place(system)
    facts: dict[str, Any] = {
        "commands": [name for name in COMMANDS if system.has_command(name)],
        "this_process": str(place) if isinstance(place, ConfigError) else _told(place),
        "variables": {
            name: system.environment[name] for name in SHOWN if name in system.environment
        },
    }
    if in_pod(system):
        facts["pod"] = {
            "namespace": system.text(f"{ACCOUNT}/namespace"),
            "service_account": bool(system.names(ACCOUNT)),
        }
    return Section(
        "launchers", facts, [*_judge_place(place), *_judge_slurm(system), *_judge_pod(system)]
    )


def in_pod(system: System) -> bool:
    """Tell whether this is a pod of Kubernetes."""
    return "KUBERNETES_SERVICE_HOST" in system.environment or bool(system.names(ACCOUNT))


def has_several_hosts(system: System) -> bool:
    """Tell whether this process is a worker of a run on several hosts."""
    place = _place(system)
    return not isinstance(place, ConfigError) and place.world_size > place.local_world_size


def _place(system: System) -> ProcessInfo | ConfigError:
    try:
        return find_process(system.environment)
    except ConfigError as error:
        return error


def _told(place: ProcessInfo) -> str:
    if place.started_by == "alone":
        return "of no launcher"
    return f"worker {place.rank} of {place.world_size}, started by {place.started_by}; they meet at {place.address}:{place.port}"


def _judge_place(place: ProcessInfo | ConfigError) -> Iterator[Finding]:
    if isinstance(place, ConfigError):
        message, _, mend = str(place).rpartition("; ")
        yield change(f"samestep.init would fail here: {message}.", mend)
    elif place.started_by != "alone":
        yield good(f"this process is {_told(place)}")


def _judge_slurm(system: System) -> Iterator[Finding]:
    environment = system.environment
    if "SLURM_JOB_ID" not in environment:
        return
    job = f"this is job {environment['SLURM_JOB_ID']} of Slurm"
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_ID" not in environment and tasks != "1":
        yield note(
            f"{job} with {tasks} tasks, in its batch script or shell: a script started here is one worker.",
            "srun python train.py",
        )
    elif not system.has_command("srun"):
        yield note(
            f"{job}, and srun is not found: the job cannot start workers on its nodes.",
            "load Slurm's module, or add it to PATH",
        )
    else:
        yield good(job)


def _judge_pod(system: System) -> Iterator[Finding]:
    if in_pod(system) and system.names(ACCOUNT):
        yield note(
            "this pod holds a token of its service account, which a run never needs.",
            "automountServiceAccountToken: false in the pod's specification",
        )
