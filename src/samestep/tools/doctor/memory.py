"""Memory of this host and of the container, swap, and the memory that processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from samestep.host import available_bytes, memory_limit, parse_numbers
from samestep.tools.doctor.launchers import in_pod
from samestep.tools.doctor.section import Section, change, good, note, some
from samestep.tools.doctor.system import as_fact
from samestep.tools.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding
    from samestep.tools.doctor.system import System

SHARED: Final = "/dev/shm"  # noqa: S108  the place has this name
# what loader processes fetch ahead; containers get 64 MiB unless they are given more
LEAST_SHARED_BYTES: Final = 512 << 20
LEAST_WORKER_BYTES: Final = 512 << 20  # torch and a small model
NO_HOT_COPIES: Final = (
    "; nor are there hot copies: after one is killed, the run goes on from its newest snapshot"
)
PAGES: Final = "/sys/kernel/mm/transparent_hugepage"


def examine(case: Case) -> Section:
    """Tell of memory."""
    counted = parse_numbers(case.system.text("/proc/meminfo"))
    shared = case.system.space(SHARED)
    swap, unused = counted.get("SwapTotal"), counted.get("SwapFree")
    facts = {
        "total_bytes": _kibibytes(counted.get("MemTotal")),
        "available_bytes": available(case.system),
        "container_limit_bytes": as_fact(case.system, memory_limit(case.system.text)),
        "swap_bytes": _kibibytes(swap),
        "swap_used_bytes": None if swap is None or unused is None else _kibibytes(swap - unused),
        "huge_pages": _chosen(case.system.text(f"{PAGES}/enabled")),
        "huge_pages_of_shared_memory": _chosen(case.system.text(f"{PAGES}/shmem_enabled")),
        "dev_shm_bytes": shared.total_bytes if shared else None,
        "dev_shm_free_bytes": shared.free_bytes if shared else None,
        "calls_that_fail": case.system.lacking_calls(),
    }
    return Section("memory", facts, [*_judge_memory(case), *_judge_shared(case)])


def available(system: System) -> int | None:
    """Return the bytes that can be had without swapping and within the container's limit."""
    return available_bytes(system.text)


def _judge_memory(case: Case) -> Iterator[Finding]:
    free, needed = available(case.system), case.workers * LEAST_WORKER_BYTES
    if free is not None and free < needed:
        limit = memory_limit(case.system.text)
        within = f" of the {size(limit)} that this container may use" if limit else ""
        yield change(
            f"{size(free)} of memory are left{within}; {some(case.workers, 'worker')} would need {size(needed)} even for a small "
            "model, and the kernel kills them where memory runs out.",
            "samestep run with fewer workers, or give more memory (docker run --memory, resources.limits.memory, sbatch --mem)",
        )
    elif free is not None:
        yield good(f"{size(free)} of memory are left")
    counted = parse_numbers(case.system.text("/proc/meminfo"))
    swapped = 1024 * (counted.get("SwapTotal", 0) - counted.get("SwapFree", 0))
    if swapped > LEAST_WORKER_BYTES:
        yield note(
            f"{size(swapped)} are swapped out: memory ran short here, and a step that has to read it back makes all workers wait.",
            "end what else uses memory (ps aux --sort=-rss), then swapoff -a && swapon -a",
        )


def _judge_shared(case: Case) -> Iterator[Finding]:
    shared = case.system.space(SHARED)
    if shared is None:
        yield note(
            f"{SHARED} cannot be seen: loader processes hand over batches there, and without it fail.",
            f"mount -t tmpfs tmpfs {SHARED}, or loader_workers=0",
        )
    elif shared.total_bytes < LEAST_SHARED_BYTES:
        yield change(
            f"{SHARED} holds {size(shared.total_bytes)}: loader processes hand over batches there, and die of a bus error when it is full.",
            _more_shared(case.system),
        )
    elif shared.free_bytes < LEAST_SHARED_BYTES:
        yield change(
            f"{SHARED} has {size(shared.free_bytes)} left of {size(shared.total_bytes)}: loader processes hand over batches there, and die "
            "of a bus error when it is full.",
            f"remove what ended programs left there (ls -l {SHARED})",
        )
    else:
        yield good(f"{SHARED} has {size(shared.free_bytes)} for the batches of loader processes")
    if lacking := case.system.lacking_calls():
        yield change(
            f"this machine lacks {' and '.join(lacking)}, so workers of one host talk over the network's loopback, and not through memory "
            f"that they share{NO_HOT_COPIES * ('memfd_create' in lacking)}.",
            "a kernel from 5.3 on, a Python built on one, and in a container a seccomp profile that allows them "
            "(docker run --security-opt seccomp=unconfined shows whether that is it)",
        )
    else:
        yield good("workers of this host can share memory")


def _more_shared(system: System) -> str:
    if in_pod(system):
        return f'mount an emptyDir with "medium: Memory" at {SHARED} in the pod, as `samestep submit kubernetes` does'
    return "docker run --shm-size=8g (or --ipc=host); on a machine of your own: mount -o remount,size=8g /dev/shm"


def _kibibytes(count: int | None) -> int | None:
    return None if count is None else 1024 * count


def _chosen(text: str | None) -> str | None:
    """Return the word in brackets, of a list such as "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0] if text and "[" in text else None
