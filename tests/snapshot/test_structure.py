"""Snapshots that no start could load are warned of, and the ways that the warnings name work."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import samestep as ss
from samestep.snapshot.structure import changes_of, structure_of
from tests.jobs import fingerprint
from tests.workers import run_workers

STEPS, CHANGE = 6, 3  # in a run, and that with a change
WARNED = "may fail to load the snapshot of step"


class Growing(nn.Module):
    """Rows of a parameter, and a buffer with an entry for each."""

    def __init__(self, size=4):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(size, 3))
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, inputs):
        with torch.no_grad():
            self.seen += 1
        return torch.cdist(inputs, self.rows).amin(1).mean()


class Adapting(Growing):
    """Takes the size of a state that it loads."""

    def load_state_dict(self, state, *args, **options):
        Growing.__init__(self, len(state["rows"]))
        return super().load_state_dict(state, *args, **options)


def grow(run, model, optimizer, sizes):
    """Let a model grow between two steps, as the page and the messages say."""
    old = model.rows
    model.rows = nn.Parameter(torch.cat([old.detach(), old.detach()[:2] + 0.1]))
    model.seen = torch.zeros(len(model.rows))
    run.replicate(model)
    optimizer.state.pop(old, None)
    optimizer.param_groups[0]["params"] = [model.rows]
    sizes["rows"] = len(model.rows)


def work(build, change, *, directory=None, is_sized=False, **options):
    """Train; `change` gets what it may change in a step. Return the last state."""
    with ss.init(lanes=4, dir=directory, snapshot_every="1", **options) as run:
        sizes = {"rows": 4}
        if is_sized:
            run.track(sizes=sizes)
        model = run.replicate(build(**({"size": sizes["rows"]} if is_sized else {})))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        loop = run.batches(torch.linspace(-1, 1, 72).view(24, 3), 4, steps=STEPS)
        for batch in loop:
            for inputs in batch.lanes(model):
                batch.backward(model(inputs))
            optimizer.step()
            optimizer.zero_grad()
            if loop.step == CHANGE:
                change(run, model, optimizer, sizes)
        return fingerprint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def linear():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), Squared())


class Squared(nn.Module):
    def forward(self, inputs):
        return inputs.square().mean()


def prepared():
    model = linear()
    prune.identity(model[0], "weight")
    return model


def prune_first(run, model, optimizer, sizes):
    prune.l1_unstructured(model[0], "weight", amount=0.5)


def write_mask(run, model, optimizer, sizes):
    weight = model[0].weight_orig
    model[0].weight_mask.copy_(weight.abs() > weight.abs().median())


def normalize(run, model, optimizer, sizes):
    parametrizations.weight_norm(model[1])
    run.replicate(model)


def add_buffer(run, model, optimizer, sizes):
    model.register_buffer("centers", torch.zeros(2))


def add_group(run, model, optimizer, sizes):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def track_more(run, model, optimizer, sizes):
    run.track(average=torch.optim.swa_utils.AveragedModel(model))


REFUSED = {
    "pruned": (linear, prune_first, "'model' has '0.weight_orig', '0.weight_mask', which"),
    "parametrized": (linear, normalize, "'model' has '1.parametrizations.weight.original0', "),
    "a buffer": (linear, add_buffer, "'model' has 'centers', which it did not have then. Give"),
    "a group": (linear, add_group, "'optimizer' has 'parameter group 1', which"),
    "grown": (Growing, grow, "'model' has 'rows' of [6, 3], then of [4, 3]"),
    "tracked": (linear, track_more, "'average' was tracked in the middle of loop 'train', after 2"),
}


@pytest.mark.parametrize(("build", "change", "words"), REFUSED.values(), ids=REFUSED)
def test_a_snapshot_that_no_start_could_load_is_warned_of_once(
    build, change, words, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING, "samestep"):
        work(build, change, directory=tmp_path)
    warned = [record.getMessage() for record in caplog.records if WARNED in record.getMessage()]
    assert len(warned) == 1
    assert f"{WARNED} {CHANGE}: " in warned[0]
    assert words in warned[0]


ACCEPTED = {
    "pruned before": (prepared, write_mask, False),
    "pruned again": (prepared, prune_first, False),
    "grown": (Growing, grow, True),
}


@pytest.mark.parametrize(("build", "change", "is_sized"), ACCEPTED.values(), ids=ACCEPTED)
def test_the_ways_of_the_warning_work_with_a_resume(build, change, is_sized, tmp_path, caplog):
    whole = work(build, change, is_sized=is_sized)
    with caplog.at_level(logging.WARNING, "samestep"):
        with pytest.raises(SystemExit):
            work(build, change, is_sized=is_sized, directory=tmp_path, stop_after=CHANGE + 1)
        assert work(build, change, is_sized=is_sized, directory=tmp_path) == whole
    assert WARNED not in caplog.text


@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_that_grows_has_the_same_bits_on_all_workers(devices):
    job = partial(work, Growing, grow, is_sized=True, devices=["cpu"] * devices)
    ends = [run_workers(job, workers) for workers in (1, 2)]
    assert len({repr(end) for of_run in ends for end in of_run}) == 1


def test_objects_of_a_later_stage_and_of_the_first_step_are_accepted(tmp_path, caplog):
    with (
        caplog.at_level(logging.WARNING, "samestep"),
        ss.init(lanes=2, dir=tmp_path, snapshot_every="1") as run,
    ):
        model = run.replicate(linear())
        run.track(model=model)
        for name in ("head", "all"):
            tracked = False
            for batch in run.batches(torch.ones(8, 3), 4, epochs=2, name=name):
                if name == "head" and not tracked:  # of this start
                    tracked = True
                    run.track(first={"count": 0})
                for inputs in batch.lanes(model):
                    batch.backward(model(inputs))
            run.track(**{name: torch.optim.SGD(model.parameters(), lr=0.1)})
    assert WARNED not in caplog.text


def test_structures_of_what_loads_any_state():
    lazy = nn.LazyLinear(2)
    before = structure_of(lazy)
    lazy(torch.ones(1, 3))
    assert changes_of(before, lazy) == ""
    assert structure_of({"epoch": 1}).parts == {}
    assert structure_of(Adapting()).parts == {}
    before = structure_of(nn.BatchNorm1d(2))
    assert changes_of(before, nn.BatchNorm1d(3)).startswith("has 'weight' of [3], then of [2], ")
    assert changes_of(before, nn.Linear(2, 1)) == (
        "has no 'running_mean', 'running_var', 'num_batches_tracked' any more, "
        "has 'weight' of [1, 2], then of [2], has 'bias' of [1], then of [2]"
    )
