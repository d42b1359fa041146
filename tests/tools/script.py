"""A training script that is good, or has the fault that its argument names."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep as ss


class Counter(nn.Linear):
    """A linear layer that scales its inputs by the number of its calls."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs * self.calls)


class Counting(TensorDataset):
    """A data set that returns its samples in the order of calls, but not in the first six.

    A run itself refuses samples that differ in two of its first loads.
    """

    calls = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        return super().__getitem__(self.calls % len(self) if self.calls > 6 else index)


def build(way: str) -> nn.Module:
    """Return the model for points [n, 64]."""
    if way == "counts calls":
        return Counter(64, 10)
    if way == "rank 0 goes forward":
        return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))
    return nn.Linear(64, 10)


def train(run: ss.Run, way: str) -> None:
    """Train a linear model on 20 random points in batches of 8."""
    unseeded = torch.Generator()
    unseeded.seed()  # from the operating system, different in every process

    def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        generator = unseeded if way == "unseeded" else None
        seen.append(batch[0].sum().item())
        points = batch[0] + torch.rand(64, generator=generator)
        return F.cross_entropy(model(points), points.long()[:, 0].clamp(0, 9))

    seen: list[float] = []
    steps_taken = 0
    kind = Counting if way == "counts loads" else TensorDataset
    points = kind(torch.randn(20, 64, generator=torch.Generator().manual_seed(1)))
    model = run.replicate(EARLY or build(way))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if way != "untracked":
        run.track(model=model, optimizer=optimizer)
    steps = 2 if way == "ends early" and run.world_size > 1 else 9
    for batch in run.batches(points, 8, steps=steps):
        means = run.backward(loss_fn, model, batch)
        run.log(means, **({"seen": sum(seen)} if way == "logs its lanes" else {}))
        seen.clear()
        if way == "counts steps":
            steps_taken += 1
            optimizer.param_groups[0]["lr"] = 0.1 / steps_taken
        if way == "depends on the rank" and run.step == 1 and run.rank == 1:
            model.weight.grad.mul_(2)
        if way == "fails" and run.step == 1:
            raise RuntimeError("no more memory")
        if way == "rank 0 goes forward" and run.is_main:
            model(torch.ones(4, 64))
        optimizer.step()
        optimizer.zero_grad()


def keep_best(run: ss.Run, *, tracks: bool) -> None:
    """Load the best weights at the end, from variables or a dict that is tracked."""
    best_loss, best_weights = float("inf"), dict[str, torch.Tensor]()
    tracked: dict[str, Any] = {"loss": best_loss, "weights": best_weights}
    model = run.replicate(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer, **({"best": tracked} if tracks else {}))
    if tracks:
        best_loss, best_weights = tracked["loss"], tracked["weights"]
    for batch in run.batches(TensorDataset(torch.ones(20, 8)), 8, steps=9):
        run.backward(lambda model, batch: model(batch[0]).mean(), model, batch)
        optimizer.step()
        optimizer.zero_grad()
        loss = float(run.step)  # the first weights are the best
        if loss < best_loss:
            best_loss, best_weights = loss, copy.deepcopy(model.state_dict())
            tracked.update(loss=best_loss, weights=best_weights)
    model.load_state_dict(best_weights)


EARLY = None
if sys.argv[1:] == ["builds early"]:
    torch.seed()  # as in a script that samestep does not start
    EARLY = build(sys.argv[1])

if __name__ == "__main__" and sys.argv[1] != "no run":
    with ss.init(seed=5) as run:
        if sys.argv[1].endswith("the best"):
            keep_best(run, tracks=sys.argv[1] == "tracks the best")
        else:
            train(run, sys.argv[1])
