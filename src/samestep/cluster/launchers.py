"""The variables by which torchrun, MPI, Kubernetes and Slurm give a worker its rank."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

from samestep.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
# derived ports: below those that Linux assigns to outgoing connections, and torchrun's 29500
PORTS: Final = range(20_000, 29_000)
_WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")


class Number(NamedTuple):
    """A number and its source for messages, such as SLURM_PROCID=1."""

    value: int
    source: str


@dataclass(frozen=True)
class LauncherVariables:
    """A worker's rank, world size, local rank and local world size, in `numbers`.

    `address` and `port` of rank 0 are None if unknown. `advice` ends the error message if the
    numbers contradict each other. Without `knows_host`, the local numbers are guesses.
    """

    numbers: Sequence[Number]
    advice: str
    address: str | None = None
    port: int | None = None
    knows_host: bool = True

    @property
    def source(self) -> str:
        """The variables that set the rank."""
        return f"{self.numbers[0].source} of {self.numbers[1].source}"


@dataclass(frozen=True)
class Variables:
    """The environment; errors show a variable's value and end with `advice`."""

    environment: Mapping[str, str]
    advice: str

    def require(self, *names: str, related: Sequence[str] = ()) -> None:
        """Raise `ConfigError` if some are not set; it shows the others and the `related` ones."""
        missing = [name for name in names if name not in self.environment]
        if missing:
            present = [name for name in (*names, *related) if name in self.environment]
            values = ", ".join(f"{name}={self.environment[name]}" for name in present)
            raise ConfigError(f"{values} is set and {', '.join(missing)} is not; {self.advice}")

    def number(self, name: str) -> Number:
        """Return a variable's value. Raises `ConfigError` if it is not a whole number."""
        text = self.environment[name]
        if not _WHOLE_NUMBER.fullmatch(text):
            raise self.error(name, "a whole number")
        return Number(int(text), f"{name}={text}")

    def numbers(self, *names: str) -> list[Number]:
        """Return several values. Raises `ConfigError` if one is missing or not a whole number."""
        self.require(*names)
        return [self.number(name) for name in names]

    def host(self, name: str) -> str:
        """Return a host name or address. Raises `ConfigError` if the value cannot be one."""
        if not is_host(self.environment[name]):
            raise self.error(name, "a host name or an address")
        return self.environment[name]

    def port(self, name: str) -> int:
        """Return a port. Raises `ConfigError` if the value cannot be one."""
        port = self.number(name).value
        if not 0 < port < 2**16:
            raise self.error(name, "a port from 1 to 65535")
        return port

    def error(self, name: str, expected: str) -> ConfigError:
        """Return the error of a variable with an unexpected value."""
        value = self.environment[name]
        return ConfigError(f"{name} must be {expected}, got {value!r}; {self.advice}")


def is_host(text: str) -> bool:
    """Return whether a text can be looked up as a host."""
    try:
        return text.encode("idna") != b"" and text.isprintable() and " " not in text
    except UnicodeError:  # a label that is empty or too long
        return False


NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# guesses if not set, until the workers compare their hosts
LOCAL: Final = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}
VARIABLES: Final = (*NEEDED, *LOCAL)
TORCHRUN_ADVICE: Final = (
    f"set all of {', '.join(NEEDED)} as torchrun does, or unset all to run one worker alone, or "
    "make torch.distributed's process group before samestep.init (Lightning's launcher does)"
)


