"""Where a run's directory is, or would be: its file system, free space, and locks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from samestep.tools.common import format_bytes
from samestep.tools.doctor.launchers import has_several_hosts, in_pod
from samestep.tools.doctor.section import Section, change, good, note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samestep.tools.doctor.case import Case
    from samestep.tools.doctor.section import Finding
    from samestep.tools.doctor.system import Folder, System

IN_MEMORY: Final = ("tmpfs", "ramfs")
OF_CONTAINER: Final = ("overlay", "aufs")
OVER_NETWORK: Final = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "9p",
    "fuse",
    "afs",
    "panfs",
    "wekafs",
)
LEAST_BYTES: Final = 2 << 30  # a few snapshots of a small model
LEAST_FILES: Final = 10_000


class Mount(NamedTuple):
    """Where a file system is mounted, and of which kind it is."""

    at: str
    kind: str


def examine(case: Case) -> Section:
    """Tell of the run's directory."""
    folder = case.system.folder(case.directory)
    mount, space = mount_of(case.system, str(folder.path)), case.system.space(str(folder.path))
    facts: dict[str, Any] = {
        "directory": str(case.directory),
        "nearest_that_exists": str(folder.path),
        "file_system": mount.kind if mount else None,
        "mounted_at": mount.at if mount else None,
        "total_bytes": space.total_bytes if space else None,
        "free_bytes": space.free_bytes if space else None,
        "free_files": space.free_files if space else None,
        **{name: value for name, value in asdict(folder).items() if name != "path"},
    }
    findings = [*_judge_space(case, folder), *_judge_kind(case, mount)]
    return Section(
        "directory",
        facts,
        findings or [good(f"{folder.path} is on a disk of this machine and can be written")],
    )


def mount_of(system: System, path: str) -> Mount | None:
    """Return the file system that a path is on: of those mounted at its parents, the last of the nearest ones."""
    found = None
    for line in (system.text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 4 and after:
            at = fields[4].replace("\\040", " ")
            if PurePosixPath(path).is_relative_to(at) and (
                found is None or len(at) >= len(found.at)
            ):
                found = Mount(at, after.split()[0])
    return found


def _judge_space(case: Case, folder: Folder) -> Iterator[Finding]:
    space = case.system.space(str(folder.path))
    if not folder.writable:
        yield change(
            f"nothing can be written in {folder.path}: a run with this dir stops at its start.",
            "--dir with a directory of your own",
        )
    elif not folder.locks:
        yield note(
            f"files in {folder.path} cannot be locked, so two runs that were given the same dir by mistake are not told apart.",
            "a directory a run; for NFS mount it with locks (without nolock)",
        )
    if space is not None and space.free_bytes < LEAST_BYTES:
        yield change(
            f"{format_bytes(space.free_bytes)} are free in {folder.path}; a run stops when its disk is full, and keeps 4 snapshots, with Adam "
            "of 3 times the parameters' bytes each.",
            "free some space, give another --dir, or --keep-last 1 --keep-best 0",
        )
    if space is not None and space.free_files is not None and space.free_files < LEAST_FILES:
        yield change(
            f"the file system of {folder.path} can hold {space.free_files} more files: it is full, whatever space is left.",
            "remove small files, or give another --dir (df -i shows where there is room)",
        )


def _judge_kind(case: Case, mount: Mount | None) -> Iterator[Finding]:
    kind = mount.kind if mount else ""
    if kind in IN_MEMORY:
        yield change(
            f"{case.directory} is in memory ({kind}): snapshots take memory from training and are gone when the machine restarts.",
            "--dir with a directory on a disk",
        )
    elif kind in OF_CONTAINER:
        advise = change if in_pod(case.system) else note
        yield advise(
            f"{case.directory} is in the container's own file system ({kind}), and goes with the container.",
            "mount a PersistentVolumeClaim and give a --dir in it (samestep submit kubernetes --claim NAME:/runs --dir /runs/one)"
            if in_pod(case.system)
            else "docker run -v /data/runs:/runs, and --dir in it",
        )
    elif kind.startswith(OVER_NETWORK):
        if not has_several_hosts(case.system):
            yield note(
                f"{case.directory} is on another machine ({kind}): right for several hosts, slower than a local disk for one.",
                "a --dir on a local disk with --remote for a copy elsewhere, if snapshots take long",
            )
    elif has_several_hosts(case.system):
        yield note(
            f"{case.directory} is on a disk of this host ({kind or 'unknown'}), and this run has several hosts, which must share it.",
            "--dir on a file system that all hosts mount",
        )
