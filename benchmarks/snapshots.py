"""Snapshots compared to torch.save and torch.distributed.checkpoint: stall, save and load time.

usage: python -m benchmarks.snapshots [--rounds 5] [--workers 1 2] [--resume 1 2 4]
       [--directory DIR]

The state has 1.0 GB: an MLP of 84 million float32 parameters and AdamW's state. Jobs take turns,
and every ratio compares two jobs of one round. The save time lasts until the save is durable. Each
load is a new process, with the files in the page cache (warm) or not (cold); "restored" is the time
until a new model and optimizer have made a step. After that, all workers of a host resume from one
save; the last part is the stall of the ViT job of benchmarks.jobs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.jobs import JOBS
from benchmarks.measure import figures, spread
from benchmarks.snapshot_jobs import newest
from benchmarks.turns import samestep, torchrun

SAVERS = {
    "samestep": "samestep",
    "torch.save": "torch",
    "checkpoint.save": "dcp",
    "checkpoint.async_save": "dcp_async",
}
LOADERS = {
    "samestep": "samestep",
    "torch.load": "torch",
    "torch.load, mmap": "torch_mmap",
    "checkpoint.load": "dcp",
}


def cache(path: Path, *, warm: bool) -> None:
    """Read the files of a save into the page cache, or drop them from it."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while warm and opened.read(2**24):
                pass
            if not warm:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def command(kind: str, job: str, directory: Path, workers: int) -> list[str]:
    """Return the command of one job."""
    module = ["benchmarks.snapshot_jobs", job, "--kind", kind, "--directory", str(directory)]
    if job == "load":
        return [sys.executable, "-m", *module]
    return (samestep if kind == "samestep" else torchrun)(workers, *module)


def measure(root: Path, workers: int, rounds: int) -> None:
    """Save and load in every way in turn, and print the times."""
    measurements: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        order = 1 if number % 2 == 0 else -1
        for name, kind in list(SAVERS.items())[::order]:
            shutil.rmtree(root / kind, ignore_errors=True)
            (root / kind).mkdir()
            measurements.setdefault(name, []).append(
                figures(command(kind, "save", root / kind, workers))
            )
        for warm in (True, False):
            for name, kind in list(LOADERS.items())[::order]:
                directory = root / kind.removesuffix("_mmap")
                cache(newest(directory), warm=warm)
                key = f"{name} ({'warm' if warm else 'cold'})"
                measurements.setdefault(key, []).append(
                    figures(command(kind, "load", directory, 1))
                )
    print(f"1.0 GB, {workers} workers, {rounds} rounds")
    report(measurements, SAVERS, ("stall_ms", "first_ms", "save_s"))
    ours = measurements["samestep"]
    print(
        f"  step {spread([run['step_ms'] for run in ours])} ms, while a snapshot is written "
        f"{spread([run['step_beside_ms'] for run in ours])} ms; "
        f"stall / step {spread([run['stall_ms'] / run['step_ms'] for run in ours])}"
    )
    for state in ("warm", "cold"):
        report(measurements, [f"{name} ({state})" for name in LOADERS], ("load_s", "restored_s"))


def report(
    measurements: Mapping[str, list[dict[str, float]]], names: Iterable[str], columns: Iterable[str]
) -> None:
    """Print figures of several jobs, each with its ratio to the first one."""
    first, *_ = names
    for column in columns:
        for name in names:
            ratios = [
                run[column] / first_run[column]
                for run, first_run in zip(measurements[name], measurements[first], strict=True)
            ]
            print(
                f"  {column:10} {name:24} {spread([run[column] for run in measurements[name]])},",
                f"ratio {spread(ratios)}",
                flush=True,
            )


def measure_resume(root: Path, numbers: Iterable[int], rounds: int) -> None:
    """Resume on several workers of a host, and print the time and the memory of the host."""
    kinds = {"samestep": "samestep", "checkpoint.load": "dcp"}
    for kind in kinds.values():
        shutil.rmtree(root / kind, ignore_errors=True)
        (root / kind).mkdir()
        figures(command(kind, "save", root / kind, 1))
    for workers in numbers:
        measurements: dict[str, list[dict[str, float]]] = {}
        for number in range(rounds):
            for name, kind in list(kinds.items())[:: 1 if number % 2 == 0 else -1]:
                cache(newest(root / kind), warm=True)
                run = figures(command(kind, "resume", root / kind, workers))
                host = {key: workers * run[key] for key in ("loaded_mb", "in_place_mb")}
                measurements.setdefault(name, []).append({**run, **host})
        print(f"1.0 GB, resume on {workers} workers of a host, {rounds} rounds")
        report(measurements, kinds, ("load_s", "in_place_s", "loaded_mb", "in_place_mb"))


def measure_vit(root: Path, rounds: int) -> None:
    """Print the stall of the ViT job as a share of its time."""
    runs = []
    for _ in range(rounds):
        shutil.rmtree(root / "vit", ignore_errors=True)
        runs.append(figures(command("samestep", "vit", root / "vit", 2)))
    print(f"ViT-Ti/8, global batch {JOBS['vit'].batch_size}, AdamW, 2 workers, {rounds} rounds")
    print(
        f"  stall {spread([run['stall_ms'] for run in runs])} ms, "
        f"step {spread([run['step_ms'] for run in runs])} ms"
    )
    print(
        "  share at every 100 steps "
        f"{spread([run['stall_ms'] / run['step_ms'] for run in runs])} %",
        end=", ",
    )
    print(f"at every 10 minutes {spread([run['stall_ms'] / 6000 for run in runs])} %")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (default: 5)")
    workers_help = "numbers of workers to save with (default: 1 2)"
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help=workers_help)
    resume_help = "numbers of workers of a host that resume (default: 1 2 4)"
    parser.add_argument("--resume", type=int, nargs="*", default=[1, 2, 4], help=resume_help)
    directory_help = "where to save, with 5 GB free (default: a temporary directory)"
    parser.add_argument("--directory", type=Path, help=directory_help)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        for workers in options.workers:
            measure(Path(root), workers, options.rounds)
        measure_resume(Path(root), options.resume, options.rounds)
        measure_vit(Path(root), options.rounds)


if __name__ == "__main__":
    main()