def read_torchrun(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Read RANK, WORLD_SIZE and so on, as torchrun sets them; None if none is set."""
    if not any(name in environment for name in VARIABLES):
        return None
    variables = Variables(environment, TORCHRUN_ADVICE)
    variables.require(*NEEDED, related=tuple(LOCAL))
    local = [name if name in environment else default for name, default in LOCAL.items()]
    numbers = variables.numbers("RANK", "WORLD_SIZE", *local)
    knows_host = all(name in environment for name in LOCAL)
    return LauncherVariables(numbers, TORCHRUN_ADVICE, knows_host=knows_host)


# variables with the number of processes or hosts of launchers whose ranks are not read, because
# they do not say where rank 0 is, and what to add before the command
_RANK_0: Final = "MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"
_ON_EVERY_HOST: Final = "torchrun --nproc-per-node GPUS --nnodes {} --node-rank {} --master-addr {}"
UNREAD: Final = {
    "AWS_BATCH_JOB_NUM_NODES": (
        "AWS Batch",
        _ON_EVERY_HOST.format(
            "$AWS_BATCH_JOB_NUM_NODES",
            "$AWS_BATCH_JOB_NODE_INDEX",
            "${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -i)}",
        ),
    ),
    "CLUSTER_SPEC": ("Vertex AI", _ON_EVERY_HOST.format("HOSTS", "NUMBER", "FIRST_HOST")),
    "FLUX_JOB_SIZE": ("Flux", f"env RANK=$FLUX_TASK_RANK WORLD_SIZE=$FLUX_JOB_SIZE {_RANK_0}"),
    "JSM_NAMESPACE_SIZE": (
        "jsrun",
        f"env RANK=$JSM_NAMESPACE_RANK WORLD_SIZE=$JSM_NAMESPACE_SIZE {_RANK_0}",
    ),
    "MV2_COMM_WORLD_SIZE": (
        "MVAPICH",
        f"env RANK=$MV2_COMM_WORLD_RANK WORLD_SIZE=$MV2_COMM_WORLD_SIZE {_RANK_0}",
    ),
    "SM_HOSTS": ("SageMaker", 'distribution={"torch_distributed": {"enabled": True}}'),
}


def refuse_unread(environment: Mapping[str, str]) -> None:
    """Raise `ConfigError` if another launcher started several processes that would train alone."""
    for name, (launcher, line) in UNREAD.items():
        text = environment.get(name, "1")
        if _count(text) > 1:
            where = "to the estimator's arguments" if name == "SM_HOSTS" else "before the command"
            raise ConfigError(
                f"{name}={text} is set by {launcher}, whose rank variables samestep does not "
                f"read, so each process would train alone. Add {where}: {line}; or set "
                f"{', '.join(NEEDED)} for each worker, or unset {name} to run one worker alone"
            )


def _count(text: str) -> int:
    """Return the number of processes or hosts in a number, a list or Vertex AI's cluster."""
    if text.isdecimal():
        return int(text[:9])
    try:
        parsed = json.loads(text)
        pools = parsed["cluster"].values() if isinstance(parsed, dict) else [parsed]
        return sum(map(len, pools))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return 1  # a variable of something else


OPEN_MPI: Final = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
# MPICH's and Intel MPI's mpiexec
HYDRA: Final = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MPI_ADVICE: Final = f"start workers with mpirun, or unset its variables and {TORCHRUN_ADVICE}"


def read_mpi(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Read `mpirun`'s variables, with a port from PMIX_NAMESPACE; None for a single process."""
    if any(name in environment for name in OPEN_MPI):
        names = OPEN_MPI
    elif "PMI_RANK" in environment and (
        "MPI_LOCALNRANKS" in environment or "SLURM_STEP_ID" not in environment
    ):
        names = HYDRA  # srun --mpi=pmi2 sets the first two as well
    else:
        return None
    numbers = Variables(environment, MPI_ADVICE).numbers(*names)
    _, world_size, _, local_world_size = (number.value for number in numbers)
    if world_size == 1:
        return None
    address = LOOPBACK if local_world_size == world_size else None
    job = environment.get("PMIX_NAMESPACE")
    port = PORTS[crc32(job.encode(errors="replace")) % len(PORTS)] if job else None
    return LauncherVariables(numbers, MPI_ADVICE, address, port)


SUBMITIT: Final = (
    "SUBMITIT_LOCAL_GLOBALID",
    "SUBMITIT_LOCAL_NTASKS",
    "SUBMITIT_LOCAL_LOCALID",
    "SUBMITIT_LOCAL_JOB_ID",
)
SUBMITIT_ADVICE: Final = (
    "use executor.update_parameters(tasks_per_node=1) to run one worker alone, or "
    f"{TORCHRUN_ADVICE}"
)


def read_submitit(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Read the variables of submitit's local executor; None for one task, as without it."""
    if environment.get("SUBMITIT_LOCAL_NTASKS", "1") == "1":
        return None
    rank, tasks, local, job = Variables(environment, SUBMITIT_ADVICE).numbers(*SUBMITIT)
    port = port_of(job.value, 0)
    return LauncherVariables([rank, tasks, local, tasks], SUBMITIT_ADVICE, LOOPBACK, port)


# of a TrainJob: torchrun reads options from them
TRAIN_JOB: Final = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
POD_ADVICE: Final = f"start workers with torchrun, or {TORCHRUN_ADVICE}"


def read_pod(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Read a one-worker pod of an Indexed Job, PyTorchJob or TrainJob; None elsewhere."""
    in_pod = "KUBERNETES_SERVICE_HOST" in environment or "JOB_COMPLETION_INDEX" in environment
    if not in_pod or any(name in environment for name in LOCAL):
        return None
    if "WORLD_SIZE" in environment:
        rank = "RANK" if "RANK" in environment else "JOB_COMPLETION_INDEX"
        return _read_pod(environment, rank, *NEEDED[1:])
    return _read_pod(environment, *TRAIN_JOB) if "PET_NNODES" in environment else None


def _read_pod(
    environment: Mapping[str, str], rank: str, world_size: str, address: str, port: str
) -> LauncherVariables:
    variables = Variables(environment, POD_ADVICE)
    variables.require(rank, world_size, address, port)
    # a number, or a word such as auto if torchrun chooses one
    processes = environment.get("PET_NPROC_PER_NODE", "1")
    if processes.isdigit() and processes != "1":
        raise variables.error("PET_NPROC_PER_NODE", "1 if a pod runs one worker")
    local = [Number(0, "a pod's only worker"), Number(1, "a pod's only worker")]
    numbers = [*variables.numbers(rank, world_size), *local]
    return LauncherVariables(numbers, POD_ADVICE, variables.host(address), variables.port(port))


SLURM_ADVICE: Final = (
    "start workers with srun, one task each, or unset SLURM_STEP_NUM_TASKS to run one worker alone"
)
TASK: Final = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
STEP: Final = ("SLURM_JOB_ID", "SLURM_STEP_ID")
TASKS_PER_NODE: Final = "SLURM_STEP_TASKS_PER_NODE"
NODES: Final = "SLURM_STEP_NODELIST"
# of a list such as n[1-3,07],m5
_FIRST_HOST = re.compile(r"((?:[^\[\],\s]|\[[0-9]+(?:[-,][0-9]+)*\])+)(?:,.*)?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def read_slurm(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Read `srun`'s variables; None outside a step of several tasks, as in a batch script."""
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    variables = Variables(environment, SLURM_ADVICE)
    variables.require(*TASK, *STEP, TASKS_PER_NODE, NODES)
    rank, tasks, local_rank, node, job, step = variables.numbers(*TASK, *STEP)
    if "SLURM_NTASKS" in environment and variables.number("SLURM_NTASKS").value != tasks.value:
        raise ConfigError(
            f"{tasks.source}, left over from the step that submitted this job, "
            f"contradicts {variables.number('SLURM_NTASKS').source}; {SLURM_ADVICE}"
        )
    on_node = f"{TASKS_PER_NODE}={environment[TASKS_PER_NODE]} at {node.source}"
    local_tasks = Number(_tasks_on(node.value, tasks.value, variables), on_node)
    address: str | None = LOOPBACK
    if local_tasks.value != tasks.value:
        address = _first_host(rank, node, local_rank, variables)
    numbers, port = [rank, tasks, local_rank, local_tasks], port_of(job.value, step.value)
    return LauncherVariables(numbers, SLURM_ADVICE, address, port)


def port_of(job: int, step: int) -> int:
    """Return 20000 + (31 job + step) mod 9000: jobs on one host tend to have close numbers."""
    return PORTS[(31 * job + step) % len(PORTS)]


def _tasks_on(node: int, tasks: int, variables: Variables) -> int:
    """Return how many of `tasks` run on a node, from text such as 3,1 or 2(x3),1."""
    text = variables.environment[TASKS_PER_NODE]
    counts = [_COUNT.fullmatch(part) for part in text.split(",")]
    runs = [(int(count[1]), int(count[2] or 1)) for count in counts if count]
    if len(runs) < len(counts) or sum(count * nodes for count, nodes in runs) != tasks:
        raise variables.error(TASKS_PER_NODE, f"numbers such as 3,1 or 2(x3) whose sum is {tasks}")
    for count, nodes in runs:
        if node < nodes:
            return count
        node -= nodes
    raise variables.error("SLURM_NODEID", f"a node of {TASKS_PER_NODE}={text}")


def _first_host(rank: Number, node: Number, local_rank: Number, variables: Variables) -> str | None:
    """Return the first node; None if a custom order of tasks puts rank 0 elsewhere."""
    if (rank.value == 0) != (node.value == local_rank.value == 0):
        return None
    first = _FIRST_HOST.fullmatch(variables.environment[NODES])
    host = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", first[1]) if first else ""
    if is_host(host):
        return host
    raise variables.error(NODES, "a list of hosts such as n[1-3,07]")
