"""Lanes that are computed again, with bits flipped on one of the workers."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss
from samestep.config import Config
from samestep.errors import ConfigError, RecheckError
from samestep.guards import plugins_of
from samestep.plugins import recheck
from samestep.plugins.recheck import LaneCheck, Recheck
from samestep.step.lane_engine import LaneEngine
from samestep.step.layout import lanes_of
from tests.jobs import Net, classify, fit, images
from tests.run import kinds
from tests.step.test_lane_engine import backward, gradients, model_of
from tests.workers import run_workers, try_workers
from tests.worlds import on_hosts

LANES = 6
FREE = "free of faults"


class Faults:
    """Flips bits of one worker while it computes a lane: once, or each time (`times`)."""

    def __init__(self, run, model):
        self._status, self.rank = run._world.status, run.rank
        self.place, self.lane, self.times, self.flips = FREE, -1, 0, 0
        model.first.register_forward_hook(
            lambda module, inputs, output: self._flipped(output, "activations")
        )
        model.head.weight.register_hook(lambda gradient: self._flipped(gradient, "gradients"))

    def _flipped(self, tensor, place):
        is_here = self._status.activity == f"computing lane {self.lane}"
        if place != self.place or not is_here or not self.times:
            return tensor
        self.times, self.flips = self.times - 1, self.flips + 1
        tensor = tensor.clone()
        flip(tensor)
        return tensor


def flip(tensor):
    """Flip the highest bit of the first element's mantissa."""
    tensor.detach().view(-1).view(torch.int32)[0] ^= 1 << 22


def train_with(faults_of, lanes=LANES, **options):
    """Return (error, flips) of each step, which computes its lane once with a fault and once not.

    `faults_of` are (place, workers to the right of the lane's, times) of each step.
    """
    found = []
    with ss.init(lanes=lanes, recheck_every=1, **options) as run:
        model = run.replicate(Net())
        faults = Faults(run, model)
        for batch in run.batches(images(24 * len(faults_of)), 24, steps=len(faults_of)):
            place, shift, times = faults_of[run._progress.step]
            lane = run._progress.step % lanes
            (owner,) = {r for r in range(run.world_size) if lane in owned(r, run)}
            if run.rank == (owner + shift) % run.world_size:
                faults.place, faults.lane, faults.times = place, lane, times
            if faults.place == "parameters":
                flip(model.head.bias)
            try:
                run.backward(classify, model, batch)
                error = None
            except RecheckError as raised:
                error = raised
                assert all(parameter.grad is None for parameter in model.parameters())
            if faults.place == "parameters":
                flip(model.head.bias)  # as before
                faults.flips += 1
            found.append((error, faults.flips))
            faults.place, faults.flips = FREE, 0
            run.backward(classify, model, batch)
            model.zero_grad()
    return found


def owned(rank, run):
    return lanes_of(rank, run.world_size, run.lanes)


GRADIENT = "the gradient of the parameter 'head.weight' of module 0 (Net)"
PARAMETER = "the parameter 'head.bias' of module 0 (Net)"
FAULTS = [
    (FREE, 0, 0),
    ("gradients", 0, 1),  # of the lane's worker, once
    ("gradients", 1, 9),  # of the worker that checks it, each time
    ("activations", 0, 9),
    ("activations", 1, 1),
    ("parameters", 0, 1),
    ("parameters", 2, 1),  # another worker checks the first lane the second time
    ("gradients", 0, 9),
]


