"""What a launcher tells a worker of its place, by variables of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

from samestep.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
# for derived ones: below those that Linux gives to outgoing connections, and torchrun's 29500
PORTS: Final = range(20_000, 29_000)
_WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")


class Number(NamedTuple):
    """A number, and where it is from as a message says it: SLURM_PROCID=1."""

    value: int
    source: str


@dataclass(frozen=True)
class LauncherVariables:
    """`rank` of `workers`, on its host `local_rank` of `local_world_size`, and where rank 0 listens: None where the launcher does not say.

    `what_to_do` ends the message of an error, should the numbers contradict each other.
    """

    rank: Number
    world_size: Number
    local_rank: Number
    local_world_size: Number
    what_to_do: str
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Variables:
    """The environment, read with errors that say what a variable says and, in the words of `what_to_do`, how to mend it."""

    environment: Mapping[str, str]
    what_to_do: str

    def require(self, *names: str, beside: Sequence[str] = ()) -> None:
        """Raise `ConfigError` where some are not set, which tells of those that are, and of those `beside` them."""
        missing = [name for name in names if name not in self.environment]
        if missing:
            there = [
                f"{name}={self.environment[name]}"
                for name in (*names, *beside)
                if name in self.environment
            ]
            raise ConfigError(
                f"{', '.join(there)} is set and {', '.join(missing)} is not; {self.what_to_do}"
            )

    def number(self, name: str) -> Number:
        """Return what one says. Raises `ConfigError` where that is no whole number."""
        text = self.environment[name]
        if not _WHOLE_NUMBER.fullmatch(text):
            raise self.error(name, "a whole number")
        return Number(int(text), f"{name}={text}")

    def numbers(self, *names: str) -> list[Number]:
        """Return what several say. Raises `ConfigError` where one is not set or no whole number."""
        self.require(*names)
        return [self.number(name) for name in names]

    def host(self, name: str) -> str:
        """Return a host's name or address. Raises `ConfigError` where it cannot be one."""
        if not is_host(self.environment[name]):
            raise self.error(name, "a host name or an address")
        return self.environment[name]

    def port(self, name: str) -> int:
        """Return a port. Raises `ConfigError` where it cannot be one."""
        port = self.number(name).value
        if not 0 < port < 2**16:
            raise self.error(name, "a port from 1 to 65535")
        return port

    def error(self, name: str, expected: str) -> ConfigError:
        """Return the error of a variable that does not say what is expected."""
        return ConfigError(
            f"{name}={self.environment[name]!r} was given; expected {expected}; {self.what_to_do}"
        )


def is_host(text: str) -> bool:
    """Tell whether a text can be looked up as a host."""
    try:
        return text.encode("idna") != b"" and text.isprintable() and " " not in text
    except UnicodeError:  # a label that is empty or too long
        return False


NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# where not set, all workers are on one host
LOCAL: Final = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}
VARIABLES: Final = (*NEEDED, *LOCAL)
TORCHRUN_ADVICE: Final = (
    f"set all of {', '.join(NEEDED)} as torchrun does, or unset all to run one worker alone"
)

OPEN_MPI: Final = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
# MPICH's and Intel MPI's mpiexec
HYDRA: Final = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MPI_WHAT_TO_DO: Final = f"start workers with mpirun, or unset its variables and {TORCHRUN_ADVICE}"

# a TrainJob's, from which torchrun reads options
TRAIN_JOB: Final = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
POD_WHAT_TO_DO: Final = f"start workers with torchrun, or {TORCHRUN_ADVICE}"


