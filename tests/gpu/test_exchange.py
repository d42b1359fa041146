"""How GPUs exchange is decided once, from the GPUs of all workers."""

from __future__ import annotations

import os

import pytest

import samestep as ss
from tests.gpu.simulated import VISIBLE
from tests.jobs import events


def chosen(visible, variables, directory):
    """Return the exchange of this worker, given the devices that each worker sees."""
    rank = int(os.environ["RANK"])
    os.environ[VISIBLE] = visible[rank]
    os.environ.update(variables)
    with ss.init(timeout=60, dir=directory) as run:
        return run._world.exchange


@pytest.mark.parametrize(
    ("visible", "variables", "exchange"),
    [
        pytest.param(["0,1", "0,1"], {}, "NCCL", id="all are visible"),
        pytest.param(["2", "3"], {}, "NCCL", id="one each"),
        pytest.param(["0,1", "1,2"], {}, "NCCL", id="different numbers"),
        pytest.param(["0", "0"], {}, "host memory", id="the same one"),
        pytest.param(["0,1,2", "3,0"], {}, "host memory", id="one is shared by chance"),
    ],
)
def test_exchange_is_chosen_from_the_gpus_of_all(visible, variables, exchange, gpus, tmp_path):
    assert gpus.workers(2, chosen, visible, variables, tmp_path) == [exchange] * 2
    assert [event["exchange"] for event in events(tmp_path, "started")] == [exchange]
    assert ("NCCL refuses two workers on one GPU" in gpus.printed) == (exchange != "NCCL")


def test_worker_without_a_gpu_is_named(gpus, tmp_path):
    for end in gpus.ends_of(2, chosen, ["0", ""], {}, tmp_path):
        assert isinstance(end.error, ss.ConfigError)
        assert "torch finds no GPU on worker 1" in str(end.error)
