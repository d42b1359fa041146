"""A state that no worker may hold is trained, killed, resumed by others and exported."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import samestep as ss
from samestep.sharded.unit import Unit
from samestep.snapshot.read import export, list_snapshots
from tests.sharded.jobs import Block, Words, adamw, digest, loss_fn, texts
from tests.workers import run_workers, try_workers

MIB = 1 << 20
WIDTH, BLOCKS = 256, 60  # of 1 MiB each
MOST_MIB = 160  # that a worker may have, beside what it has before there is a model


def usage(name: str) -> int:
    """Return bytes of this process: VmData is private memory, RssAnon those that were written."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:")) * 1024


def limit(nbytes: int) -> None:
    most = usage("VmData") + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def net() -> Words:
    return Words(WIDTH, BLOCKS)


def large(folder: Path, steps: int, *, is_full: bool = True, kills: bool = False) -> str:
    """Train with a limit of memory; return what `digest` does."""
    resumes = bool(list_snapshots(folder))
    with ss.init(dir=folder, lanes=6, progress=False, snapshot_every=2) as run:
        weights = folder.parent / "start.safetensors"
        # files, and the state that all workers read together when they resume, are mapped: that
        # counts as if each worker could write all of it
        files = [*(folder.glob("step-*/tensors*") if resumes else ()), *[weights] * is_full]
        mapped = sum(file.stat().st_size for file in files)
        run.replicate(Words(8, 1), shard="full", units=(Block,))  # imports what this takes
        before = usage("RssAnon")
        limit(MOST_MIB * MIB + mapped)
        with torch.device("meta"):
            model = net()
        if is_full:
            model = run.replicate(model, shard="full", units=(Block,), weights=weights)
        else:
            model = run.replicate(model.to_empty(device="cpu"))
        optimizer = adamw(run, model)
        run.track(model=model, optimizer=optimizer)
        assert usage("RssAnon") - before < MOST_MIB * MIB
        for batch in run.batches(texts(), 8, steps=steps):
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            if kills and run.step == 3 and run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return digest(run, model)


def exported(folder: Path) -> list[str]:
    limit(MOST_MIB * MIB)
    (*_, newest) = list_snapshots(folder)
    export(newest, folder.parent / "exported", shard_bytes=4 * MIB)
    names = set[str]()
    for path in (folder.parent / "exported").glob("*.safetensors"):
        assert path.stat().st_size < 5 * MIB
        with safe_open(path, "pt") as file:
            names |= {*file.keys()}
    return sorted(names)


@pytest.mark.long
def test_a_state_that_no_worker_may_hold(tmp_path):
    torch.manual_seed(0)
    start = {name: value for name, value in net().state_dict().items() if name != "head.weight"}
    # parameters, gradients and the two moments of AdamW
    assert 4 * sum(value.nbytes for value in start.values()) > 1.5 * MOST_MIB * MIB
    save_file(start, tmp_path / "start.safetensors")
    (end,) = try_workers(lambda: large(tmp_path / "other", 2, is_full=False), 1)
    assert isinstance(end.error, ss.OutOfMemoryError | MemoryError | RuntimeError)
    assert "memory" in str(end.error)
    expected = run_workers(large, 5, tmp_path / "whole", 4)
    ends = try_workers(lambda: large(tmp_path / "run", 4, kills=True), 6)
    assert ends[1].exitcode == -signal.SIGKILL
    assert run_workers(large, 5, tmp_path / "run", 4) == expected
    assert run_workers(exported, 1, tmp_path / "run") == [sorted(net().state_dict())]


def sums_of(lanes: int) -> tuple[int, int]:
    """Return the most bytes of sums of lanes at a time, and the bytes of this worker's rows."""
    most, add_lane = 0, Unit.add_lane
    units: list[Unit] = []

    def counted(unit: Unit) -> None:
        nonlocal most
        add_lane(unit)
        kept = [values for each in units for _, values in each._sums._sums]
        most = max(most, sum(values.nbytes for values in kept))

    Unit.add_lane = counted
    try:
        with ss.init(lanes=lanes, progress=False) as run:
            model = run.replicate(Words(), shard="full", units=(Block,))
            units += run._models._models[id(model)].units
            optimizer = adamw(run, model)
            for batch in run.batches(texts(2 * lanes), lanes, steps=1):
                run.backward(loss_fn, model, batch)
                optimizer.step()
            rows = sum(part.segment.nbytes for unit in units for part in unit.parts)
            return most, rows
    finally:
        Unit.add_lane = add_lane


@pytest.mark.parametrize(("lanes", "sums"), [(8, 3), (64, 6)])
def test_a_worker_keeps_few_sums_of_lanes(lanes, sums):
    """The last turn completes all sums, and one before it, there are log2(lanes / workers)."""
    for most, rows in run_workers(sums_of, 2, lanes):
        assert rows * (sums - 2) < most <= rows * sums
