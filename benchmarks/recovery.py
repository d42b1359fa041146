"""Time from the kill of one of two workers to the end of the next step.

usage: python -m benchmarks.recovery [--rounds 5]

The worker is killed with SIGKILL after its fifth step, and both systems restart the workers. With
samestep they are forked from the launcher and resume from the copy of the state in its memory. With
torchrun (`--max-restarts`) the script loads the latest checkpoint, as torchrun's documentation
teaches. torchrun gives restarted workers a new store: the store that they share by default can hold
addresses of dead workers, and restarts then fail or hang (torch 2.13). Both save after every step.
Contenders take turns, and every ratio compares runs of one round.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import samestep as ss
from benchmarks.measure import printed
from benchmarks.start.network import BATCH_SIZE, dataset, network
from benchmarks.turns import figure, in_turn, samestep, table, torchrun

STEPS = 10
LAST_STEP = 5  # of the killed worker
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def loss_fn(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch."""
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def with_samestep(directory: Path) -> None:
    """Train with a copy of the state in memory after every step."""
    with ss.init(dir=directory / "run", hot_every=1) as run:
        again = killed_in(directory)
        model = run.replicate(network())
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(dataset(), BATCH_SIZE, steps=STEPS):
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            end_step(run.step + 1, run.rank, directory, again=again)


def with_ddp(directory: Path) -> None:
    """Train with a checkpoint after every step; start from the latest one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    checkpoint, done = directory / "checkpoint.pt", 0
    again = killed_in(directory)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    replica = DistributedDataParallel(model)
    data = dataset()
    loader = DataLoader(data, BATCH_SIZE // dist.get_world_size(), sampler=DistributedSampler(data))
    for step, batch in itertools.islice(enumerate(loader, 1), done, STEPS):
        loss_fn(replica, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                directory / "next.pt",
            )
            (directory / "next.pt").replace(checkpoint)
        end_step(step, dist.get_rank(), directory, again=again)
    dist.barrier()
    dist.destroy_process_group()


def killed_in(directory: Path) -> bool:
    """Return whether a worker was killed before this one started."""
    return (directory / "killed").exists()


def end_step(step: int, rank: int, directory: Path, *, again: bool) -> None:
    """Print when a step ended after a restart; before it, kill worker 1 at its last step."""
    if again:
        print(f"step_at={time.monotonic():.4f}", flush=True)
    elif rank == 1 and step == LAST_STEP:
        (directory / "killed").touch()
        print(f"killed_at={time.monotonic():.4f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


WAYS = {"samestep": with_samestep, "ddp": with_ddp}
NAMES = {"samestep": "samestep", "torchrun, DDP": "ddp"}


def recovery(way: str) -> dict[str, float]:
    """Return the seconds from the kill to the end of the next step."""
    with tempfile.TemporaryDirectory() as directory:
        module = ["benchmarks.recovery", "--as", way, "--directory", directory]
        told = printed(
            samestep(2, *module)
            if way == "samestep"
            else ["env", OWN_STORE, *torchrun(2, *module, restarts=1)]
        )
    if not told["killed_at"] or not told["step_at"]:
        raise SystemExit(
            f"{way} made no step after the kill; run it with --as {way} --directory DIR to see why"
        )
    return {"seconds": min(told["step_at"]) - told["killed_at"][0]}


def main() -> None:
    """Run the comparison, or one worker of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contender (default: 5)")
    parser.add_argument("--as", dest="way", choices=WAYS, help="train as one worker of a contender")
    parser.add_argument("--directory", type=Path, help="where that worker keeps its state")
    arguments = parser.parse_args()
    if arguments.way:
        WAYS[arguments.way](arguments.directory)
        return
    measurements = in_turn(
        {name: partial(recovery, way) for name, way in NAMES.items()}, arguments.rounds
    )
    print(table("seconds", {"kill to next step, 2 workers": figure("seconds", measurements)}))


if __name__ == "__main__":
    main()
