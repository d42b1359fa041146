"""Runs on a disk where some calls of each worker take long, as on a shared file system."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import samestep as ss
from samestep.snapshot import list_snapshots
from samestep.snapshot.read import fault, inspect, step_of

CALLS = ("unlink", "fsync", "fdatasync", "rename", "replace", "listdir", "scandir")
LONGEST_SECONDS = 0.15  # of a call
EPOCHS = 6
LOOK_SECONDS = 0.02  # between two looks at the snapshots
TRIES = 5  # a snapshot that is replaced while it is read is valid at the next look


@dataclass(frozen=True)
class SlowCalls:
    """Which worker's calls are slow follows from the seed; perhaps the run is killed at a look."""

    seed: int
    workers: int
    keeps_all: bool
    killed_at: int | None = None

    def __str__(self) -> str:
        killed = "" if self.killed_at is None else f", killed at look {self.killed_at}"
        keeps = ", all snapshots kept" * self.keeps_all
        return f"slow calls, seed {self.seed}, {self.workers} workers{keeps}{killed}"


def trials(count: int, chance: random.Random) -> Iterator[SlowCalls]:
    """Yield trials; every third one is killed."""
    for number in range(count):
        killed = chance.randrange(1, 100) if number % 3 == 2 else None
        yield SlowCalls(
            chance.randrange(2**32), chance.choice([1, 2, 3]), chance.random() < 0.5, killed
        )


def delay_calls(seed: str) -> None:
    """Let about half of the calls that change or list files take a random time in this process."""
    chance = random.Random(seed)

    def delayed(call: Callable[..., Any], longest: float, *args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        time.sleep(longest * chance.random())
        return result

    for name in CALLS:
        if longest := LONGEST_SECONDS * max(0.0, chance.uniform(-1, 1)):
            setattr(os, name, partial(delayed, getattr(os, name), longest))


def train(folder: Path, trial: SlowCalls | None = None) -> str:
    """Train with early stopping in `folder`/run, or resume there, and return a hash of its end.

    The calls are those of a `trial`, or not slow.
    """
    workers = 1 if trial is None else trial.workers
    return ss.launch(_train, folder / "run", trial, workers=workers, threads=1)


def _loss_of(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _train(directory: Path, trial: SlowCalls | None) -> str:
    keep_last = 2 if trial is not None and not trial.keeps_all else 1000
    generator = torch.Generator().manual_seed(0)
    points, targets = torch.randn(2, 32, 24, generator=generator)
    samples = torch.utils.data.TensorDataset(points, targets)
    options = {"snapshot_every": "2", "keep_last": keep_last, "keep_best": 1, "system_every": None}
    with ss.init(lanes=4, dir=directory, **options) as run:
        if trial is not None:
            delay_calls(f"{trial.seed} {run.rank}")
        model = run.replicate(torch.nn.Linear(24, 24))
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.01))
        patience = ss.Patience(2)
        run.track(model=model, optimizer=optimizer, patience=patience)
        for epoch in range(run.epoch, EPOCHS):
            for batch in run.batches(samples, batch_size=16):
                run.log(run.backward(_loss_of, model, batch))
                optimizer.step()
                optimizer.zero_grad()
            loss = run.evaluate(_loss_of, model, samples, batch_size=16)["loss"]
            run.snapshot(score=-loss if epoch < EPOCHS // 2 else -1e3)
            if patience.step(loss if epoch < EPOCHS // 2 else 1e3):
                run.finish()
                break
        best = run.best_snapshot()
        digest = hashlib.sha256(f"{run.step} {best.step} {best.score}".encode())
        for state in (model.state_dict(), best.state["model"]):
            for name, tensor in sorted(state.items()):
                digest.update(f"{name} {tensor.tolist()}".encode())
    return digest.hexdigest()


class Snapshots:
    """The snapshots of a run that were valid when they were looked at.

    One that was valid must stay so, or with retention, any one.
    """

    def __init__(self, directory: Path, trial: SlowCalls) -> None:
        self._directory, self._trial = directory, trial
        self._valid: set[int] = set()
        self._looks, self._next = 0, 0.0
        self.lost = ""

    def look(self, pid: int) -> None:
        """Compare with what was valid before; perhaps kill the run, and its workers with it."""
        if time.monotonic() < self._next or self.lost:
            return
        self._next, self._looks = time.monotonic() + LOOK_SECONDS, self._looks + 1
        for _ in range(TRIES):
            valid = {
                step_of(path) or 0
                for path in list_snapshots(self._directory)
                if fault(path, inspect) is None
            }
            is_less = not self._valid <= valid if self._trial.keeps_all else not valid
            if not (is_less and self._valid):
                self._valid |= valid
                break
            time.sleep(LOOK_SECONDS)
        else:
            self.lost = f"the snapshots {sorted(self._valid)} were valid, then only {sorted(valid)}"
        if self._looks == self._trial.killed_at:
            os.kill(pid, signal.SIGKILL)
