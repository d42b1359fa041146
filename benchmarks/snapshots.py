"""Snapshots compared to torch.save and torch.distributed.checkpoint: stall, save and load time.

usage: python -m benchmarks.snapshots [--rounds 5] [--workers 1 2] [--directory DIR]

The state has 1.0 GB: an MLP of 84 million float32 parameters and AdamW's state. Jobs take turns,
and every ratio compares two jobs of one round. The save time lasts until the save is durable. Each
load is a new process, with the files in the page cache (warm) or not (cold); "restored" is the time
until a new model and optimizer have made a step. The last part is the stall of the ViT job of
benchmarks.jobs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import TensorDataset

import samestep as ss
from benchmarks.jobs import JOBS
from benchmarks.measure import figures, spread
from samestep.record import read_events
from samestep.snapshot import list_snapshots, load

WIDTH, DEPTH, BATCH_SIZE = 2048, 20, 64
WARMUP_STEPS, SAVES, STEPS_BETWEEN = 3, 3, 6
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
Job = tuple[torch.nn.Module, torch.optim.Optimizer]


def mlp() -> Job:
    """Return the large model and its optimizer, which has made a step and so has state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def vit() -> Job:
    """Return the ViT of benchmarks.jobs and its optimizer."""
    model = JOBS["vit"].build().model
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step of the optimizer."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return a lane's mean loss."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def train(
    directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset
) -> None:
    """Train with snapshots; print their stall, and the time of a step with and without a writer."""
    snapshots = range(WARMUP_STEPS, WARMUP_STEPS + SAVES * STEPS_BETWEEN, STEPS_BETWEEN)
    with ss.init(dir=directory, keep_last=1, keep_best=0, snapshot_every="1000000") as run:
        run.replicate(model)
        run.track(model=model, optimizer=optimizer)
        starts = []
        for batch in run.batches(data, BATCH_SIZE, steps=snapshots.stop):
            starts.append(time.perf_counter())
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            if run.step in snapshots:
                run.snapshot()
        taken = (
            [event for event in read_events(directory) if event["event"] == "snapshot"]
            if run.is_main
            else []
        )
    if not taken:
        return
    beside, alone = [], []
    for step, event in zip(snapshots, taken, strict=False):
        whole = starts[step + 1] + event["seconds"]
        for later in range(step + 1, step + STEPS_BETWEEN - 1):
            (beside if starts[later] < whole else alone).append(
                1000 * (starts[later + 1] - starts[later])
            )
    first, *others = [1000 * event["stall_seconds"] for event in taken]
    tell(
        first_ms=first,
        stall_ms=statistics.median(others),
        save_s=statistics.median(event["stall_seconds"] + event["seconds"] for event in taken[1:]),
        step_ms=statistics.median(alone),
        step_beside_ms=statistics.median(beside),
    )


def save(directory: Path, kind: str) -> None:
    """Save several times as a peer does; print the stall and the time until the save is durable."""
    dist.init_process_group("gloo")
    model, optimizer = mlp()
    update(model, optimizer)
    stalls, saves = [], []
    for number in range(SAVES):
        path = directory / str(number)
        dist.barrier()
        started = time.perf_counter()
        if kind == "torch":
            if dist.get_rank() == 0:
                with path.open("wb") as file:
                    torch.save(
                        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file
                    )
                    file.flush()
                    os.fsync(file.fileno())
            dist.barrier()
        else:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            if kind == "dcp":
                dcp.save(state, checkpoint_id=path)
            else:
                pending = dcp.async_save(state, checkpoint_id=path)
                stalls.append(1000 * (time.perf_counter() - started))
                pending.result()
        saves.append(time.perf_counter() - started)
        if dist.get_rank() == 0 and number:
            remove(directory / str(number - 1))
    if dist.get_rank() == 0:
        stalls = stalls or [1000 * seconds for seconds in saves]
        tell(
            first_ms=stalls[0],
            stall_ms=statistics.median(stalls[1:]),
            save_s=statistics.median(saves[1:]),
        )
    dist.destroy_process_group()


def restore(directory: Path, kind: str) -> None:
    """Load a save; print the time to load it, and the time until a step was made from it."""
    model, optimizer = mlp()
    path = newest(directory)
    started = loading = time.perf_counter()
    if kind == "dcp":
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        loading = time.perf_counter()
        dcp.load(state, checkpoint_id=path)
        loaded = time.perf_counter()
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    else:
        state = (
            load(path).state
            if kind == "samestep"
            else torch.load(path, weights_only=True, mmap=kind == "torch_mmap")
        )
        loaded = time.perf_counter()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    update(model, optimizer)
    tell(load_s=loaded - loading, restored_s=time.perf_counter() - started)


def tell(**values: float) -> None:
    """Print figures for the parent process."""
    print(*(f"{name}={value:.4f}" for name, value in values.items()))


