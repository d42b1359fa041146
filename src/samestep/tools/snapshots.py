"""`samestep snapshots`: list, check and export the snapshots of a run, here or in remote storage."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from samestep.config import is_url
from samestep.errors import ConfigError, SnapshotError
from samestep.tools.units import size

# Whatever knows of tensors is imported where it is needed, so that help comes at once.
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from samestep.snapshot.manifest import Manifest

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep snapshots` to its parser; `main` takes what it parses."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "check", "export"),
        default="list",
        help="list (default): what is there, by manifests and sizes; check: read every byte; export: one safetensors file",
    )
    parser.add_argument(
        "directory",
        help="a run's directory, or the URL of its copy; check and export also take one snapshot",
    )
    parser.add_argument("file", type=Path, nargs="?", help="where export writes")
    parser.add_argument(
        "--object", default="model", help="what export takes from the snapshot (default: model)"
    )


def main(options: argparse.Namespace) -> int:
    """Run `samestep snapshots` and return its exit status. Raises `SnapshotError`, and `ConfigError` for wrong use."""
    if (options.file is None) == (options.action == "export"):
        takes = "a file to write to" if options.action == "export" else "no file"
        raise ConfigError(f"samestep snapshots {options.action} takes {takes}")
    run = open_run(options.directory)
    if options.action == "export":
        return _export(run, options.file, options.object)
    return _check(run) if options.action == "check" else _list(run)


def open_run(place: str) -> LocalRun | RemoteRun:
    """Return the snapshots at a path or a URL. Raises `ConfigError` where there can be none."""
    if is_url(place):
        return RemoteRun(place)
    if not Path(place).is_dir():
        raise ConfigError(
            f"{place} was given; expected the directory of a run or of a snapshot, or a URL"
        )
    return LocalRun(Path(place))


class LocalRun:
    """The snapshots in a run's directory, or one of them, by name."""

    def __init__(self, directory: Path) -> None:
        from samestep.snapshot.manifest import NAME
        from samestep.snapshot.read import check, inspect, list_snapshots, step_of

        is_snapshot = (directory / NAME).exists() or step_of(directory) is not None
        paths = [directory] if is_snapshot else list_snapshots(directory)
        self._paths = {path.name: path for path in paths}
        self._inspect, self._check = inspect, check
        self.place = str(directory)
        self.names = list(self._paths)

    def where(self, name: str) -> str:
        """Say where a snapshot is."""
        return str(self._paths[name])

    def inspect(self, name: str) -> Manifest:
        """Return the manifest of a snapshot of which all files are there. Raises `SnapshotError`."""
        return self._inspect(self._paths[name])

    @contextmanager
    def whole(self, name: str) -> Iterator[Path]:
        """Check every byte of a snapshot and yield its directory. Raises `SnapshotError`."""
        self._check(self._paths[name])
        yield self._paths[name]


class RemoteRun:
    """The same of a remote storage. Raises `SnapshotError` where that does not answer."""

    def __init__(self, url: str) -> None:
        from samestep.snapshot.read import step_of
        from samestep.snapshot.remote import RemoteSnapshots

        folder, _, name = url.rstrip("/").rpartition("/")
        is_snapshot = step_of(Path(name)) is not None
        self._remote = RemoteSnapshots(folder if is_snapshot else url)
        self.place = url
        self.names = [name] if is_snapshot else self._remote.names()

    def where(self, name: str) -> str:
        """Say where a snapshot is."""
        return f"{self._remote.url}/{name}"

    def inspect(self, name: str) -> Manifest:
        """Return the manifest of a snapshot of which all files are there. Raises `SnapshotError`."""
        return self._remote.inspect(name)

    @contextmanager
    def whole(self, name: str) -> Iterator[Path]:
        """Download a snapshot, which checks every byte, and yield the directory that it is in for a while. Raises `SnapshotError`."""
        with TemporaryDirectory() as folder:
            yield self._remote.fetch(name, Path(folder))


def _list(run: LocalRun | RemoteRun) -> int:
    if not run.names:
        _say(f"{run.place} holds no snapshots")
        return 0
    _say(f"{'snapshot':<16} {'age':>8} {'size':>10} {'workers':>7} {'score':>10}  state")
    for name in run.names:
        _say(_row(run, name))
    return 0


def _row(run: LocalRun | RemoteRun, name: str) -> str:
    try:
        manifest = run.inspect(name)
    except SnapshotError as error:
        return f"{name:<16} {'':>38}  {error}"
    age, nbytes = _age(time.time() - manifest.created), size(manifest.size)
    score = "" if manifest.score is None else f"{manifest.score:.6g}"
    return f"{name:<16} {age:>8} {nbytes:>10} {manifest.workers:>7} {score:>10}  complete"


def _check(run: LocalRun | RemoteRun) -> int:
    if not run.names:
        raise SnapshotError(f"{run.place} holds no snapshots to check")
    faults = 0
    for name in run.names:
        try:
            with run.whole(name):
                _say(f"{name}: whole")
        except SnapshotError as error:
            faults += 1
            _say(f"{name}: {error}")
    return 1 if faults else 0


def _export(run: LocalRun | RemoteRun, file: Path, name: str) -> int:
    from samestep.snapshot.read import export

    with ExitStack() as exits:
        snapshot, path = _newest_whole(run, exits)
        left_out = export(path, file, name)
    _say(
        f"{name} of {run.where(snapshot)} is in {file}"
        + (f"; no tensors, so left out: {', '.join(left_out)}" if left_out else "")
    )
    return 0


def _newest_whole(run: LocalRun | RemoteRun, exits: ExitStack) -> tuple[str, Path]:
    for name in reversed(run.names):
        try:
            return name, exits.enter_context(run.whole(name))
        except SnapshotError as error:
            sys.stderr.write(f"snapshot_rejected: {error}\n")
    raise SnapshotError(f"{run.place} holds no whole snapshot to export from")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _age(seconds: float) -> str:
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
