from __future__ import annotations

import signal

import pytest
import torch

from benchmarks import recovery
from tests.jobs import snapshots
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.filterwarnings("default")  # what peers are warned of is theirs to mend


@pytest.mark.parametrize("way", recovery.WAYS)
def test_a_killed_worker_ends_the_run_and_the_next_start_finishes_it(way, tmp_path):
    killed = try_workers(recovery.WAYS[way], 2, tmp_path)
    assert killed[1].exitcode == -signal.SIGKILL
    assert killed[0].failed
    run_workers(recovery.WAYS[way], 2, tmp_path)
    assert last_step(way, tmp_path) == recovery.STEPS


def last_step(way, directory):
    if way == "samestep":
        return int(snapshots(directory / "run")[-1].removeprefix("step-"))
    return torch.load(directory / "checkpoint.pt", weights_only=True)["step"]
