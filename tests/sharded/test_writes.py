"""The workers of a host share rows: who writes to its own waits until nobody computes with them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from tests.workers import run_workers

READS = 3_000


class Reader(nn.Linear):
    """A layer that can read its weight for as long as another worker is about to write to it."""

    flag = None  # a file that the other worker makes just before

    def forward(self, x):
        if self.flag is not None:
            while not self.flag.exists():
                time.sleep(0.001)
            assert len({self.weight.sum().item() for _ in range(READS)}) == 1
        return super().forward(x)


def by_hand(model, _):
    with torch.no_grad():
        model[0].weight.mul_(2)


def by_a_list(model, _):
    with torch.no_grad():
        torch._foreach_mul_([model[1].weight, model[0].weight], 2)


def by_the_optimizer(_, optimizer):
    optimizer.step()


def written(folder, write):
    torch.set_num_threads(1)
    with ss.init(lanes=2, progress=False) as run:
        torch.manual_seed(1)
        net = nn.Sequential(Reader(64, 64), nn.Linear(64, 1))
        model = run.replicate(net, shard="full", units=(Reader,))
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        inputs = torch.randn(4, 64)
        for batch in run.batches(TensorDataset(inputs), 4, steps=1):
            run.backward(lambda model, lane: model(lane[0]).square().mean(), model, batch)
            net[0].flag = folder / "flag" if run.rank else None
            with torch.no_grad():
                model(inputs)
            (folder / "flag").touch()
            write(model, optimizer)


@pytest.mark.parametrize("write", [by_hand, by_a_list, by_the_optimizer])
def test_rows_are_written_once_nobody_reads_them(write, tmp_path):
    run_workers(written, 2, tmp_path, write)
