from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.jobs.job import BATCHES_AN_EPOCH, Job
from benchmarks.matrices import BATCH_SIZE, TRAINERS, build
from tests.workers import run_workers

NEEDS_MUON = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="Muon is in torch since 2.9"
)
# Each batch is the complete data set, so that the loss does not depend on its order.
SMALL = Job(
    "small", BATCHES_AN_EPOCH * BATCH_SIZE, steps=1, warmup_steps=1, build=partial(build, 8, 1, 4)
)


@pytest.mark.parametrize("kind", [pytest.param("muon", marks=NEEDS_MUON), "adamw"])
def test_all_train_the_same_and_sharding_divides_the_state(kind):
    names = ("samestep", "replicated", "ddp")
    by_name = {name: run_workers(TRAINERS[name], 2, SMALL, kind) for name in names}
    states = {name: [run["state_megabytes"] for run in runs] for name, runs in by_name.items()}
    assert states["replicated"] == states["ddp"]
    assert sum(states["samestep"]) == pytest.approx(states["ddp"][0], rel=0.01)
    assert by_name["samestep"][0]["loss"] == by_name["replicated"][0]["loss"]
    losses = [run["loss"] for run in by_name["ddp"]]
    assert sum(losses) / 2 == pytest.approx(by_name["samestep"][0]["loss"], rel=1e-4)