def test_three_workers_find_and_name_the_one_whose_bits_are_wrong():
    by_rank = run_workers(train_with, 3, FAULTS)
    assert len(FAULTS) > LANES
    for step, (place, shift, times) in enumerate(FAULTS):
        owner = step % LANES // 2
        errors = [results[step][0] for results in by_rank]
        flips = [results[step][1] for results in by_rank]
        if place == FREE:
            assert errors == [None] * 3
            assert not any(flips)
            continue
        guilty = (owner + shift) % 3
        # once in the check, and perhaps once more when all compute it again
        assert [bool(number) for number in flips] == [rank == guilty for rank in range(3)]
        for rank, error in enumerate(errors):
            assert (error.ranks, error.step, error.lane) == ((guilty,), step, step % LANES)
            assert error.is_certain
            assert error.is_retryable
            assert error.is_secondary == (rank != guilty)
            assert f"worker {guilty} ({error.hosts[0]}, cpu)" in str(error)
            repeats = times > 1 or place == "parameters"
            assert f"it had {'wrong bits again' if repeats else 'the right bits'}" in str(error)
            if place == "activations":
                assert "tensors that differ" in str(error)
            else:
                assert error.tensor == (PARAMETER if place == "parameters" else GRADIENT)


def test_two_workers_are_both_named():
    first, second = run_workers(train_with, 2, [("gradients", 1, 1), ("activations", 0, 9)])
    for (once, _), (always, _) in first, second:
        for error in once, always:
            assert error.ranks == (0, 1)
            assert not error.is_certain
            assert not error.is_secondary
            assert "which a third worker could have found" in str(error)
        assert once.tensor == GRADIENT
        assert "Worker 1 had other bits the second time" in str(once)
        assert "the second time" not in str(always)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_single_worker_computes_the_lane_twice(lanes):
    results = train_with([(FREE, 0, 0), ("gradients", 0, 1), ("activations", 0, 1)], lanes)
    assert [flips for _, flips in results] == [0, 1, 1]
    none, gradient, activation = (error for error, _ in results)
    assert none is None
    assert gradient.tensor == GRADIENT
    assert (activation.ranks, activation.lane) == ((0,), 2 % lanes)
    assert "computed other bits of lane 0 at step 2" in str(activation)
    assert "the check of step 0 passed" in str(gradient)


def test_without_a_majority_nobody_is_blamed():
    def body():
        with ss.init(lanes=3, recheck_every=1) as run:
            model = run.replicate(nn.Linear(64, 10))

            def noisy(model, batch):
                number = torch.rand((), generator=torch.Generator().manual_seed(calls()))
                return F.cross_entropy(model(batch[0].flatten(1)), batch[1]) * number

            counter = iter(range(run.rank * 100, run.rank * 100 + 100))
            calls = counter.__next__
            for batch in run.batches(images(12), 12, steps=1):
                with pytest.raises(RecheckError, match="there is no majority") as raised:
                    run.backward(noisy, model, batch)
            return raised.value.ranks, raised.value.is_certain

    assert run_workers(body, 3) == [((0, 1), False)] * 3


@pytest.mark.parametrize(
    ("workers", "embed"),
    [(1, None), (2, None), (3, None), (3, lambda model, batch: model(batch[0]))],
)
def test_a_wrong_loss_blames_no_sample(workers, embed):
    """Its gradient is right, so that only the loss shows the fault."""

    def body():
        with ss.init(lanes=3, recheck_every=1) as run:
            model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
            is_guilty = iter([run.rank == 0] + 9 * [False])

            def loss_fn(model, batch):
                scores = batch if embed else model(batch[0])
                loss = scores.square().mean()
                loss.data.mul_(float("nan") if next(is_guilty) else 1.0)
                return loss

            for batch in run.batches(images(12), 12, steps=1):
                with pytest.raises(RecheckError) as raised:
                    run.backward(loss_fn, model, batch, embed=embed)
            error = raised.value
            return error.ranks, error.tensor, error.is_certain, "learning rate" in str(error)

    expected = [0, 1] if workers == 2 else [0]
    assert (
        run_workers(body, workers) == [(tuple(expected), "the loss", workers == 3, False)] * workers
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_other_samples_are_no_fault_of_the_hardware(workers):
    class Noisy(torch.utils.data.Dataset):
        begun = False  # to compute: the first loads are compared with each other

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.tensor([time.monotonic() if Noisy.begun else 1.0])

    def loss_fn(model, batch):
        Noisy.begun = True
        return model(batch).mean()

    def body():
        with ss.init(lanes=3, recheck_every=1) as run:
            model = run.replicate(nn.Linear(1, 1))
            for batch in run.batches(Noisy(), 6, steps=1):
                run.backward(loss_fn, model, batch)

    for end in try_workers(body, workers):
        assert type(end.error) is ss.DataError
        assert str(end.error).startswith("the samples of lane 0 at step 0 have other values each")


def counted(job, lanes, **options):
    """Train with a job; return (lane, its worker, the one that checks it) of each check."""
    checks, has_gradients = [], set()
    compare = LaneCheck.compare

    def compared(check, reports):
        compare(check, reports)
        has_gradients.add(len(reports[check.owner]["first"]) > 1)
        checks.append((check.lane, check.owner, check.checker))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneCheck, "compare", compared)
        with ss.init(lanes=lanes, recheck_every=1, **options) as run:
            job(run)
    assert True in has_gradients  # not for a lane without items
    return checks