def newest(directory: Path) -> Path:
    """Return the newest save in a directory."""
    return (list_snapshots(directory) or [directory / str(SAVES - 1)])[-1]


def remove(path: Path) -> None:
    """Remove a save, a file or a directory."""
    path.unlink() if path.is_file() else shutil.rmtree(path)


def cache(path: Path, *, warm: bool) -> None:
    """Read the files of a save into the page cache, or drop them from it."""
    for file in (
        [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    ):
        with file.open("rb", buffering=0) as opened:
            while warm and opened.read(2**24):
                pass
            if not warm:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def command(kind: str, what: str, directory: Path, workers: int) -> list[str]:
    """Return the command of one job."""
    words = [
        "-m",
        "benchmarks.snapshots",
        "--job",
        what,
        "--kind",
        kind,
        "--directory",
        str(directory),
    ]
    if what == "load":
        return [sys.executable, *words]
    if kind == "samestep":
        return [sys.executable, "-m", "samestep", "run", "-n", str(workers), *words]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
        *words,
    ]


def measure(root: Path, workers: int, rounds: int) -> None:
    """Save and load in every way in turn, and print the times."""
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        order = 1 if number % 2 == 0 else -1
        for name, kind in list(SAVERS.items())[::order]:
            shutil.rmtree(root / kind, ignore_errors=True)
            (root / kind).mkdir()
            found.setdefault(name, []).append(figures(command(kind, "save", root / kind, workers)))
        for warm in (True, False):
            for name, kind in list(LOADERS.items())[::order]:
                directory = root / kind.removesuffix("_mmap")
                cache(newest(directory), warm=warm)
                key = f"{name} ({'warm' if warm else 'cold'})"
                found.setdefault(key, []).append(figures(command(kind, "load", directory, 1)))
    print(f"1.0 GB, {workers} workers, {rounds} rounds")
    report(found, SAVERS, ("stall_ms", "first_ms", "save_s"))
    ours = found["samestep"]
    print(
        f"  a step {spread([one['step_ms'] for one in ours])} ms, while a snapshot is written",
        end=" ",
    )
    print(
        f"{spread([one['step_beside_ms'] for one in ours])} ms; "
        f"stall / step {spread([one['stall_ms'] / one['step_ms'] for one in ours])}"
    )
    for state in ("warm", "cold"):
        report(found, [f"{name} ({state})" for name in LOADERS], ("load_s", "restored_s"))


def report(
    found: Mapping[str, list[dict[str, float]]], names: Iterable[str], columns: Iterable[str]
) -> None:
    """Print figures of several jobs, each with its ratio to the first one."""
    first, *_ = names
    for column in columns:
        for name in names:
            ratios = [
                one[column] / ours[column]
                for one, ours in zip(found[name], found[first], strict=True)
            ]
            print(
                f"  {column:10} {name:24} {spread([one[column] for one in found[name]])},",
                f"ratio {spread(ratios)}",
                flush=True,
            )


def measure_vit(root: Path, rounds: int) -> None:
    """Print the stall of the ViT job as a share of its time."""
    found = []
    for _ in range(rounds):
        shutil.rmtree(root / "vit", ignore_errors=True)
        found.append(figures(command("samestep", "vit", root / "vit", 2)))
    print(f"ViT-Ti/8, global batch {JOBS['vit'].batch_size}, AdamW, 2 workers, {rounds} rounds")
    print(
        f"  stall {spread([one['stall_ms'] for one in found])} ms, "
        f"step {spread([one['step_ms'] for one in found])} ms"
    )
    print(
        "  share at every 100 steps "
        f"{spread([one['stall_ms'] / one['step_ms'] for one in found])} %",
        end=", ",
    )
    print(f"at every 10 minutes {spread([one['stall_ms'] / 6000 for one in found])} %")


def main() -> None:
    """Run one job, or the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (default: 5)")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of workers to save with (default: 1 2)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where to save, with 5 GB free (default: a temporary directory)",
    )
    parser.add_argument("--job", choices=["save", "load", "vit"], help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.job == "load":
        restore(options.directory, options.kind)
    elif options.job == "vit":
        train(options.directory, *vit(), JOBS["vit"].build().dataset)
    elif options.job == "save" and options.kind == "samestep":
        train(
            options.directory,
            *mlp(),
            TensorDataset(torch.randn(BATCH_SIZE, WIDTH), torch.randint(WIDTH, (BATCH_SIZE,))),
        )
    elif options.job == "save":
        save(options.directory, options.kind)
    else:
        with tempfile.TemporaryDirectory(dir=options.directory) as root:
            for workers in options.workers:
                measure(Path(root), workers, options.rounds)
            measure_vit(Path(root), options.rounds)


if __name__ == "__main__":
    main()
