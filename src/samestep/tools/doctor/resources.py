"""Checks of what limits a run on this machine: processors, memory and process limits."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Final

from samestep.host import MAX_FILES, available_bytes, cpu_quota, memory_limit, process_limit
from samestep.tools import format_bytes, some, whole_number
from samestep.tools.doctor.system import Case, Finding, Section, System, good, note, problem

SHARED: Final = "/dev/shm"  # noqa: S108  a mount point, not a temporary file
# for the batches that loader processes prefetch; containers get 64 MiB by default
LEAST_SHARED_BYTES: Final = 512 << 20
LEAST_WORKER_BYTES: Final = 512 << 20  # torch and a small model
BUS_ERROR: Final = (
    "loader processes use it to pass batches; when it is full, they die with a bus error."
)
PAGES: Final = "/sys/kernel/mm/transparent_hugepage"
INFINIBAND: Final = "/sys/class/infiniband"
# The launcher has about 20 open files and 12 per worker, a worker about 50 and 5 per other worker.
# Each tensor of a prefetched batch is a file, too, as is everything that the data set opens.
FILES: Final = 512
FILES_PER_WORKER: Final = 16
PROCESSES: Final = 64
PROCESSES_PER_WORKER: Final = 32  # threads and loader processes
ENOUGH: Final = 65536


def examine_processors(case: Case) -> Section:
    """Report processors and threads."""
    system = case.system
    cores, allowed = system.cores()
    lines = (line.partition(":") for line in (system.text("/proc/cpuinfo") or "").splitlines())
    models = (value.strip() for name, _, value in lines if name.strip() == "model name")
    facts = {
        "model": next(models, None),
        "cores": cores,
        "cores_allowed": allowed,
        "cores_quota": system.group_limit(cpu_quota),
        "threads_per_worker": _threads(system),
        "OMP_NUM_THREADS": system.environment.get("OMP_NUM_THREADS", "not set"),
        "MKL_NUM_THREADS": system.environment.get("MKL_NUM_THREADS", "not set"),
        "torch_threads": case.torch.get("threads"),
    }
    return Section("processors", facts, list(_check_processors(case)))


def usable_cores(system: System) -> float | None:
    """Return how many cores this process may use, limited by affinity and by the CPU quota."""
    limits = (system.cores()[1], cpu_quota(system.text))
    return min((cores for cores in limits if cores is not None), default=None)


def _threads(system: System) -> int:
    return max(1, whole_number(system.environment.get("SAMESTEP_THREADS")) or 1)


def _check_processors(case: Case) -> Iterator[Finding]:
    system = case.system
    usable, allowed, quota = usable_cores(system), system.cores()[1], cpu_quota(system.text)
    threads = _threads(system)
    run = f"{some(case.workers, 'worker')} with {some(threads, 'thread')} each"
    if usable is not None and case.workers * threads > max(1.0, usable):
        yield problem(
            f"{run} exceed the {some(usable, 'core')} of this process and wait for each other.",
            f"samestep run -n {max(1, int(usable / threads))}, or give this process more cores "
            "(docker run --cpus, resources.limits.cpu, srun --cpus-per-task)",
        )
    elif usable is not None:
        yield good(f"{run} fit on {some(usable, 'core')}")
    if quota is not None and allowed is not None and quota < allowed:
        yield note(
            f"a CPU quota limits this process to the time of {quota:g} of the {allowed} cores that "
            "it sees. Code that starts one thread per core, such as a script's own thread pools, "
            "is throttled repeatedly.",
            f"size thread pools and loader_workers for {some(max(1, int(quota)), 'core')}, or "
            "raise the quota",
        )
    wanted = system.environment.get("OMP_NUM_THREADS")
    if wanted is not None and wanted != str(threads):
        yield note(
            f"OMP_NUM_THREADS={wanted} has no effect on workers. They compute with "
            f"{some(threads, 'thread')}, because the bits depend on the number of threads.",
            f"pass --threads {wanted} to every samestep run if you want that number",
        )


def examine_memory(case: Case) -> Section:
    """Report memory of this host and of the container, swap, and shared memory."""
    system = case.system
    memory, shared = system.memory(), system.space(SHARED)
    facts = {
        "total_bytes": memory.total if memory else None,
        "available_bytes": available_bytes(system.text),
        "container_limit_bytes": system.group_limit(memory_limit),
        "swap_bytes": memory.swap if memory else None,
        "swap_used_bytes": memory.swap_used if memory else None,
        "huge_pages": _selected(system.text(f"{PAGES}/enabled")),
        "shared_memory_huge_pages": _selected(system.text(f"{PAGES}/shmem_enabled")),
        "dev_shm_bytes": shared.total_bytes if shared else None,
        "dev_shm_free_bytes": shared.free_bytes if shared else None,
        "failing_calls": system.lacking_calls(),
    }
    return Section("memory", facts, [*_check_memory(case), *_check_shared(system)])


def _selected(text: str | None) -> str | None:
    """Return the word in brackets of a list such as "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0] if text and "[" in text else None


def _check_memory(case: Case) -> Iterator[Finding]:
    read, needed = case.system.text, case.workers * LEAST_WORKER_BYTES
    free, limit, memory = available_bytes(read), memory_limit(read), case.system.memory()
    if free is not None and free < needed:
        within = f" (container limit: {format_bytes(limit)})" if limit else ""
        yield problem(
            f"{format_bytes(free)} of memory is available{within}; {some(case.workers, 'worker')} "
            f"need at least {format_bytes(needed)}, even for a small model. The kernel kills "
            "workers when memory runs out.",
            "samestep run with fewer workers, or give more memory (docker run --memory, "
            "resources.limits.memory, sbatch --mem)",
        )
    elif free is not None:
        yield good(f"{format_bytes(free)} of memory is available")
    if memory and memory.swap_used > LEAST_WORKER_BYTES:
        yield note(
            f"{format_bytes(memory.swap_used)} is swapped out: this machine ran short of memory, "
            "and a step that reads swapped memory delays all workers.",
            "stop other programs (ps aux --sort=-rss shows them), then swapoff -a && swapon -a",
        )


def _check_shared(system: System) -> Iterator[Finding]:
    shared = system.space(SHARED)
    if shared is None:
        yield note(
            f"{SHARED} does not exist; loader processes need it to pass batches to workers.",
            f"mount -t tmpfs tmpfs {SHARED}, or loader_workers=0",
        )
    elif shared.total_bytes < LEAST_SHARED_BYTES:
        yield problem(
            f"{SHARED} has a size of only {format_bytes(shared.total_bytes)}; {BUS_ERROR}",
            f'mount an emptyDir with "medium: Memory" at {SHARED} in the pod, as `samestep submit '
            "kubernetes` does"
            if system.in_pod()
            else "docker run --shm-size=8g (or --ipc=host); outside of a container: "
            f"mount -o remount,size=8g {SHARED}",
        )
    elif shared.free_bytes < LEAST_SHARED_BYTES:
        yield problem(
            f"{SHARED} has only {format_bytes(shared.free_bytes)} free of "
            f"{format_bytes(shared.total_bytes)}; {BUS_ERROR}",
            f"remove files that ended programs left there (ls -l {SHARED})",
        )
    else:
        free = format_bytes(shared.free_bytes)
        yield good(f"{SHARED} has {free} free for batches of loader processes")
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
    else:
        yield good("workers of this host can share memory")


def examine_limits(case: Case) -> Section:
    """Report limits of open files, processes and locked memory."""
    system = case.system
    soft, hard = system.process_limits(resource.RLIMIT_NOFILE)
    facts = {
        "open_files": soft,
        "open_files_hard_limit": hard,
        "open_files_needed": FILES + FILES_PER_WORKER * case.workers,
        "processes": system.process_limits(resource.RLIMIT_NPROC)[0],
        "container_processes": system.group_limit(process_limit),
        "locked_memory_bytes": system.process_limits(resource.RLIMIT_MEMLOCK)[0],
        "rdma_devices": system.names(INFINIBAND),
    }
    findings = [*_check_files(case), *_check_processes(case), *_check_locked_memory(system)]
    return Section("limits", facts, findings)


def _check_files(case: Case) -> Iterator[Finding]:
    soft, hard = case.system.process_limits(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_WORKER * case.workers
    # a run raises the soft limit
    raised = min(hard, MAX_FILES) if isinstance(hard, int) else MAX_FILES
    allowed = max(soft, raised) if isinstance(soft, int) else soft
    if isinstance(allowed, int) and allowed < needed:
        more = max(MAX_FILES, needed)
        yield problem(
            f"a process may open {allowed} files, but a run with {some(case.workers, 'worker')} "
            f"needs about {needed} for sockets, shared memory and prefetched batches; it would "
            'fail with "Too many open files".',
            f"docker run --ulimit nofile={more}; without a container, add "
            f"`* - nofile {more}` to /etc/security/limits.conf and log in again",
        )
    else:
        yield good(f"{allowed} open files are allowed, and {needed} are enough")


def _check_processes(case: Case) -> Iterator[Finding]:
    system = case.system
    limits = (system.process_limits(resource.RLIMIT_NPROC)[0], process_limit(system.text))
    allowed = min((limit for limit in limits if isinstance(limit, int)), default=None)
    needed = PROCESSES + PROCESSES_PER_WORKER * case.workers
    if allowed is not None and allowed < needed:
        yield problem(
            f"{allowed} processes and threads are allowed, but workers with loader processes need "
            f'about {needed}; starting them would fail with "Resource temporarily unavailable".',
            f"ulimit -u {ENOUGH}, docker run --pids-limit={ENOUGH}, or podPidsLimit of the kubelet",
        )


def _check_locked_memory(system: System) -> Iterator[Finding]:
    locked, devices = system.process_limits(resource.RLIMIT_MEMLOCK)[0], system.names(INFINIBAND)
    if devices and isinstance(locked, int):
        yield problem(
            f"a process may lock {locked} bytes of memory, but NCCL locks its buffers to register "
            f"them with {', '.join(devices)}.",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in the "
            "unit of slurmd)",
        )
