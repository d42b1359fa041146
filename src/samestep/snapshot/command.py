"""`samestep snapshots`: list, check and export the snapshots of a run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import ConfigError, SnapshotError
from samestep.snapshot.export import export
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import check, fault, find_newest, inspect, list_snapshots, step_of

if TYPE_CHECKING:
    import argparse

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
    parser.add_argument("directory", type=Path, help="a run's directory; check and export also take one snapshot")
    parser.add_argument("file", type=Path, nargs="?", help="where export writes")
    parser.add_argument("--object", default="model", help="what export takes from the snapshot (default: model)")


def main(options: argparse.Namespace) -> int:
    """Run `samestep snapshots` and return its exit status. Raises `SnapshotError`, and `ConfigError` for wrong use."""
    if not options.directory.is_dir():
        raise ConfigError(f"{options.directory} was given; expected the directory of a run or of a snapshot")
    if (options.file is None) == (options.action == "export"):
        takes = "a file to write to" if options.action == "export" else "no file"
        raise ConfigError(f"samestep snapshots {options.action} takes {takes}")
    if options.action == "export":
        return _export(options.directory, options.file, options.object)
    return _check(options.directory) if options.action == "check" else _list(options.directory)


def _list(directory: Path) -> int:
    snapshots = _snapshots(directory)
    if not snapshots:
        _say(f"{directory} holds no snapshots")
        return 0
    _say(f"{'snapshot':<16} {'age':>8} {'size':>10} {'workers':>7} {'score':>10}  state")
    for path in snapshots:
        _say(_row(path))
    return 0


def _row(path: Path) -> str:
    try:
        manifest = inspect(path)
    except SnapshotError as error:
        return f"{path.name:<16} {'':>38}  {error}"
    age, size = _age(time.time() - manifest.created), _size(manifest.size)
    score = "" if manifest.score is None else f"{manifest.score:.6g}"
    return f"{path.name:<16} {age:>8} {size:>10} {manifest.workers:>7} {score:>10}  complete"


def _check(directory: Path) -> int:
    snapshots = _snapshots(directory)
    if not snapshots:
        raise SnapshotError(f"{directory} holds no snapshots to check")
    faults = {path: fault(path, check) for path in snapshots}
    for path, reason in faults.items():
        _say(f"{path.name}: {reason or 'whole'}")
    return 1 if any(faults.values()) else 0


def _export(directory: Path, file: Path, name: str) -> int:
    snapshot = directory if _is_snapshot(directory) else find_newest(directory, _tell_rejected)
    if snapshot is None:
        raise SnapshotError(f"{directory} holds no whole snapshot to export from")
    left_out = export(snapshot, file, name)
    _say(f"{name} of {snapshot} is in {file}" + (f"; no tensors, so left out: {', '.join(left_out)}" if left_out else ""))
    return 0


def _snapshots(directory: Path) -> list[Path]:
    return [directory] if _is_snapshot(directory) else list_snapshots(directory)


def _is_snapshot(directory: Path) -> bool:
    return (directory / NAME).exists() or step_of(directory) is not None


def _tell_rejected(kind: str, **fields: Any) -> None:
    sys.stderr.write(f"{kind}: {fields['reason']}\n")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _age(seconds: float) -> str:
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
