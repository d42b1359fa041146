"""One job of benchmarks.snapshots: train with snapshots, save as a peer does, or load a save.

usage: samestep run -n 2 -m benchmarks.snapshot_jobs save --kind samestep --directory DIR
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import TensorDataset

import samestep as ss
from benchmarks.contenders.stopwatch import memory
from benchmarks.jobs import JOBS
from samestep.record import read_events
from samestep.snapshot import list_snapshots, load
from samestep.snapshot.read import inspect, load_together
from samestep.step.layout import Assignment
from samestep.step.shard import Shard

WIDTH, DEPTH, BATCH_SIZE = 2048, 20, 64
WARMUP_STEPS, SAVES, STEPS_BETWEEN = 3, 3, 6
FREE_BYTES = 2**31  # more than a worker allocates to resume
Job = tuple[torch.nn.Module, torch.optim.Optimizer]


def mlp() -> Job:
    """Return the large model and its optimizer, which has no state before its first step."""
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
        if not run.is_main:
            return
        events = [event for event in read_events(directory) if event["event"] == "snapshot"]
    beside, alone = [], []
    for step, event in zip(snapshots, events, strict=False):
        complete_at = starts[step + 1] + event["seconds"]
        for later in range(step + 1, step + STEPS_BETWEEN - 1):
            (beside if starts[later] < complete_at else alone).append(
                1000 * (starts[later + 1] - starts[later])
            )
    first, *others = [1000 * event["stall_seconds"] for event in events]
    print_figures(
        first_ms=first,
        stall_ms=statistics.median(others),
        save_s=statistics.median(event["stall_seconds"] + event["seconds"] for event in events[1:]),
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
        print_figures(
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
    print_figures(load_s=loaded - loading, restored_s=time.perf_counter() - started)


def resume(directory: Path, kind: str) -> None:
    """Load a save on all workers of a host; print the time, and the memory of a worker.

    "loaded" is when the worker can read the state, "in place" when its job has it. The peer loads
    into the job's own tensors; "in place" includes the time in which it makes the optimizer's.
    """
    model, optimizer = mlp()
    path = newest(directory)
    take_memory(FREE_BYTES)
    if kind == "dcp":
        dist.init_process_group("gloo")
        dist.barrier()
        started = time.perf_counter()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dist.barrier()
        loading = time.perf_counter()
        dcp.load(state, checkpoint_id=path)
        dist.barrier()
        now, megabytes = time.perf_counter(), memory()
        print_figures(
            load_s=now - loading,
            in_place_s=now - started,
            loaded_mb=megabytes,
            in_place_mb=megabytes,
        )
        dist.barrier()
        dist.destroy_process_group()
        return
    with ss.init(hot_every=None, lanes=8) as run:
        world = run._world  # noqa: SLF001  only its own part of `ss.init` is measured
        model = run.replicate(model)
        shard = Shard(optimizer, Assignment(world.size, 8), world)
        world.barrier("starting")
        started = time.perf_counter()
        snapshot = load_together(path, world)
        load_seconds = time.perf_counter() - started
        world.barrier("measuring")
        state_bytes = sum(file.size for file in inspect(path).files)
        # of memory that this worker has not touched yet
        loaded = memory() + (state_bytes / world.size / 2**20 if snapshot.shared else 0)
        world.barrier("restoring")
        started = time.perf_counter()
        model.load_state_dict(snapshot.state.pop("model"))
        shard.load_state_dict(snapshot.state.pop("optimizer"))
        del snapshot
        world.barrier("restored")
        seconds = load_seconds + time.perf_counter() - started
        print_figures(
            load_s=load_seconds, in_place_s=seconds, loaded_mb=loaded, in_place_mb=memory()
        )
        world.barrier("measured")


def take_memory(nbytes: int) -> None:
    """Write to new memory and free it, so that the kernel has it for what is measured next.

    Some hypervisors take free memory away; giving it back can take longer than reading the files.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    torch.frombuffer(pages, dtype=torch.uint8).zero_()


def print_figures(**values: float) -> None:
    """Print figures for the parent process."""
    print(*(f"{name}={value:.4f}" for name, value in values.items()))


def newest(directory: Path) -> Path:
    """Return the newest save in a directory."""
    return (list_snapshots(directory) or [directory / str(SAVES - 1)])[-1]


def remove(path: Path) -> None:
    """Remove a save, a file or a directory."""
    path.unlink() if path.is_file() else shutil.rmtree(path)


def main() -> None:
    """Run one job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("job", choices=["save", "load", "resume", "vit"])
    parser.add_argument("--kind", default="samestep", help="who saves or loads")
    parser.add_argument("--directory", type=Path, required=True, help="where saves are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.job == "load":
        restore(options.directory, options.kind)
    elif options.job == "resume":
        resume(options.directory, options.kind)
    elif options.job == "vit":
        train(options.directory, *vit(), JOBS["vit"].build().dataset)
    elif options.kind == "samestep":
        inputs, labels = torch.randn(BATCH_SIZE, WIDTH), torch.randint(WIDTH, (BATCH_SIZE,))
        train(options.directory, *mlp(), TensorDataset(inputs, labels))
    else:
        save(options.directory, options.kind)


if __name__ == "__main__":
    main()
