"""The chain of a run is the same at any number of workers, through kills, resumes and resizes."""

from __future__ import annotations

import random
import shutil
import signal
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.errors import SnapshotError
from samestep.plugins.history import History
from samestep.record.chain import EVENT, FILE, Chain, snapshots_of
from tests.faults import kill_at
from tests.jobs import STEPS, events, image_job, images, train
from tests.run.kinds import streams_job
from tests.workers import run_workers, try_workers


def chain_of(directory):
    """Check the chain of a run; return its heads."""
    with closing(Chain.open(directory)) as chain:
        chain.check()
        return [
            chain[step].head.hex()[:16] for step in range(chain.first, chain.first + len(chain))
        ]


def states_of(directory):
    return {steps: event["digest"] for steps, event in snapshots_of(directory).items()}


@pytest.mark.parametrize("job", [image_job, pytest.param(streams_job, marks=pytest.mark.long)])
def test_the_chain_and_state_are_the_same_through_a_kill_and_a_resize(tmp_path, job):
    whole, resized = tmp_path / "whole", tmp_path / "resized"
    run_workers(train, 1, job, whole)
    expected = chain_of(whole)
    assert len(expected) == len({*expected}) == STEPS
    killed = partial(job, hook=kill_at(2, 1))
    outcomes = try_workers(train, 2, killed, resized)
    assert outcomes[1].exitcode == -signal.SIGKILL
    run_workers(train, 3, job, resized, {"stop_after": 5})
    assert chain_of(resized) == expected[:5]
    run_workers(train, 4, job, resized)
    assert chain_of(resized) == expected
    states = states_of(resized)
    assert states[STEPS] == states_of(whole)[STEPS]
    assert states.items() <= states_of(whole).items()
    newest = events(resized, EVENT)[-1]
    assert (newest["step"], newest["chain"][:16]) == (STEPS, expected[-1])


def test_a_snapshot_carries_the_head_to_another_directory(tmp_path):
    """The file may be gone, or belong to another history."""
    whole, elsewhere = tmp_path / "whole", tmp_path / "elsewhere"
    run_workers(train, 1, image_job, whole, {"keep_last": STEPS})
    expected = chain_of(whole)
    resume = {"resume": whole / "step-00000003"}
    run_workers(train, 2, image_job, elsewhere, {**resume, "stop_after": 5})
    assert chain_of(elsewhere) == expected[3:5]
    shutil.rmtree(elsewhere / "record")
    run_workers(train, 1, image_job, elsewhere)
    assert chain_of(elsewhere) == expected[5:]


def small_run(directory, steps=4, change=lambda *_: None, **options):
    """Train in this process for some steps; `change(run, model, optimizer, means)` ends a body."""
    data = TensorDataset(*images(40).tensors)
    with ss.init(dir=directory, **{"lanes": 4, "snapshot_every": None, **options}) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(data, 8, steps=steps):
            for pictures, labels in batch.lanes(model):
                loss = nn.functional.cross_entropy(model(pictures), labels)
                batch.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            change(run, model, optimizer, batch)


def first_difference(directory, other):
    """Return the first row that differs, and its parts that do."""
    with closing(Chain.open(directory)) as first, closing(Chain.open(other)) as second:
        step = next(n for n in range(len(first)) if first[n].head != second[n].head)
        return step, [
            part
            for part in ("samples", "losses", "rates", "program")
            if getattr(first[step], part) != getattr(second[step], part)
        ]


def nudge(run, model, *_):
    if run.step == 1:
        with torch.no_grad():
            weight = model[1].weight
            weight[0, 0] += 1e-4


def decay(run, _, optimizer, *__):
    if run.step == 1:
        optimizer.param_groups[0]["weight_decay"] = 1e-9


