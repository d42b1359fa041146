"""Checks of what limits a run on this machine: processors, memory and process limits."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Final

from samestep.host import (
    MAX_FILES,
    available_bytes,
    counted,
    memory_limit,
    process_limit,
    whole_number,
)
from samestep.tools import format_bytes
from samestep.tools.doctor.system import Case, Finding, note, problem

SHARED: Final = "/dev/shm"  # noqa: S108  a mount point, not a temporary file
# for the batches that loader processes prefetch; containers get 64 MiB by default
LEAST_SHARED_BYTES: Final = 512 << 20
LEAST_WORKER_BYTES: Final = 512 << 20  # torch and a small model
BUS_ERROR: Final = (
    "loader processes use it to pass batches; when it is full, they die with a bus error."
)
INFINIBAND: Final = "/sys/class/infiniband"
# The launcher has about 20 open files and 12 per worker, a worker about 50 and 5 per other worker.
# Each tensor of a prefetched batch is a file, too, as is everything that the data set opens.
FILES: Final = 512
FILES_PER_WORKER: Final = 16
PROCESSES: Final = 64
PROCESSES_PER_WORKER: Final = 32  # threads and loader processes
ENOUGH: Final = 65536


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
    wanted = environment.get("OMP_NUM_THREADS")
    if wanted is not None and wanted != str(threads):
        yield note(
            f"OMP_NUM_THREADS={wanted} has no effect on workers. They compute with "
            f"{counted(threads, 'thread')}, because the bits depend on the number of threads.",
            f"pass --threads {wanted} to every samestep run if you want that number",
        )


def check_memory(case: Case) -> Iterator[Finding]:
    """Compare the available memory with what the workers need at least."""
    read, needed = case.system.text, case.workers * LEAST_WORKER_BYTES
    free, limit = available_bytes(read), memory_limit(read)
    if free is not None and free < needed:
        within = f" (container limit: {format_bytes(limit)})" if limit else ""
        yield problem(
            f"{format_bytes(free)} of memory is available{within}; "
            f"{counted(case.workers, 'worker')} need at least {format_bytes(needed)}, "
            "even for a small model. The kernel kills workers when memory runs out.",
            "samestep run with fewer workers, or give more memory (docker run --memory, "
            "resources.limits.memory, sbatch --mem)",
        )


def check_shared_memory(case: Case) -> Iterator[Finding]:
    """Report too little shared memory, and a sandbox that prevents it between workers."""
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
            f"{format_bytes(shared.total)}; {BUS_ERROR}",
            fix,
        )
    if lacking := system.lacking_calls():
        copies = (
            " In-memory snapshots do not work either: after a worker is killed, the run resumes "
            "from its newest snapshot."
        )
        yield problem(
            f"{' and '.join(lacking)} cannot be used, so workers of one host communicate over the "
            f"loopback interface, not through shared memory.{copies * ('memfd_create' in lacking)}",
            "use Linux 5.3 or newer and a Python built on it, and in a container a seccomp profile "
            "that allows these calls (docker run --security-opt seccomp=unconfined shows whether "
            "the profile is the cause)",
        )


def check_open_files(case: Case) -> Iterator[Finding]:
    """Compare the limit of open files with what the workers need."""
    soft, hard = case.system.process_limits(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_WORKER * case.workers
    # a run raises the soft limit
    raised = MAX_FILES if hard is None else min(hard, MAX_FILES)
    allowed = None if soft is None else max(soft, raised)
    if allowed is not None and allowed < needed:
        more = max(MAX_FILES, needed)
        yield problem(
            f"a process may open {allowed} files, but a run with {counted(case.workers, 'worker')} "
            f"needs about {needed} for sockets, shared memory and prefetched batches; it would "
            'fail with "Too many open files".',
            f"docker run --ulimit nofile={more}; without a container, add "
            f"`* - nofile {more}` to /etc/security/limits.conf and log in again",
        )


def check_processes(case: Case) -> Iterator[Finding]:
    """Compare the limits of processes, also of a container, with what the workers need."""
    system = case.system
    limits = (system.process_limits(resource.RLIMIT_NPROC)[0], process_limit(system.text))
    allowed = min((limit for limit in limits if limit is not None), default=None)
    needed = PROCESSES + PROCESSES_PER_WORKER * case.workers
    if allowed is not None and allowed < needed:
        yield problem(
            f"{allowed} processes and threads are allowed, but workers with loader processes need "
            f'about {needed}; starting them would fail with "Resource temporarily unavailable".',
            f"ulimit -u {ENOUGH}, docker run --pids-limit={ENOUGH}, or podPidsLimit of the kubelet",
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
