"""Processors, and how many threads share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestep.host import cpu_quota
from samestep.tools.doctor.section import Section, change, good, note, some
from samestep.tools.doctor.system import as_fact, whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding
    from samestep.tools.doctor.system import System


def examine(case: Case) -> Section:
    """Tell of processors and threads."""
    system = case.system
    environment = system.environment
    facts = {
        "model": _model(system),
        "cores": count_of(system.text("/sys/devices/system/cpu/online")),
        "cores_allowed": allowed_cores(system),
        "cores_quota": as_fact(system, cpu_quota(system.text)),
        "threads_a_worker": threads(system),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "not set"),
        "MKL_NUM_THREADS": environment.get("MKL_NUM_THREADS", "not set"),
        "torch_threads": case.torch.get("threads"),
    }
    return Section("processors", facts, list(_judge(case)))


def usable_cores(system: System) -> float | None:
    """Return how many cores' time this process may use: by affinity and by quota. None where the system tells neither."""
    return min(
        (cores for cores in (allowed_cores(system), cpu_quota(system.text)) if cores is not None),
        default=None,
    )


def allowed_cores(system: System) -> int | None:
    """Return the number of cores to which this process is bound."""
    for line in (system.text("/proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return count_of(value)
    return None


def threads(system: System) -> int:
    """Return the threads that a worker computes with."""
    return max(1, whole_number(system.environment.get("SAMESTEP_THREADS")) or 1)


def count_of(text: str | None) -> int | None:
    """Return how many numbers a list such as 0-3,8 has, None where it is no such list."""
    count = 0
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        low, high = whole_number(first), whole_number(last or first)
        if low is None or high is None or high < low:
            return None
        count += high - low + 1
    return count


def _model(system: System) -> str | None:
    for line in (system.text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None


def _judge(case: Case) -> Iterator[Finding]:
    system = case.system
    usable, allowed, quota = usable_cores(system), allowed_cores(system), cpu_quota(system.text)
    each = threads(system)
    busy = f"{some(case.workers, 'worker')} of {some(each, 'thread')}"
    if usable is not None and case.workers * each > max(1.0, usable):
        yield change(
            f"{busy} on {some(usable, 'core')}: each waits for a core while the others wait for it.",
            f"samestep run -n {max(1, int(usable / each))}, or give this process more cores "
            "(docker run --cpus, resources.limits.cpu, srun --cpus-per-task)",
        )
    elif usable is not None:
        yield good(f"{busy} on {some(usable, 'core')}")
    if quota is not None and allowed is not None and quota < allowed:
        yield note(
            f"a quota gives this process the time of {quota:g} of the {allowed} cores that it sees: whatever starts a thread a core, as "
            "a script's own pools do, is stopped again and again until its next share.",
            f"count {some(max(1, int(quota)), 'core')} in the script's own pools and loader_workers, or raise the quota",
        )
    wanted = system.environment.get("OMP_NUM_THREADS")
    if wanted is not None and wanted != str(each):
        yield note(
            f"OMP_NUM_THREADS={wanted} does not count for workers: they compute with {each}, because bits depend on the number.",
            f"samestep run --threads {wanted} if that is what you want, and always the same",
        )
