"""How many files and processes this process may have, and how much memory it may lock."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from samestep.host import process_limit
from samestep.tools.doctor.section import Section, change, good, some
from samestep.tools.doctor.system import UNLIMITED, as_fact, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding
    from samestep.tools.doctor.system import System

# The launcher has about 20 files and 12 a worker, a worker about 50 and 5 for each other one; each
# tensor of a batch that loader processes have fetched ahead is a file, too, as is whatever the data
# set opens.
FILES: Final = 512
FILES_A_WORKER: Final = 16
PROCESSES: Final = 64
PROCESSES_A_WORKER: Final = 32  # its threads and loader processes
ENOUGH: Final = 65536

Limit = int | str | None  # None where the system does not tell


def examine(case: Case) -> Section:
    """Tell of limits."""
    system = case.system
    facts = {
        "open_files": limits(system, "Max open files")[0],
        "open_files_at_most": limits(system, "Max open files")[1],
        "open_files_needed": files_needed(case.workers),
        "processes": limits(system, "Max processes")[0],
        "processes_of_container": as_fact(system, process_limit(system.text)),
        "locked_memory_bytes": limits(system, "Max locked memory")[0],
        "rdma_devices": system.names("/sys/class/infiniband"),
    }
    return Section(
        "limits", facts, [*_judge_files(case), *_judge_processes(case), *_judge_locked(system)]
    )


def files_needed(workers: int) -> int:
    """Return how many files a process of a run may have open at once."""
    return FILES + FILES_A_WORKER * workers


def limits(system: System, name: str) -> tuple[Limit, Limit]:
    """Return the soft and the hard limit: a number, or unlimited."""
    for line in (system.text("/proc/self/limits") or "").splitlines():
        if line.startswith(name):
            soft, hard = [*re.split(r"\s{2,}", line), "", ""][1:3]
            return _read(soft), _read(hard)
    return None, None


def _read(text: str) -> Limit:
    return UNLIMITED if text == UNLIMITED else whole_number(text)


def _judge_files(case: Case) -> Iterator[Finding]:
    soft, hard = limits(case.system, "Max open files")
    needed = files_needed(case.workers)
    if isinstance(soft, int) and soft < needed:
        may_raise = hard == UNLIMITED or (isinstance(hard, int) and hard >= needed)
        most = min(ENOUGH, hard) if isinstance(hard, int) else ENOUGH
        yield change(
            f"a process may open {soft} files; a run of {some(case.workers, 'worker')} needs about {needed} for sockets, shared memory and "
            'batches that were fetched ahead, and fails with "Too many open files".',
            f"ulimit -n {most}"
            if may_raise
            else f"docker run --ulimit nofile={ENOUGH}; elsewhere `* - nofile {ENOUGH}` in /etc/security/limits.conf, and log in again",
        )
    elif soft is not None:
        yield good(f"{soft} open files are allowed, {needed} are enough")


def _judge_processes(case: Case) -> Iterator[Finding]:
    allowed = [
        limit
        for limit in (limits(case.system, "Max processes")[0], process_limit(case.system.text))
        if isinstance(limit, int)
    ]
    needed = PROCESSES + PROCESSES_A_WORKER * case.workers
    if allowed and min(allowed) < needed:
        yield change(
            f"there may be {min(allowed)} processes and threads; workers with loader processes need about {needed}, and "
            'starting them fails with "Resource temporarily unavailable".',
            f"ulimit -u {ENOUGH}, docker run --pids-limit={ENOUGH}, or podPidsLimit of the kubelet",
        )


def _judge_locked(system: System) -> Iterator[Finding]:
    locked, devices = limits(system, "Max locked memory")[0], system.names("/sys/class/infiniband")
    if devices and isinstance(locked, int):
        yield change(
            f"a process may lock {locked} bytes of memory, and NCCL registers its buffers with {', '.join(devices)} by locking them.",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in slurmd's unit)",
        )