def read_torchrun(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Return the place that RANK, WORLD_SIZE and so on say, as torchrun sets them; None where none is set."""
    if not any(name in environment for name in VARIABLES):
        return None
    variables = Variables(environment, TORCHRUN_ADVICE)
    variables.require(*NEEDED, beside=tuple(LOCAL))
    local = [name if name in environment else default for name, default in LOCAL.items()]
    rank, world_size, local_rank, local_world_size = variables.numbers("RANK", "WORLD_SIZE", *local)
    return LauncherVariables(rank, world_size, local_rank, local_world_size, TORCHRUN_ADVICE)


def read_mpi(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Return the place that `mpirun` gave; None where it started one process or none. Its port is derived from PMIX_NAMESPACE."""
    if any(name in environment for name in OPEN_MPI):
        names = OPEN_MPI
    elif "PMI_RANK" in environment and (
        "MPI_LOCALNRANKS" in environment or "SLURM_STEP_ID" not in environment
    ):
        names = HYDRA  # srun --mpi=pmi2 sets the first two as well
    else:
        return None
    rank, world_size, local_rank, local_world_size = Variables(environment, MPI_WHAT_TO_DO).numbers(
        *names
    )
    if world_size.value == 1:
        return None
    address = LOOPBACK if local_world_size.value == world_size.value else None
    job = environment.get("PMIX_NAMESPACE")
    port = PORTS[crc32(job.encode(errors="replace")) % len(PORTS)] if job else None
    return LauncherVariables(
        rank, world_size, local_rank, local_world_size, MPI_WHAT_TO_DO, address, port
    )


def read_pod(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Return the place of a pod of Kubernetes that runs one worker: of an Indexed Job, a PyTorchJob or a TrainJob; None in no such pod."""
    in_pod = "KUBERNETES_SERVICE_HOST" in environment or "JOB_COMPLETION_INDEX" in environment
    if not in_pod or any(name in environment for name in LOCAL):
        return None
    if "WORLD_SIZE" in environment:
        rank = "RANK" if "RANK" in environment else "JOB_COMPLETION_INDEX"
        return _pod(environment, rank, *NEEDED[1:])
    return _pod(environment, *TRAIN_JOB) if "PET_NNODES" in environment else None


def _pod(
    environment: Mapping[str, str], rank: str, world_size: str, address: str, port: str
) -> LauncherVariables:
    variables = Variables(environment, POD_WHAT_TO_DO)
    variables.require(rank, world_size, address, port)
    # a number, or a word where torchrun is to find one
    processes = environment.get("PET_NPROC_PER_NODE", "1")
    if processes.isdigit() and processes != "1":
        raise variables.error("PET_NPROC_PER_NODE", "1 where a pod runs one worker")
    return LauncherVariables(
        rank=variables.number(rank),
        world_size=variables.number(world_size),
        local_rank=Number(0, "a pod's only worker"),
        local_world_size=Number(1, "a pod's only worker"),
        what_to_do=POD_WHAT_TO_DO,
        address=variables.host(address),
        port=variables.port(port),
    )


SLURM_ADVICE: Final = (
    "start workers with srun, one task each, or unset SLURM_STEP_NUM_TASKS to run one worker alone"
)
NUMBERS: Final = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
TASKS_PER_NODE: Final = "SLURM_STEP_TASKS_PER_NODE"
NODES: Final = "SLURM_STEP_NODELIST"
MOST_RANGES: Final = 9  # of one host's name
_HOST = re.compile(r"(?:[^\[\],\s]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def read_slurm(environment: Mapping[str, str]) -> LauncherVariables | None:
    """Return the place that `srun` gave; None outside a step of several tasks, as in a batch script or a shell in an allocation.

    Raises `ConfigError` where variables are missing, garbled, or left from another step.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    variables = Variables(environment, SLURM_ADVICE)
    variables.require(*NUMBERS, TASKS_PER_NODE, NODES)
    rank, tasks, local_rank, node, job, step = map(variables.number, NUMBERS)
    if "SLURM_NTASKS" in environment and variables.number("SLURM_NTASKS").value != tasks.value:
        of_job = variables.number("SLURM_NTASKS").source
        raise ConfigError(
            f"{tasks.source}, left from the step that submitted this job, contradicts {of_job}; {SLURM_ADVICE}"
        )
    local_tasks = _tasks_on(node.value, tasks.value, variables)
    return LauncherVariables(
        rank=rank,
        world_size=tasks,
        local_rank=local_rank,
        local_world_size=Number(
            local_tasks, f"{TASKS_PER_NODE}={environment[TASKS_PER_NODE]} at {node.source}"
        ),
        what_to_do=SLURM_ADVICE,
        address=LOOPBACK
        if local_tasks == tasks.value
        else _host_of_rank_0(rank, node, local_rank, variables),
        port=port_of(job.value, step.value),
    )


def port_of(job: int, step: int) -> int:
    """Return 20000 + (31 job + step) mod 9000: jobs and steps that may share a host have numbers close to each other."""
    return PORTS[(31 * job + step) % len(PORTS)]


def expand_hosts(text: str) -> Iterator[str]:
    """Yield the hosts of a list as Slurm writes it, one by one: `n[1-3,07-09],m5` is n1, n2, n3, n07, n08, n09, m5.

    Raises `ValueError` where it is no such list.
    """
    hosts = _HOST.findall(text)
    if not hosts or ",".join(hosts) != text or any(host.count("[") > MOST_RANGES for host in hosts):
        raise ValueError(f"{text!r} is no list of hosts")
    for host in hosts:
        yield from _expand(host)


def _expand(host: str) -> Iterator[str]:
    before, bracket, rest = host.partition("[")
    if not bracket:
        yield host
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{part!r} counts down")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{before}{number:0{len(first)}}{tail}" for tail in _expand(after))


def _tasks_on(node: int, tasks: int, variables: Variables) -> int:
    """Return how many of `tasks` a node has, of a text such as 3,1 or 2(x3),1."""
    counts = [_COUNT.fullmatch(part) for part in variables.environment[TASKS_PER_NODE].split(",")]
    runs = [(int(count[1]), int(count[2] or 1)) for count in counts if count]
    if len(runs) < len(counts) or sum(count * nodes for count, nodes in runs) != tasks:
        raise variables.error(TASKS_PER_NODE, f"numbers such as 3,1 or 2(x3) whose sum is {tasks}")
    for count, nodes in runs:
        if node < nodes:
            return count
        node -= nodes
    raise variables.error(
        "SLURM_NODEID", f"a node of {TASKS_PER_NODE}={variables.environment[TASKS_PER_NODE]}"
    )


def _host_of_rank_0(
    rank: Number, node: Number, local_rank: Number, variables: Variables
) -> str | None:
    """Return the first node; None where tasks were dealt in an order of the user's, and rank 0 is elsewhere."""
    if (rank.value == 0) != (node.value == local_rank.value == 0):
        return None
    with suppress(ValueError):
        host = next(expand_hosts(variables.environment[NODES]))
        if is_host(host):
            return host
    raise variables.error(NODES, "a list of hosts such as n[1-3,07]")
