"""Checks for runs on several hosts: launchers, network links and the run's directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any, Final

from samestep.cluster import GLOO_INTERFACE as GLOO
from samestep.cluster import LOOPBACK_INTERFACE, OUTSIDE_ADDRESS, ProcessInfo, find_process
from samestep.errors import ConfigError
from samestep.tools import format_bytes
from samestep.tools.doctor.system import (
    SERVICE_ACCOUNT,
    Case,
    Finding,
    Folder,
    Interface,
    Section,
    System,
    good,
    note,
    problem,
)

COMMANDS: Final = ("sinfo", "srun", "sbatch", "mpirun", "torchrun", "kubectl", "docker")
# Variables that describe the job; any other variable might hold a secret.
SHOWN: Final = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_RUN_ID"
    r"|(OMPI_COMM_WORLD|PMI)_(RANK|SIZE)"
    r"|SLURM_(JOB_ID|JOB_NODELIST|NTASKS|STEP_NUM_TASKS|PROCID|NODEID|CPUS_PER_TASK"
    r"|MEM_PER_NODE|GPUS_ON_NODE|RESTART_COUNT)"
    r"|KUBERNETES_SERVICE_HOST|JOB_COMPLETION_INDEX|PET_(NNODES|NODE_RANK|MASTER_ADDR)"
)
NCCL: Final = "NCCL_SOCKET_IFNAME"
VIRTUAL: Final = ("docker", "br-", "veth", "virbr", "cni", "flannel", "ifb", "tun", "tap")
IN_MEMORY: Final = ("tmpfs", "ramfs")
OF_CONTAINER: Final = ("overlay", "aufs")
OVER_NETWORK: Final = re.compile(
    "nfs|cifs|smb|lustre|gpfs|beegfs|ceph|glusterfs|9p|fuse|afs|panfs|wekafs"
)
LEAST_BYTES: Final = 2 << 30  # a few snapshots of a small model
LEAST_FILES: Final = 10_000


def examine_launchers(case: Case) -> Section:
    """Report the launcher that started this process: torchrun, MPI, Slurm or Kubernetes."""
    system, process = case.system, _find_process(case.system)
    facts: dict[str, Any] = {
        "commands": [name for name in COMMANDS if system.has_command(name)],
        "this_process": str(process) if isinstance(process, ConfigError) else _process(process),
        "variables": dict(
            item for item in sorted(system.environment.items()) if SHOWN.fullmatch(item[0])
        ),
    }
    if system.in_pod():
        facts["pod"] = {
            "namespace": system.text(f"{SERVICE_ACCOUNT}/namespace"),
            "service_account": bool(system.names(SERVICE_ACCOUNT)),
        }
    return Section("launchers", facts, list(_check_launchers(system, process)))


def _has_several_hosts(system: System) -> bool:
    process = _find_process(system)
    return not isinstance(process, ConfigError) and process.world_size > process.local_world_size


def _find_process(system: System) -> ProcessInfo | ConfigError:
    try:
        return find_process(system.environment)
    except ConfigError as error:
        return error


def _process(process: ProcessInfo) -> str:
    if process.started_by == "alone":
        return "not started by a launcher"
    rank = f"rank {process.rank} of {process.world_size} workers"
    return (
        f"{rank}, started by {process.started_by}, rendezvous at {process.address}:{process.port}"
    )


def _check_launchers(system: System, process: ProcessInfo | ConfigError) -> Iterator[Finding]:
    environment = system.environment
    if isinstance(process, ConfigError):
        yield problem(f"samestep.init would fail: {process}.", "correct or unset these variables")
    elif process.started_by != "alone":
        yield good(f"this process is {_process(process)}")
    if "SLURM_JOB_ID" in environment:
        job = f"Slurm job {environment['SLURM_JOB_ID']}"
        tasks = environment.get("SLURM_NTASKS", "1")
        if "SLURM_STEP_ID" not in environment and tasks != "1":
            shell = f"this is the batch script or a shell of {job} with {tasks} tasks"
            yield note(f"{shell}; a script started here is one worker.", "srun python train.py")
        elif not system.has_command("srun"):
            yield note(
                f"this is {job}, but srun is not in PATH, so the job cannot start workers.",
                "load Slurm's module, or add srun to PATH",
            )
        else:
            yield good(f"this is {job}")
    if system.in_pod() and system.names(SERVICE_ACCOUNT):
        yield note(
            "this pod has a token of its service account, which a run never needs.",
            "automountServiceAccountToken: false in the pod's specification",
        )


def examine_links(case: Case) -> Section:
    """Report network interfaces, and the ones that lead to other hosts."""
    system, interfaces = case.system, case.system.interfaces()
    facts = {
        "interfaces": [asdict(interface) for interface in interfaces],
        "gloo_uses": _gloo_interface(system),
        "nccl_uses": nccl_interfaces(system, [each.name for each in interfaces if each.up]),
        GLOO: system.environment.get(GLOO, "not set"),
        NCCL: system.environment.get(NCCL, "not set"),
    }
    findings = [*_check_variables(system, interfaces), *_check_speed(system, interfaces)]
    return Section("links", facts, findings)


def nccl_interfaces(system: System, names: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL may use between hosts: InfiniBand first, or by its variable.

    The variable lists prefixes of names. `=` in front makes them exact names, and `^` excludes
    them. Source: NCCL's documentation of NCCL_SOCKET_IFNAME.
    """
    text = system.environment.get(NCCL, "")
    if wanted := [part for part in text.lstrip("^=").split(",") if part]:
        sign = text[: len(text) - len(text.lstrip("^="))]
        matches = [
            name
            for name in names
            if any(name == part if "=" in sign else name.startswith(part) for part in wanted)
        ]
        return [name for name in names if name not in matches] if "^" in sign else matches
    others = [name for name in names if not name.startswith(("docker", LOOPBACK_INTERFACE))]
    return [name for name in others if name.startswith("ib")] or others or list(names)