def backward_again(run, model, _, batch):
    if run.step == 1:
        for pictures, labels in batch.lanes(model):
            batch.backward(nn.functional.cross_entropy(model(pictures), labels))


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"change": nudge}, (2, ["losses"])),  # of the next forward pass
        ({"change": decay}, (2, ["rates"])),
        ({"change": backward_again}, (1, ["losses"])),
        ({"skip_batches": "1:2"}, (1, ["losses"])),
        ({"exchange_dtype": "bfloat16"}, (0, ["program"])),
    ],
)
def test_a_change_is_in_its_own_digest(tmp_path, options, difference):
    small_run(tmp_path / "one")
    small_run(tmp_path / "two", **options)
    assert first_difference(tmp_path / "one", tmp_path / "two") == difference


def test_a_snapshot_in_a_body_has_the_head_of_its_end(tmp_path):
    def save(run, *_):
        if run.step == 2:
            run.snapshot(now=True)
            raise RuntimeError("after the snapshot")

    small_run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="after the snapshot"):
        small_run(tmp_path / "failed", change=save, snapshot_every=100)
    assert {*states_of(tmp_path / "failed")} <= {3}
    small_run(tmp_path / "failed")
    assert chain_of(tmp_path / "failed") == chain_of(tmp_path / "whole")


def test_steps_that_are_left_or_have_no_gradient_are_rows_as_well(tmp_path):
    def job(directory, stop_after):
        with ss.init(dir=directory, lanes=2, snapshot_every=1, stop_after=stop_after) as run:
            run.track(model=run.replicate(nn.Linear(64, 1)))
            for _ in run.batches(images(40), 8, steps=2):
                break  # is no step
            for _ in run.batches(images(40), 8, steps=3):
                pass

    run_workers(job, 1, tmp_path / "whole", None)
    for stop_after in (1, None):
        run_workers(job, 2, tmp_path / "parts", stop_after)
    assert chain_of(tmp_path / "whole") == chain_of(tmp_path / "parts")
    assert len(chain_of(tmp_path / "whole")) == 3


@pytest.mark.parametrize("options", [{"read_only": True}, {"dir": None}])
def test_a_run_that_keeps_nothing_writes_no_chain(tmp_path, options):
    small_run(tmp_path / "run")
    before = (tmp_path / "run" / FILE).read_bytes()
    with ss.init(**{"dir": tmp_path / "run", **options}) as run:
        assert run._session._make_history(None) is None
    assert (tmp_path / "run" / FILE).read_bytes() == before


@pytest.mark.parametrize("head", ["", "0" * 63, "0" * 66, "x" * 64, 5, None])
def test_a_head_that_no_run_has_saved_is_refused(head):
    options = ss.config.Config(lanes=1)
    if head is None:
        assert len(History(options, None, dict, {}).state(None)["chain"]) == 64
        return
    with pytest.raises(SnapshotError, match="must have 64 hexadecimal digits"):
        History(options, None, dict, {"chain": head})


@pytest.mark.long
def test_ten_thousand_steps_with_kills_at_any_number_of_workers(tmp_path):
    steps, draw, size = 10_000, random.Random(0), 1

    def job(directory, hook):
        def change(run, *_):
            hook(run.step)

        small_run(directory, steps, change, lanes=4, snapshot_every=500, check_every=None)

    run_workers(job, 1, tmp_path / "whole", lambda step: None)
    kills = sorted(draw.sample(range(1, steps), 6))
    for kill in kills:
        size = draw.choice([1, 2, 4])
        outcomes = try_workers(job, size, tmp_path / "killed", kill_at(kill, draw.randrange(size)))
        assert any(outcome.exitcode == -signal.SIGKILL for outcome in outcomes)
    run_workers(job, 4, tmp_path / "killed", lambda step: None)
    assert chain_of(tmp_path / "killed") == chain_of(tmp_path / "whole")
    assert len(chain_of(tmp_path / "whole")) == steps
    assert states_of(tmp_path / "killed").items() <= states_of(tmp_path / "whole").items()
