"""A resumed script that changes what was restored is told so; one that does no harm is not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep as ss
from tests.jobs import images
from tests.workers import run_workers

# what follows an epoch may be all that a resumed script does before it ends
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(directory, own, *, shards=False, stop_after=None):
    """Train for two epochs; `own(run, tracked, path)` is called once they are tracked."""
    with ss.init(lanes=2, dir=directory, stop_after=stop_after) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10)))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        tracked = {
            "model": model,
            "optimizer": run.shard(optimizer) if shards else optimizer,
            "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
            "counts": {"starts": 0, "sum": torch.zeros(2)},
        }
        run.track(**tracked)
        path = directory / "own.pt"
        own(run, tracked, path)
        for _ in range(run.epoch, 2):
            for batch in run.batches(images(16), 4):
                run.backward(loss_of, model, batch)
                optimizer.step()
                optimizer.zero_grad()
                tracked["counts"]["sum"] += 1
            if run.is_main and not path.exists():
                saved = ("model", "schedule") if shards else ("model", "optimizer", "schedule")
                torch.save({name: tracked[name].state_dict() for name in saved}, path)
            tracked["schedule"].step()


def load_all(run, tracked, path):
    if path.exists():
        for name, state in torch.load(path).items():
            tracked[name].load_state_dict(state)


def load_model(run, tracked, path):
    if path.exists():
        tracked["model"].load_state_dict(torch.load(path)["model"])


def load_schedule(run, tracked, path):
    if path.exists():
        tracked["schedule"].load_state_dict(torch.load(path)["schedule"])


def load_all_and_more(run, tracked, path):
    load_all(run, tracked, path)
    tracked["counts"]["starts"] += 1


def step_the_schedule(run, tracked, path):
    for _ in range(run.epoch):
        tracked["schedule"].step()


@torch.no_grad()
def change_a_tensor(run, tracked, path):
    tracked["counts"]["sum"].zero_()


LOUD = {
    load_all: "model and optimizer and schedule",
    load_model: "model",
    load_schedule: "schedule",
    load_all_and_more: "model and optimizer and schedule and counts",
    step_the_schedule: "schedule",
    change_a_tensor: "counts",
}


def nothing(run, tracked, path):
    pass


def load_if_new(run, tracked, path):
    if run.step == 0:
        load_all(run, tracked, path)


def load_the_same(run, tracked, path):
    """Load what is restored anyway, such as after an interrupted job that saved both."""
    for item in tracked["model"], tracked["schedule"]:
        item.load_state_dict(item.state_dict())


def set_options(run, tracked, path):
    for group in tracked["optimizer"].param_groups:
        group.update(lr=0.01, weight_decay=0.2)
    vars(tracked["schedule"])["base_lrs"] = [0.01]
    tracked["schedule"].step_size = 5
    tracked["counts"]["starts"] += 1


def replicate_again_and_evaluate(run, tracked, path):
    run.replicate(tracked["model"].to(memory_format=torch.channels_last))
    run.evaluate(loss_of, tracked["model"], images(16), 4)
    tracked["model"].requires_grad_(requires_grad=True)


def make_another_schedule(run, tracked, path):
    torch.optim.lr_scheduler.OneCycleLR(tracked["optimizer"], 0.2, total_steps=100)


QUIET = [
    nothing,
    load_if_new,
    load_the_same,
    set_options,
    replicate_again_and_evaluate,
    make_another_schedule,
]


def resumed(directory, own, *, shards=False, workers=1, stop_after=6):
    """Return the lines about what changed, of a run that stops after a step and is resumed."""

    def body(stop_after):
        lines, handler = [], logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("samestep").addHandler(handler)
        try:
            train(directory, own, shards=shards, stop_after=stop_after)
        except SystemExit as end:
            assert end.code == 0  # noqa: PT017
        return [line for line in lines if "changed after run.track" in line]

    # a new run may load what it likes
    assert run_workers(body, workers, stop_after) == [[]] * workers
    lines, *others = run_workers(body, workers, None)
    assert others == [[]] * (workers - 1)
    return lines


@pytest.mark.parametrize("own", LOUD)
def test_what_changes_after_it_was_restored_is_named(own, tmp_path):
    (line,) = resumed(tmp_path, own)
    assert f"{LOUD[own]} changed after run.track, which had restored the snapshot of step 6" in line
    assert line.endswith("or load it before run.track, or only if run.step == 0")


@pytest.mark.parametrize("own", QUIET)
def test_what_a_script_may_do_after_run_track_is_not(own, tmp_path):
    assert resumed(tmp_path, own) == []


def test_what_follows_an_epoch_is_not_done_between(tmp_path):
    """The resumed script first does what follows the epoch, such as a step of the schedule."""
    assert resumed(tmp_path, nothing, stop_after=4) == []


@pytest.mark.parametrize(("own", "count"), [(load_all, 1), (set_options, 0)])
def test_a_sharded_optimizer_of_several_workers_is_compared(own, count, tmp_path):
    lines = resumed(tmp_path, own, shards=True, workers=2)
    assert len(lines) == count
    assert all("model and schedule changed" in line for line in lines)