def scaled_job(run):
    """Train in float16, whose losses are scaled."""
    model = run.replicate(Net())
    optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.05))
    scaler = run.grad_scaler(init_scale=4.0)

    def loss_fn(model, batch):
        loss, scalars = classify(model, batch)
        return scaler.scale(loss), scalars

    return fit(run, model, optimizer, images(101), loss_fn=loss_fn, tracked={"scaler": scaler})


def loaded_job(run):
    return kinds.augmented_job(run, loader_workers=1)


def test_ordinary_jobs_raise_no_error_and_every_lane_has_its_turn():
    def body():
        jobs = [kinds.streams_job, kinds.buffers_job, kinds.words_job, scaled_job, loaded_job]
        jobs.append(kinds.contrastive_job(sharded=True))
        checks = [counted(job, 4) for job in jobs]
        # the only lane of a worker, whose gradients go to the exchange during backward
        checks.append(counted(kinds.mixed_dtypes_job, 2, exchange_dtype="bfloat16"))
        return checks

    first, second = run_workers(body, 2)
    assert first == second
    for checks in first:
        assert {owner for _, owner, _ in checks} == {0, 1}
        assert all(checker == 1 - owner for _, owner, checker in checks)
    assert [lane for lane, _, _ in first[0]] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_gradients_are_the_same_with_checks():
    """On two hosts, which send gradients during backward, and with a lane without samples."""

    def body(world, every):
        engine = LaneEngine(world, Config(recheck_every=every), 5, [torch.device("cpu")])
        engine.use(plugins_of(engine))
        model = model_of(engine)
        left = []
        for step in range(5):
            backward(engine, model, step=step)
            left.append(gradients(model))
            model.zero_grad()
        return left

    expected = on_hosts(2, 2, body, None)
    assert on_hosts(2, 2, body, 1) == expected


def test_another_host_checks_if_there_is_one():
    hosts = [range(2), range(2, 3), range(3, 4)]
    world = SimpleNamespace(size=4, hosts=hosts, machines=())
    assert [recheck._checker(world, 1, turn) for turn in range(3)] == [2, 3, 2]
    world.hosts = [range(4)]
    assert [recheck._checker(world, 1, turn) for turn in range(3)] == [2, 3, 0]


def test_what_cannot_be_checked_is_refused():
    with ss.init(lanes=2, recheck_every=100) as run:
        model = run.replicate(nn.Linear(64, 10))
        for batch in run.batches(images(12), 12, steps=1):
            with pytest.raises(ConfigError, match=r"recheck_every=100 needs run\.backward"):
                next(iter(batch.lanes(model)))
    with pytest.raises(ConfigError, match="recheck_every must be at least 1"):
        ss.init(recheck_every=0)
    config = Config(recheck_every=1, deterministic=False)
    with pytest.raises(ConfigError, match="needs deterministic=True on GPUs"):
        Recheck(SimpleNamespace(config=config, devices=[torch.device("cuda")]), [], [])
