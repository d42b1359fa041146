"""Checks for runs on several hosts: launchers, network interfaces and the run's directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final

from samestep.cluster import GLOO_INTERFACE as GLOO
from samestep.cluster import LOOPBACK_INTERFACE, OUTSIDE_ADDRESS, find_process
from samestep.errors import ConfigError
from samestep.tools import format_bytes
from samestep.tools.doctor.system import Case, Finding, System, note, problem

VIRTUAL: Final = ("docker", "br-", "veth", "virbr", "cni", "flannel", "ifb", "tun", "tap")
IN_MEMORY: Final = ("tmpfs", "ramfs")
OF_CONTAINER: Final = ("overlay", "aufs")
OVER_NETWORK: Final = re.compile(
    "nfs|cifs|smb|lustre|gpfs|beegfs|ceph|glusterfs|9p|fuse|afs|panfs|wekafs"
)
LEAST_BYTES: Final = 2 << 30  # a few snapshots of a small model


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
    with suppress(ConfigError):  # another check reports it
        process = find_process(system.environment)
        return process.world_size > process.local_world_size
    return False


def check_interfaces(case: Case) -> Iterator[Finding]:
    """Report variables that select a wrong network interface, and a faster one."""
    system, interfaces = case.system, case.system.interfaces()
    yield from _check_selected(system, list(interfaces))
    if GLOO not in system.environment:
        yield from _check_speed(system, interfaces)


def _check_selected(system: System, names: Sequence[str]) -> Iterator[Finding]:
    wanted = list(filter(None, system.environment.get(GLOO, "").split(",")))
    missing = [name for name in wanted if name not in names]
    if missing and names:
        yield problem(
            f"{GLOO} names {', '.join(missing)}, but this host has {', '.join(names)}; workers on "
            "several hosts could not connect.",
            f"unset {GLOO}",
        )
    elif wanted == [LOOPBACK_INTERFACE] and has_several_hosts(system):
        yield problem(
            f"{GLOO}={LOOPBACK_INTERFACE} is the loopback interface, which reaches no other host, "
            "but this run has several hosts.",
            f"unset {GLOO}",
        )


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
    """Report a directory in which a run could not keep its files."""
    path = case.directory.absolute()
    path = next((each for each in (path, *path.parents) if each.is_dir()), Path("/"))
    yield from _check_space(case.system, path)
    yield from _check_kind(case, _kind_of(case.system, str(path)))


def _kind_of(system: System, path: str) -> str:
    """Return the kind of file system at a path: that of its nearest mount point."""
    mounts = [mount for mount in system.mounts() if PurePosixPath(path).is_relative_to(mount[0])]
    # max returns the first of several, but the last one mounted hides the others
    _, kind = max(reversed(mounts), key=lambda mount: len(mount[0]), default=("", ""))
    return kind


def _check_space(system: System, path: Path) -> Iterator[Finding]:
    space = system.space(str(path))
    if not system.is_writable(path):
        yield problem(
            f"{path} cannot be written, so a run with this --dir would fail at its start.",
            "pass --dir with a directory that you can write",
        )
    if space is not None and space.free < LEAST_BYTES:
        yield problem(
            f"{path} has {format_bytes(space.free)} free. A run stops when its disk is full; "
            "it retains 4 snapshots, each of 3 times the parameters' bytes with Adam.",
            "free some space, pass another --dir, or --keep-last 1 --keep-best 0",
        )


def _check_kind(case: Case, kind: str) -> Iterator[Finding]:
    directory = case.directory
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
    elif has_several_hosts(case.system) and not OVER_NETWORK.match(kind):
        yield note(
            f"{directory} is on a disk of this host ({kind or 'unknown'}), but the hosts of this "
            "run must share it.",
            "pass --dir with a directory on a file system that all hosts mount",
        )
