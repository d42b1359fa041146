"""What a run tells: the events of its record, and objects that workers pass to each other."""

from __future__ import annotations

import itertools
import math
import socket
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.errors import RecordError
from tests.jobs import events, train
from tests.workers import run_workers, try_workers

PARTS = {"data", "compute", "exchange", "optimizer", "snapshot"}


def job(run):
    """Take two epochs of the numbers 0 to 9 in batches of 4, in their order; the loss is their mean."""
    model = run.replicate(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(
        TensorDataset(torch.arange(10.0).view(10, 1)), 4, epochs=2, shuffle=False
    ):
        means = run.backward(
            lambda model, batch: (model(batch[0]).mean(), {"size": len(batch[0])}), model, batch
        )
        optimizer.step()
        optimizer.zero_grad()
        run.log(means, rate=0.5)
        run.log(other=torch.tensor(math.nan))
    run.log_image("grey", torch.linspace(0, 1, 6).view(1, 1, 6))
    color = np.zeros((4, 5, 3), dtype=np.uint8)
    color.flags.writeable = False  # as images that were decoded are
    run.log_image("color", color)
    run.print("printed at", run.step, end="!\n")


@pytest.fixture
def directory(tmp_path):
    """Return the directory of a run of the job at two workers with four lanes."""
    run_workers(train, 2, job, tmp_path, {"lanes": 4, "snapshot_every": 2})
    return tmp_path


def test_a_run_tells_of_its_start_its_snapshots_and_its_end(directory):
    kinds = [event["event"] for event in events(directory)]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert {*kinds} == {"started", "loop", "scalars", "timing", "snapshot", "image", "finished"}
    (started,) = events(directory, "started")
    assert (started["step"], started["lanes"], started["devices"], started["torch"]) == (
        0,
        4,
        ["cpu"],
        torch.__version__,
    )
    assert [(worker["rank"], worker["host"]) for worker in started["workers"]] == [
        (0, socket.gethostname()),
        (1, socket.gethostname()),
    ]
    assert len({worker["pid"] for worker in started["workers"]}) == 2
    assert [started["config"][name] for name in ("lanes", "seed", "snapshot_every")] == [4, 0, "2"]
    assert [event["step"] for event in events(directory, "snapshot")] == [2, 4, 6]
    assert events(directory, "finished")[0]["step"] == 6


def test_a_run_that_goes_on_tells_so_in_the_same_record(directory):
    train(job, directory, {"lanes": None})
    assert [
        event["event"] for event in events(directory) if event["event"] in {"started", "resumed"}
    ] == ["started", "resumed"]
    (resumed,) = events(directory, "resumed")
    assert (resumed["step"], resumed["lanes"], len(resumed["workers"])) == (6, 4, 1)
    assert resumed["attempt"] != events(directory, "started")[0]["attempt"]


def test_a_loop_tells_how_long_it_is_and_where_it_goes_on(tmp_path):
    plan = {"steps": 6, "epochs": 2, "steps_per_epoch": 3, "samples": 10, "batch_size": 4}
    run_workers(train, 1, job, tmp_path, {"lanes": 4, "stop_after": 4})
    train(job, tmp_path, {"lanes": 4})
    told = [
        {name: value for name, value in event.items() if name not in {"time", "event"}}
        for event in events(tmp_path, "loop")
    ]
    assert told == [
        {"name": "train", "step": step, "epoch": epoch, "done": step, **plan}
        for step, epoch in ((0, 0), (4, 1))
    ]


def test_a_loop_over_streams_tells_that_it_has_no_end(tmp_path):
    with ss.init(dir=tmp_path, stop_after=1) as run:
        run.streams(lambda lane: iter([]), name="games")
    (told,) = events(tmp_path, "loop")
    assert (
        told.items()
        >= {
            "name": "games",
            "step": 0,
            "epoch": 0,
            "done": 0,
            "steps": None,
            "samples": None,
        }.items()
    )


def test_a_loop_over_streams_ends_after_its_steps_also_when_the_run_goes_on(tmp_path):
    steps = []
    for stop_after in (2, None):
        with suppress(SystemExit), ss.init(dir=tmp_path, lanes=2, stop_after=stop_after) as run:
            run.track(model=nn.Linear(1, 1))
            for batch in run.streams(
                lambda lane: itertools.count(10 * lane), steps=5, name="games"
            ):
                assert list(batch) == [run.step, 10 + run.step]
                steps.append(run.step)
    assert steps == [0, 1, 2, 3, 4]
    assert [(told["done"], told["steps"]) for told in events(tmp_path, "loop")] == [(0, 5), (2, 5)]


def test_scalars_are_means_over_all_workers_with_their_lowest_and_highest(directory):
    scalars = [event for event in events(directory, "scalars") if "loss" in event["values"]]
    assert [(event["step"], event["epoch"]) for event in scalars] == [
        (step, step // 3) for step in range(6)
    ]
    losses = [
        (event["low"]["loss"], event["values"]["loss"], event["high"]["loss"]) for event in scalars
    ]
    assert losses == [(0.5, 1.5, 2.5), (4.5, 5.5, 6.5), (8.0, 8.5, 9.0)] * 2
    assert scalars[0]["values"] == {"loss": 1.5, "size": 1.0, "rate": 0.5}
    assert scalars[0]["low"].keys() == scalars[0]["high"].keys() == {"loss", "size"}
    others = [
        event["values"]["other"]
        for event in events(directory, "scalars")
        if "other" in event["values"]
    ]
    assert [math.isnan(other) for other in others] == [True] * 6


def test_every_step_tells_each_workers_seconds_by_part(directory):
    timings = events(directory, "timing")
    assert [event["step"] for event in timings] == list(range(6))
    for worker in (worker for event in timings for worker in event["workers"]):
        assert worker.keys() == PARTS
        assert all(0 <= seconds < 10 for seconds in worker.values())
        assert min(worker["compute"], worker["exchange"], worker["optimizer"]) > 0
    assert [len(event["workers"]) for event in timings] == [2] * 6
    stalled = [event["step"] for event in timings if event["workers"][0]["snapshot"] > 0]
    # the steps that began after those snapshots; the last one came when all was said
    assert stalled == [2, 4]


def test_images_are_told_once(directory):
    grey, color = events(directory, "image")
    assert [
        (event["name"], event["step"], event["width"], event["height"]) for event in (grey, color)
    ] == [
        ("grey", 6, 6, 1),
        ("color", 6, 5, 4),
    ]
    with Image.open(directory / grey["path"]) as image:
        assert list(image.tobytes()) == [0, 51, 102, 153, 204, 255]


def test_a_run_prints_once(capfd, directory):
    assert capfd.readouterr().out == "printed at 6!\n"


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(job, None)
    assert list(tmp_path.iterdir()) == []


def pass_objects(run):
    sums, means = (
        run.reduce_dict({"loss": run.rank + 0.5, "seen": torch.ones(2)}, average=average)
        for average in (False, True)
    )
    run.barrier("seeing all")
    return {
        "gather": run.gather({"rank": run.rank}),
        "all_gather": run.all_gather("x" * run.rank),
        "broadcast": run.broadcast([run.rank, "first"]),
        "sums": (sums["loss"], sums["seen"].tolist()),
        "means": (means["loss"], means["seen"].tolist()),
        "attributes": (run.rank, run.world_size, run.lanes, run.is_main, str(run.device), run.dir),
    }


def joined(body):
    with ss.init(lanes=2) as run:
        return body(run)


def test_objects_pass_between_workers():
    first, second = run_workers(joined, 2, pass_objects)
    assert first == {
        "gather": [{"rank": 0}, {"rank": 1}],
        "all_gather": ["", "x"],
        "broadcast": [0, "first"],
        "sums": (2.0, [2.0, 2.0]),
        "means": (1.0, [1.0, 1.0]),
        "attributes": (0, 2, 2, True, "cpu", None),
    }
    assert second == {**first, "gather": None, "attributes": (1, 2, 2, False, "cpu", None)}


def test_alone_objects_stay_as_they_are():
    assert joined(pass_objects) == {
        "gather": [{"rank": 0}],
        "all_gather": [""],
        "broadcast": [0, "first"],
        "sums": (0.5, [1.0, 1.0]),
        "means": (0.5, [1.0, 1.0]),
        "attributes": (0, 1, 2, True, "cpu", None),
    }
    given = object()
    assert (
        joined(lambda run: [run.broadcast(given), *run.all_gather(given), *run.gather(given)])
        == [given] * 3
    )


def test_reduced_dicts_have_the_same_names():
    ends = try_workers(joined, 2, lambda run: run.reduce_dict({("loss", "other")[run.rank]: 1.0}))
    assert [type(end.error) for end in ends] == [ss.DataError] * 2
    assert "['loss'] on worker 0 and ['other'] on worker 1" in str(ends[1].error)


def test_a_second_run_in_a_directory_is_refused_while_the_first_one_runs(tmp_path):
    def second():
        with pytest.raises(RecordError, match="another run, process"):
            ss.init(dir=tmp_path)

    with ss.init(dir=tmp_path):
        run_workers(second, 1)
    with ss.init(dir=tmp_path):
        pass
    assert [event["event"] for event in events(tmp_path)] == ["started", "finished"] * 2
