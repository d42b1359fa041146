"""What Slurm tells a task of a job step."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from samestep.errors import ConfigError
from samestep.launch.place.told import LOOPBACK, PORTS, Number, Told, Variables, is_host

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WHAT_TO_DO: Final = (
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


def told_by_slurm(environment: Mapping[str, str]) -> Told | None:
    """Return the place that `srun` gave; None outside a step of several tasks, as in a batch script or a shell in an allocation.

    Raises `ConfigError` where variables are missing, garbled, or left from another step.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    variables = Variables(environment, WHAT_TO_DO)
    variables.require(*NUMBERS, TASKS_PER_NODE, NODES)
    rank, tasks, local_rank, node, job, step = map(variables.number, NUMBERS)
    if "SLURM_NTASKS" in environment and variables.number("SLURM_NTASKS").value != tasks.value:
        of_job = variables.number("SLURM_NTASKS").source
        raise ConfigError(
            f"{tasks.source}, left from the step that submitted this job, contradicts {of_job}; {WHAT_TO_DO}"
        )
    local_tasks = _tasks_on(node.value, tasks.value, variables)
    return Told(
        rank=rank,
        workers=tasks,
        local_rank=local_rank,
        local_workers=Number(
            local_tasks, f"{TASKS_PER_NODE}={environment[TASKS_PER_NODE]} at {node.source}"
        ),
        what_to_do=WHAT_TO_DO,
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
