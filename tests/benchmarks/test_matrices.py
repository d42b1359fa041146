from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.jobs.job import BATCHES_AN_EPOCH
from benchmarks.matrices import BATCH_SIZE, JOB, TRAINERS, build
from tests.workers import run_workers

pytestmark = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="Muon is in torch since 2.9"
)


def test_all_train_the_same_and_sharding_divides_the_state():
    """Each batch is the complete data set, so that the loss does not depend on its order."""
    small = replace(
        JOB, batch_size=BATCHES_AN_EPOCH * BATCH_SIZE, steps=1, warmup_steps=1,
        build=partial(build, 8, 1, 4),
    )  # fmt: skip
    by_name = {name: run_workers(train, 2, small) for name, train in TRAINERS.items()}
    states = {name: [run["state_megabytes"] for run in runs] for name, runs in by_name.items()}
    assert states["replicated"] == states["ddp"]
    assert sum(states["samestep"]) == pytest.approx(states["ddp"][0], rel=0.01)
    assert by_name["samestep"][0]["loss"] == by_name["replicated"][0]["loss"]
    losses = [run["loss"] for run in by_name["ddp"]]
    assert sum(losses) / 2 == pytest.approx(by_name["samestep"][0]["loss"], rel=1e-4)
