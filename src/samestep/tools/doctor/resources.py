"""Checks of what limits a run on this machine: processors, shared and locked memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Final

from samestep.host import counted, whole_number
from samestep.tools import format_bytes
from samestep.tools.doctor.system import Case, Finding, problem

SHARED: Final = "/dev/shm"  # noqa: S108  a mount point, not a temporary file
# for the batches that loader processes prefetch; containers get 64 MiB by default
LEAST_SHARED_BYTES: Final = 512 << 20
INFINIBAND: Final = "/sys/class/infiniband"


def check_processors(case: Case) -> Iterator[Finding]:
    """Compare workers and their threads with the cores that this process may use."""
    environment, cores = case.system.environment, case.system.usable_cores()
    threads = max(1, whole_number(environment.get("SAMESTEP_THREADS")) or 1)
    run = f"{counted(case.workers, 'worker')} with {counted(threads, 'thread')} each"
    if case.workers * threads > cores:
        yield problem(
            f"{run} exceed the {counted(cores, 'core')} of this process and wait for each other.",
            f"samestep run -n {max(1, cores // threads)}, or give this process more cores "
            "(docker run --cpus, resources.limits.cpu, srun --cpus-per-task)",
        )


def check_shared_memory(case: Case) -> Iterator[Finding]:
    """Report too little shared memory for the batches of loader processes."""
    system = case.system
    if (shared := system.space(SHARED)) and shared.free < LEAST_SHARED_BYTES:
        fix = (
            f'mount an emptyDir with "medium: Memory" at {SHARED} in the pod, as `samestep submit '
            "kubernetes` does"
            if system.in_pod()
            else "docker run --shm-size=8g (or --ipc=host); outside of a container: "
            f"mount -o remount,size=8g {SHARED}"
        )
        if shared.total >= LEAST_SHARED_BYTES:
            fix = f"remove files that ended programs left there (ls -l {SHARED})"
        yield problem(
            f"{SHARED} has only {format_bytes(shared.free)} free of "
            f"{format_bytes(shared.total)}; loader processes use it to pass batches; when it is "
            "full, they die with a bus error.",
            fix,
        )


def check_locked_memory(case: Case) -> Iterator[Finding]:
    """Report a limit of locked memory on a machine with InfiniBand."""
    locked, _ = case.system.process_limits(resource.RLIMIT_MEMLOCK)
    devices = case.system.names(INFINIBAND)
    if devices and locked is not None:
        yield problem(
            f"a process may lock {locked} bytes of memory, but NCCL locks its buffers to register "
            f"them with {', '.join(devices)}.",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in the "
            "unit of slurmd)",
        )
