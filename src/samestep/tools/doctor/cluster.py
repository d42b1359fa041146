"""Checks for runs on several hosts: launchers, network interfaces and the run's directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Final

from samestep.cluster import GLOO_INTERFACE as GLOO
from samestep.cluster import LOOPBACK_INTERFACE, OUTSIDE_ADDRESS, find_process
from samestep.errors import ConfigError
from samestep.tools.doctor.system import Case, Finding, System, note, problem

VIRTUAL: Final = ("docker", "br-", "veth", "virbr", "cni", "flannel", "ifb", "tun", "tap")
IN_MEMORY: Final = ("tmpfs", "ramfs")
OF_CONTAINER: Final = ("overlay", "aufs")


def check_launcher(case: Case) -> Iterator[Finding]:
    """Report a shell of Slurm in which only one worker would start."""
    environment = case.system.environment
    tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment and tasks != "1":
        job = f"Slurm job {environment['SLURM_JOB_ID']} with {tasks} tasks"
        shell = f"this is the batch script or a shell of {job}"
        yield note(f"{shell}; a script started here is one worker.", "srun python train.py")


def has_several_hosts(system: System) -> bool:
    """Return whether this process is a worker of a run on several hosts."""
    with suppress(ConfigError):  # a run reports it
        process = find_process(system.environment)
        return process.world_size > process.local_world_size
    return False


def check_interfaces(case: Case) -> Iterator[Finding]:
    """Report a network interface that reaches no other host, and a faster one."""
    system, several = case.system, has_several_hosts(case.system)
    if several and system.environment.get(GLOO) == LOOPBACK_INTERFACE:
        yield problem(
            f"{GLOO}={LOOPBACK_INTERFACE} is the loopback interface, which reaches no other host, "
            "but this run has several hosts.",
            f"unset {GLOO}",
        )
    elif GLOO not in system.environment:
        yield from _check_speed(system, system.interfaces())


def _check_speed(system: System, interfaces: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare the interface that samestep lets gloo use towards other hosts with the others."""
    master, towards = system.environment.get("MASTER_ADDR"), system.interface_towards
    chosen = (master and towards(master)) or towards(OUTSIDE_ADDRESS)
    if chosen is None or chosen not in interfaces:
        return
    speeds = {name: interface.speed for name, interface in interfaces.items()}
    texts = {
        name: f"{name} ({f'{speed / 1000:g} Gbit/s' if speed else 'unknown speed'})"
        for name, speed in speeds.items()
    }
    usable = [name for name in speeds if interfaces[name].isup and not name.startswith(VIRTUAL)]
    fastest = max(usable, key=speeds.__getitem__, default=chosen)
    if speeds[fastest] > speeds[chosen] > 0:
        advise = problem if has_several_hosts(system) else note
        yield advise(
            f"workers on other hosts are reached through {texts[chosen]}, but {fastest} is faster "
            f"({speeds[fastest] / 1000:g} Gbit/s).",
            f"{GLOO}={fastest} NCCL_SOCKET_IFNAME={fastest}, if it leads to the other hosts, too",
        )


def check_directory(case: Case) -> Iterator[Finding]:
    """Report a directory that is lost with a machine or a container."""
    directory, kind = case.directory, _kind_of(case.system, str(case.directory.absolute()))
    if kind in IN_MEMORY:
        yield problem(
            f"{directory} is in memory ({kind}): snapshots take memory from training, and are lost "
            "when the machine restarts.",
            "pass --dir with a directory on a disk",
        )
    elif kind in OF_CONTAINER:
        text = f"{directory} is in the container's own file system ({kind}), and is lost with it."
        pod_fix = (
            "mount a PersistentVolumeClaim and pass a --dir in it "
            "(samestep submit kubernetes --claim NAME:/runs --dir /runs/one)"
        )
        docker_fix = "docker run -v /data/runs:/runs, and a --dir in it"
        yield problem(text, pod_fix) if case.system.in_pod() else note(text, docker_fix)


def _kind_of(system: System, path: str) -> str:
    """Return the kind of file system at a path: that of its nearest mount point."""
    mounts = [mount for mount in system.mounts() if PurePosixPath(path).is_relative_to(mount[0])]
    # max returns the first of several, but the last one mounted hides the others
    _, kind = max(reversed(mounts), key=lambda mount: len(mount[0]), default=("", ""))
    return kind
