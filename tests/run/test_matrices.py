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
from torch.utils.data import Dataset

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
        pytest.param(unsharded, 3, 1, marks=long),  # a killed run ends so
        pytest.param(sharded, 1, 1, marks=long),
        pytest.param(sharded, 2, 1, marks=long),  # a killed run ends so
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
        pytest.param(2, 1, "host", None, marks=long),
        pytest.param(4, 2, "world", "bfloat16", marks=long),
        pytest.param(2, 1, "world", None, marks=long),
        pytest.param(4, 2, "world", None, marks=long),
        (4, 2, "host", None),
        pytest.param(3, 1, "host", "bfloat16", marks=long),
        pytest.param(6, 2, "host", None, marks=long),
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


class Rows(Dataset):
    """Documents of random words in rows of equal length, of which the last one is padded."""

    def __init__(self, length=16):
        generator = torch.Generator().manual_seed(5)
        sizes = torch.randint(2, 30, (30,), generator=generator).tolist()
        empty = {"tokens": 0, "targets": -100, "positions": 0, "documents": -1}
        columns = {name: [] for name in empty}
        for number, size in enumerate(sizes):
            words = torch.randint(20, (size,), generator=generator).tolist()
            columns["tokens"] += words
            columns["targets"] += [*words[1:], -100]
            columns["positions"] += range(size)
            columns["documents"] += [number] * size
        self.columns = {
            name: torch.tensor(values + [empty[name]] * (-len(values) % length)).view(-1, length)
            for name, values in columns.items()
        }

    def __len__(self):
        return len(self.columns["tokens"])

    def __getitem__(self, index):
        return {name: rows[index] for name, rows in self.columns.items()}


class Block(nn.Module):
    """Attention and a layer of neurons, both of what RMSNorm returns."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, features, mask):
        parts = self.qkv(self.norms[0](features)).unflatten(2, (3, 4, -1))
        attended = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), mask)
        features = features + self.out(attended.transpose(1, 2).flatten(2))
        return features + self.down(self.up(self.norms[1](features)).relu().square())


class Decoder(nn.Module):
    """Predicts the next words of each document from its words before them."""

    def __init__(self, width=32):
        super().__init__()
        self.words, self.places = nn.Embedding(20, width), nn.Embedding(30, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 20, bias=False)

    def forward(self, batch):
        documents = batch["documents"]
        mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        features = self.words(batch["tokens"]) + self.places(batch["positions"])
        for block in self.blocks:
            features = block(features, mask)
        return self.head(self.norm(features))


def decoder_job(run, *, is_sharded, hook=lambda step: None):
    """Train a decoder with the mean over all targets, whose number varies from row to row."""

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1), batch["targets"].flatten())

    model = run.replicate(Decoder())
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95)),
    ]
    if is_sharded:
        optimizers = [*map(run.shard, optimizers)]
    muon, adamw = optimizers
    schedules = [LambdaLR(optimizer, warmup_stable_decay) for optimizer in optimizers]
    tracked = {"model": model, "muon": muon, "adamw": adamw}
    run.track(**tracked, first=schedules[0], second=schedules[1])
    for batch in run.batches(Rows(), 8, steps=STEPS):
        means = run.backward(
            loss_fn, model, batch, count=lambda batch: int((batch["targets"] >= 0).sum())
        )
        run.log(means, norm=run.clip_grad_norm(model, 1.0))
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
        hook(run.step)
    return tracked


def test_a_decoder_on_packed_rows_is_killed_and_resumes(tmp_path):
    options = {"lanes": 6, "precision": "bfloat16"}
    alone = left_by(partial(decoder_job, is_sharded=False), tmp_path / "alone", 1, **options)
    losses = [float(alone[f"loss at step {step}"]) for step in range(STEPS)]
    assert losses[-1] < losses[0]
    killed = partial(decoder_job, is_sharded=True, hook=kill_at(7, 0))
    outcomes = try_workers(train, 3, killed, tmp_path / "killed", options)
    assert all(outcome.failed for outcome in outcomes)
    decoder = partial(decoder_job, is_sharded=True)
    assert left_by(decoder, tmp_path / "killed", 2, **options) == alone
    assert 4 < events(tmp_path / "killed", "resumed")[0]["step"] < STEPS
