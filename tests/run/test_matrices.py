"""Muon for matrices and AdamW for other parameters, in one run, sharded or not."""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import samestep as ss
from samestep.step import exchange
from tests.faults import kill_at
from tests.jobs import events, fingerprint, images, left_by, train
from tests.workers import run_workers, try_workers

pytestmark = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="Muon is in torch since 2.9"
)
long = pytest.mark.long

STEPS = 12
NAN_AT = 5  # the step whose loss is left out
OPTIONS = {"lanes": 8, "nonfinite_loss": "skip"}


class Layers(nn.Module):
    """Matrices of three dtypes, in two storage orders; frozen, unused, or used by some lanes."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.hidden = nn.ModuleDict(
            {
                "wide": nn.Linear(32, 48, dtype=torch.float64),
                "narrow": nn.Linear(48, 32, dtype=torch.bfloat16),
                **{name: nn.Linear(32, 32) for name in ("by_lane", "by_step", "frozen")},
                "never": nn.Linear(32, 5),
            }
        )
        self.hidden["frozen"].requires_grad_(requires_grad=False)
        transposed = self.hidden["by_step"].weight
        transposed.data = transposed.data.T.contiguous().T

    def forward(self, pictures, names):
        features = self.first(pictures.flatten(1))
        wide = self.hidden["wide"](features.relu().double())
        features = features + self.hidden["narrow"](wide.relu().bfloat16()).float()
        for name in names:
            features = features + self.hidden[name](features.relu())
        return self.head(features)


def warmup_stable_decay(step):
    return min(1, (step + 1) / 3, (STEPS - step) / 4)


def job(run, *, is_sharded, hook=lambda step: None, across=None):
    """Train with two losses per step, clipping over both optimizers, and updates after two steps.

    The loss of a step is NaN.
    """

    def loss_fn(model, batch):
        pictures, labels = batch
        by_lane, by_step = bool(labels[0] < 4), run.step % 4 < 2
        names = ["frozen", *["by_lane"] * by_lane, *["by_step"] * by_step]
        loss = F.cross_entropy(model(pictures, names), labels)
        return loss * math.nan if run.step == NAN_AT else loss

    model = run.replicate(Layers())
    matrices = [p for n, p in model.hidden.named_parameters() if n.endswith("weight")]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices[:3]}, {"params": matrices[3:], "weight_decay": 0.0}]
    optimizers = torch.optim.Muon(groups, lr=0.02), torch.optim.AdamW(others, lr=0.01)
    if is_sharded:
        optimizers = tuple(run.shard(optimizer, across=across) for optimizer in optimizers)
    tracked = {"model": model, **dict(zip(("muon", "adamw"), optimizers, strict=True))}
    schedules = [LambdaLR(optimizer, warmup_stable_decay) for optimizer in optimizers]
    run.track(**tracked, first=schedules[0], second=schedules[1])
    for batch in run.batches(images(101), 17, epochs=2):
        means = run.backward(loss_fn, model, batch)
        run.backward(lambda model, _: model.hidden["wide"].weight.square().mean(), model, batch)
        run.log(means, norm=run.clip_grad_norm(model, 1.0))
        if run.step % 2:
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        hook(run.step)
    return tracked


sharded, unsharded = partial(job, is_sharded=True), partial(job, is_sharded=False)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return what one worker leaves, with an optimizer that is not sharded."""
    return left_by(unsharded, tmp_path_factory.mktemp("alone"), 1, **OPTIONS)


@pytest.mark.parametrize(
    ("make", "workers", "devices"),
    [
        pytest.param(unsharded, 2, 1, marks=long),
        (unsharded, 3, 1),
        pytest.param(sharded, 1, 1, marks=long),
        (sharded, 2, 1),
        pytest.param(sharded, 3, 1, marks=long),
        pytest.param(sharded, 4, 1, marks=long),
        (sharded, 7, 1),
        pytest.param(sharded, 8, 1, marks=long),
        (sharded, 2, 2),
    ],
)
def test_any_number_of_workers_gives_the_same_bits(make, workers, devices, expected, tmp_path):
    options = {**OPTIONS, "devices": ["cpu"] * devices}
    assert left_by(make, tmp_path, workers, **options) == expected
    assert len({name for name in expected if name.startswith("/muon/state/")}) == 4
    assert expected[f"loss at step {NAN_AT}"] == "nan"


@pytest.mark.parametrize(
    ("make", "before", "then", "after"),
    [
        (sharded, 3, sharded, 2),
        pytest.param(sharded, 2, sharded, 7, marks=long),
        (sharded, 2, unsharded, 3),
        pytest.param(unsharded, 3, sharded, 2, marks=long),
        pytest.param(unsharded, 2, unsharded, 1, marks=long),
    ],
)
def test_a_killed_run_resumes_on_another_number_of_workers(
    make, before, then, after, expected, tmp_path
):
    outcomes = try_workers(train, before, partial(make, hook=kill_at(8, 1)), tmp_path, OPTIONS)
    assert all(outcome.failed for outcome in outcomes)
    assert left_by(then, tmp_path, after, **OPTIONS) == expected
    assert 5 < events(tmp_path, "resumed")[0]["step"] < STEPS


def on_hosts(host_size, is_sharded, across, exchange_dtype):
    """Train as one of `host_size` workers of a host; return hashes of the model."""
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % host_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(host_size)
    # several exchanges, also during backward
    exchange.LEAST_BUCKET_BYTES = exchange.BUCKET_BYTES = 8000
    with ss.init(**OPTIONS, exchange_dtype=exchange_dtype) as run:
        model = job(run, is_sharded=is_sharded, across=across)["model"]
        if is_sharded and run.world_size > 1:
            assert {shard.across for shard in run._lanes.shards} == {across}
            assert len(run._lanes.shards[0].flat_buffers) > 3
        return fingerprint(model.state_dict())


@pytest.mark.parametrize(
    ("workers", "host_size", "across", "exchange_dtype"),
    [
        (2, 1, "host", None),
        (4, 2, "world", "bfloat16"),
        pytest.param(2, 1, "world", None, marks=long),
        pytest.param(4, 2, "world", None, marks=long),
        pytest.param(4, 2, "host", None, marks=long),
        pytest.param(3, 1, "host", "bfloat16", marks=long),
        (6, 2, "host", None),
    ],
)
def test_hosts_give_the_same_bits(workers, host_size, across, exchange_dtype):
    (expected,) = run_workers(on_hosts, 1, 1, False, None, exchange_dtype)
    found = run_workers(on_hosts, workers, host_size, True, across, exchange_dtype)
    assert found == [expected] * workers


def momenta_of_each_worker():
    """Train, and return the numbers and bytes of the matrices that this worker has state of."""
    with ss.init(**OPTIONS) as run:
        tracked = sharded(run)
        shard = next(s for s in run._lanes.shards if s.optimizer is tracked["muon"])
        state = shard.state_dict()["state"]
        return {number: values["momentum_buffer"].values.nbytes for number, values in state.items()}


def test_each_momentum_is_that_of_one_worker():
    of_all = {0: 8 * 32 * 48, 1: 2 * 32 * 48, 2: 4 * 32 * 32, 3: 4 * 32 * 32}
    by_worker = run_workers(momenta_of_each_worker, 3)
    found = [(number, size) for momenta in by_worker for number, size in momenta.items()]
    assert sorted(found) == sorted(of_all.items())
    assert all(by_worker)
