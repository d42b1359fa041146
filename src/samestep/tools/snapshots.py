"""`samestep snapshots`: list, check and export the snapshots of a run, local or remote."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from samestep.config import is_url
from samestep.errors import ConfigError, SnapshotError
from samestep.host import interrupts_deferred, printable
from samestep.terminal import starting
from samestep.tools import format_bytes

if TYPE_CHECKING:  # --help must not load torch
    from samestep.snapshot.manifest import Manifest

SHARD_BYTES: Final = 5 * 10**9  # as Hugging Face writes them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep snapshots` to its parser."""
    add, actions = parser.add_argument, ("list", "check", "export")
    action = (
        "list (default): show snapshots, checking only manifests and file sizes; check: verify "
        "every byte; export: write the tensors of an object for other tools"
    )
    add("action", nargs="?", choices=actions, default="list", help=action)
    directory = "directory of a run, or the URL of its copy; check and export also take a snapshot"
    add("directory", help=directory)
    file = "safetensors file that export writes, or DIRECTORY/ for several files and their index"
    add("file", nargs="?", help=file)
    add("--object", default="model", help="object to export (default: model)")
    dcp = "dcp: export a directory for torch.distributed.checkpoint"
    add("--format", choices=["safetensors", "dcp"], default="safetensors", help=dcp)


def main(options: argparse.Namespace) -> int:
    """Run the action and return the exit status. Raises `SnapshotError` and `ConfigError`."""
    if (options.file is None) == (options.action == "export"):
        needed = (
            "requires a file or directory to write"
            if options.action == "export"
            else "takes no output file"
        )
        raise ConfigError(f"samestep snapshots {options.action} {needed}")
    is_remote = is_url(options.directory)
    snapshots = (RemoteSnapshots if is_remote else LocalSnapshots)(options.directory)
    if options.action == "export":
        return _export(snapshots, options.file, options)
    return _check(snapshots) if options.action == "check" else _list(snapshots)


class LocalSnapshots:
    """The snapshots in a run's directory, or a single snapshot, by name."""

    def __init__(self, location: str) -> None:
        directory = Path(location)
        if not directory.is_dir():
            expected = "the directory of a run or snapshot, or a URL"
            raise ConfigError(f"expected {expected}, got {location}")
        with starting(), interrupts_deferred():
            from samestep.snapshot.manifest import NAME
            from samestep.snapshot.read import check, inspect, list_snapshots, step_of

        is_snapshot = (directory / NAME).exists() or step_of(directory) is not None
        paths = [directory] if is_snapshot else list_snapshots(directory)
        self._paths = {path.name: path for path in paths}
        self._inspect, self._check = inspect, check
        self.location, self.names = location, list(self._paths)

    def inspect(self, name: str) -> Manifest:
        """Return the manifest of a snapshot. Raises `SnapshotError` if files are missing."""
        return self._inspect(self._paths[name])

    @contextmanager
    def verified(self, name: str) -> Iterator[Path]:
        """Verify every byte of a snapshot and yield its directory. Raises `SnapshotError`."""
        self._check(self._paths[name])
        yield self._paths[name]


class RemoteSnapshots:
    """Snapshots in remote storage. Raises `SnapshotError` if the storage does not respond."""

    def __init__(self, url: str) -> None:
        with starting(), interrupts_deferred():
            from samestep.snapshot.read import step_of
            from samestep.snapshot.remote import RemoteDirectory

        folder, _, name = url.rstrip("/").rpartition("/")
        is_snapshot = step_of(Path(name)) is not None
        self._remote = RemoteDirectory(folder if is_snapshot else url)
        self.location = url
        self.names = [name] if is_snapshot else self._remote.names()

    def inspect(self, name: str) -> Manifest:
        """Return the manifest of a snapshot. Raises `SnapshotError` if files are missing."""
        return self._remote.inspect(name)

    @contextmanager
    def verified(self, name: str) -> Iterator[Path]:
        """Download a snapshot, which verifies every byte, and yield its temporary directory."""
        with TemporaryDirectory() as folder:
            yield self._remote.fetch(name, Path(folder))


def _list(snapshots: LocalSnapshots | RemoteSnapshots) -> int:
    if not snapshots.names:
        print(f"no snapshots in {snapshots.location}")
        return 0
    print(f"{'snapshot':<16} {'age':>8} {'size':>10} {'workers':>7} {'score':>10}  state")
    for name in snapshots.names:
        try:
            manifest = snapshots.inspect(name)
        except SnapshotError as error:
            print(f"{name:<16} {'':>38}  {error}")
            continue
        age, nbytes = _age(time.time() - manifest.created), format_bytes(manifest.size)
        score = "" if manifest.score is None else f"{manifest.score:.6g}"
        state = "complete"
        if manifest.nonfinite:
            state += printable(f", {manifest.nonfinite[0]} has infinities or NaNs")
        print(f"{name:<16} {age:>8} {nbytes:>10} {manifest.workers:>7} {score:>10}  {state}")
    return 0


def _check(snapshots: LocalSnapshots | RemoteSnapshots) -> int:
    if not snapshots.names:
        raise SnapshotError(f"no snapshots to check in {snapshots.location}")
    status = 0
    for name in snapshots.names:
        try:
            with snapshots.verified(name):
                print(f"{name}: valid")
        except SnapshotError as error:
            status = 1
            print(f"{name}: {error}")
    return status


def _export(
    snapshots: LocalSnapshots | RemoteSnapshots, file: str, options: argparse.Namespace
) -> int:
    from samestep.snapshot.read import export

    name, dcp = options.object, options.format == "dcp"
    shard_bytes = SHARD_BYTES if file.endswith("/") or Path(file).is_dir() else None
    with ExitStack() as exits:
        for newest in reversed(snapshots.names):
            try:
                path = exits.enter_context(snapshots.verified(newest))
                break
            except SnapshotError as error:
                print(f"snapshot_rejected: {error}", file=sys.stderr)
        else:
            raise SnapshotError(f"no valid snapshot to export in {snapshots.location}")
        skipped = export(path, Path(file), name, shard_bytes=shard_bytes, dcp=dcp)
    print(f"exported {name} of {newest} to {file}")
    if skipped:
        print(printable(f"skipped (not tensors): {', '.join(skipped)}"))
    return 0


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