def _gloo_interface(system: System) -> str | None:
    """Return the interface that samestep lets gloo use towards other hosts."""
    chosen, master = system.environment.get(GLOO), system.environment.get("MASTER_ADDR")
    towards = system.interface_towards
    return chosen or (master and towards(master)) or towards(OUTSIDE_ADDRESS)


def _check_variables(system: System, interfaces: Sequence[Interface]) -> Iterator[Finding]:
    names = [interface.name for interface in interfaces]
    default = system.interface_towards(OUTSIDE_ADDRESS)
    example = default if default in names else "".join(names[:1])
    wanted = list(filter(None, system.environment.get(GLOO, "").split(",")))
    missing = [name for name in wanted if name not in names]
    if missing and names:
        yield problem(
            f"{GLOO} names {', '.join(missing)}, but this host has {', '.join(names)}; workers on "
            "several hosts could not connect.",
            f"unset {GLOO}, or export {GLOO}={example}",
        )
    elif wanted == [LOOPBACK_INTERFACE] and _has_several_hosts(system):
        yield problem(
            f"{GLOO}={LOOPBACK_INTERFACE} is the loopback interface, which reaches no other host, "
            "but this run has several hosts.",
            f"unset {GLOO}",
        )
    if names and NCCL in system.environment and not nccl_interfaces(system, names):
        yield problem(
            f"{NCCL}={system.environment[NCCL]} matches none of {', '.join(names)}; NCCL could not "
            "connect GPUs of several hosts.",
            f"unset {NCCL}, or export {NCCL}={example}",
        )


def _check_speed(system: System, interfaces: Sequence[Interface]) -> Iterator[Finding]:
    chosen = next((each for each in interfaces if each.name == _gloo_interface(system)), None)
    if chosen is None or GLOO in system.environment:
        return
    fastest = max(
        (each for each in interfaces if each.up and not each.name.startswith(VIRTUAL)),
        key=lambda interface: interface.megabits or 0,
        default=chosen,
    )
    if (fastest.megabits or 0) > (chosen.megabits or 0) > 0:
        advise = problem if _has_several_hosts(system) else note
        yield advise(
            f"workers on other hosts are reached through {chosen.name} ({_speed(chosen)}), but "
            f"{fastest.name} is faster ({_speed(fastest)}).",
            f"{GLOO}={fastest.name} {NCCL}={fastest.name}, if it leads to the other hosts, too",
        )
    elif chosen.name != LOOPBACK_INTERFACE:
        yield good(f"other hosts are reached through {chosen.name} ({_speed(chosen)})")


def _speed(interface: Interface) -> str:
    return f"{interface.megabits / 1000:g} Gbit/s" if interface.megabits else "unknown speed"


def examine_directory(case: Case) -> Section:
    """Report the file system of the run's directory."""
    system, folder = case.system, case.system.folder(case.directory)
    mount, space = _mount_of(system, str(folder.path)), system.space(str(folder.path))
    facts = {
        "directory": str(case.directory),
        "nearest_existing": str(folder.path),
        "file_system": mount and mount[1],
        "mounted_at": mount and mount[0],
        "total_bytes": space and space.total_bytes,
        "free_bytes": space and space.free_bytes,
        "free_files": space and space.free_files,
        "writable": folder.writable,
        "locks": folder.locks,
    }
    findings = [*_check_space(system, folder), *_check_kind(case, mount[1] if mount else "")]
    return Section("directory", facts, findings or [good(f"{folder.path} can be written")])


def _mount_of(system: System, path: str) -> tuple[str, str] | None:
    """Return the nearest mount point of a path, the last if there are several, and its kind."""
    mounts = [mount for mount in system.mounts() if PurePosixPath(path).is_relative_to(mount[0])]
    # max returns the first of several
    return max(reversed(mounts), key=lambda mount: len(mount[0]), default=None)


def _check_space(system: System, folder: Folder) -> Iterator[Finding]:
    path, space = folder.path, system.space(str(folder.path))
    if not folder.writable:
        yield problem(
            f"{path} cannot be written, so a run with this --dir would fail at its start.",
            "pass --dir with a directory that you can write",
        )
    elif not folder.locks:
        yield note(
            f"files in {path} cannot be locked, so two runs with the same --dir are not detected.",
            "use one directory per run; mount NFS with locks (without nolock)",
        )
    if space is not None and space.free_bytes < LEAST_BYTES:
        yield problem(
            f"{path} has {format_bytes(space.free_bytes)} free. A run stops when its disk is full; "
            "it retains 4 snapshots, each of 3 times the parameters' bytes with Adam.",
            "free some space, pass another --dir, or --keep-last 1 --keep-best 0",
        )
    if space is not None and space.free_files is not None and space.free_files < LEAST_FILES:
        yield problem(
            f"the file system of {path} has room for only {space.free_files} more files.",
            "remove small files, or pass another --dir (df -i shows free inodes)",
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
    elif OVER_NETWORK.match(kind):
        if not _has_several_hosts(case.system):
            yield note(
                f"{directory} is on a network file system ({kind}): right for several hosts, but "
                "slower than a local disk for one.",
                "if snapshots take long, a --dir on a local disk, with --remote for a second copy",
            )
    elif _has_several_hosts(case.system):
        yield note(
            f"{directory} is on a disk of this host ({kind or 'unknown'}), but the hosts of this "
            "run must share it.",
            "pass --dir with a directory on a file system that all hosts mount",
        )
