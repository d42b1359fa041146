"""The events in the record of a run, and the exchange of objects between workers."""

from __future__ import annotations

import itertools
import logging
import math
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.comm import watchdog
from samestep.data.random_state import key
from samestep.errors import RecordError
from samestep.record import read_events
from samestep.record.events import samestep_version
from tests.jobs import events, train
from tests.needs import needs
from tests.watch.writing import view_of
from tests.workers import run_workers, try_workers

PARTS = {"data", "compute", "exchange", "optimizer", "snapshot"}


def job(run):
    """Train two epochs on the numbers 0 to 9 in batches of 4; the loss is their mean."""
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
    color.flags.writeable = False  # like decoded images
    run.log_image("color", color)
    run.print("printed at", run.step, end="!\n")


@pytest.fixture
def directory(tmp_path):
    """Return the directory of a run of the job on two workers with four lanes."""
    run_workers(train, 2, job, tmp_path, {"lanes": 4, "snapshot_every": 2})
    return tmp_path


def test_start_snapshots_and_end_are_recorded(directory):
    kinds = [event["event"] for event in events(directory)]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    between = {"loop", "scalars", "timing", "snapshot", "state", "image"}
    assert {*kinds} == {"started", *between, "finished"}
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


def test_resumed_run_appends_to_the_record(directory):
    train(job, directory, {"lanes": None})
    assert [
        event["event"] for event in events(directory) if event["event"] in {"started", "resumed"}
    ] == ["started", "resumed"]
    (resumed,) = events(directory, "resumed")
    assert (resumed["step"], resumed["lanes"], len(resumed["workers"])) == (6, 4, 1)
    assert resumed["attempt"] != events(directory, "started")[0]["attempt"]


def test_loop_event_has_the_length_and_the_position(tmp_path):
    plan = {
        "steps": 6,
        "epochs": 2,
        "steps_per_epoch": 3,
        "samples": 10,
        "batch_size": 4,
        "ends_with_epoch": False,
    }
    run_workers(train, 1, job, tmp_path, {"lanes": 4, "stop_after": 4})
    train(job, tmp_path, {"lanes": 4})
    recorded = [
        {name: value for name, value in event.items() if name not in {"time", "event"}}
        for event in events(tmp_path, "loop")
    ]
    made_of = {"kind": "shuffled", "size": 10, "batch_size": 4, "lanes": 4, "drop_last": False}
    plan["plan"] = {**made_of, "seed": key(0, "order train"), "shuffle": False, "given": {}}
    assert recorded == [
        {"name": "train", "step": step, "epoch": epoch, "epoch_step": at, "done": step, **plan}
        for step, epoch, at in ((0, 0, 0), (4, 1, 1))
    ]


def test_loop_event_of_endless_streams_has_no_length(tmp_path):
    with ss.init(dir=tmp_path, stop_after=1) as run:
        run.streams(lambda lane: iter([]), name="games")
    (recorded,) = events(tmp_path, "loop")
    assert (
        recorded.items()
        >= {
            "name": "games",
            "step": 0,
            "epoch": 0,
            "done": 0,
            "steps": None,
            "samples": None,
        }.items()
    )


def test_loop_over_streams_counts_steps_over_resumes(tmp_path):
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
    assert [(event["done"], event["steps"]) for event in events(tmp_path, "loop")] == [
        (0, 5),
        (2, 5),
    ]


def test_scalars_are_means_over_all_workers_with_their_range(directory):
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


def test_timing_of_every_step_is_recorded_per_worker(directory):
    timings = events(directory, "timing")
    assert [event["step"] for event in timings] == list(range(6))
    for worker in (worker for event in timings for worker in event["workers"]):
        assert worker.keys() == PARTS | {"logging", "own"}
        assert all(0 <= seconds < 10 for seconds in worker.values())
        assert min(worker["compute"], worker["exchange"], worker["optimizer"]) > 0
    assert [len(event["workers"]) for event in timings] == [2] * 6
    stalled = [event["step"] for event in timings if event["workers"][0]["snapshot"] > 0]
    # the steps after those snapshots; the last snapshot is taken after the last timing
    assert stalled == [2, 4]


def sleepy(run):
    """Train five steps; user code of worker 1 takes long, but nothing that samestep measures."""
    model = run.replicate(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(TensorDataset(torch.arange(20.0).view(20, 1)), 4, epochs=1):
        run.backward(lambda model, batch: model(batch[0]).mean(), model, batch)
        optimizer.step()
        time.sleep(1.0 * run.rank)


@pytest.mark.long
def test_a_worker_that_is_slow_in_user_code_is_the_slowest(tmp_path):
    run_workers(train, 2, sleepy, tmp_path, {"lanes": 2})
    first, second = view_of(tmp_path).summary()["workers"]
    assert first["lag"] is None
    assert second["lag"] is not None
    assert second["seconds"] > first["seconds"]


def test_evaluation_has_its_own_seconds(tmp_path):
    def evaluating(run):
        model = run.replicate(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run.track(model=model, optimizer=optimizer)
        numbers = TensorDataset(torch.arange(8.0).view(8, 1))

        def loss_fn(model, batch):
            return model(batch[0]).mean()

        for batch in run.batches(numbers, 4, epochs=1):
            run.backward(loss_fn, model, batch)
            optimizer.step()
            run.evaluate(loss_fn, model, numbers, 4)

    train(evaluating, tmp_path, {"lanes": 1})
    for event in events(tmp_path, "timing"):
        (worker,) = event["workers"]
        assert 0 < worker["evaluation"] < worker["own"]


def test_a_start_that_fails_before_its_first_event_has_failed(tmp_path):
    train(job, tmp_path, {"lanes": 2})
    (tmp_path / "events.jsonl").unlink()
    with pytest.raises(ss.ConfigError, match="lanes"):
        train(job, tmp_path, {"lanes": 3})
    view = view_of(tmp_path)
    assert view.row()["state"] == "failed"
    assert view.summary()["failure"]["text"].startswith("ConfigError: ")
    assert " failed at the start: ConfigError: " in view.summary()["events"][-1]["text"]


def stalling(run):
    """Train three steps; worker 1 arrives late at the second one, and a little at the third."""
    logging.getLogger().handlers.clear()  # pytest's
    model = run.replicate(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(TensorDataset(torch.arange(12.0).view(12, 1)), 4, epochs=1):
        awaited = {1: "stalled", 2: "recovered"}.get(run.step)
        while awaited and run.rank == 1 and awaited not in kinds_of(run.dir):
            time.sleep(0.1)
        run.backward(lambda model, batch: model(batch[0]).mean(), model, batch)
        optimizer.step()


def kinds_of(directory):
    return [event["event"] for event in read_events(directory)]


def test_a_worker_that_keeps_others_waiting_is_named(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(watchdog, "STALL_SHARE", 0.05)
    run_workers(train, 2, stalling, tmp_path, {"lanes": 2, "timeout": 100})
    (stall,) = events(tmp_path, "stalled")
    (end,) = events(tmp_path, "recovered")
    assert (stall["step"], end["step"]) == (1, 2)
    assert re.match(
        r"worker 0 has waited ([5-9]|\d\d) s at step 1 while exchanging losses, for worker 1 "
        r"\(host .*, process \d+\), which is at step 1 \(in the body of a loop\); "
        r"the run ends after timeout=100 s$",
        stall["reason"],
    )
    assert f"samestep: stalled: {stall['reason']}\n" in capfd.readouterr().err
    assert view_of(tmp_path).summary()["state"] == "finished"


def test_images_are_recorded_once(directory):
    grey, color = events(directory, "image")
    assert [
        (event["name"], event["step"], event["width"], event["height"]) for event in (grey, color)
    ] == [
        ("grey", 6, 6, 1),
        ("color", 6, 5, 4),
    ]
    with Image.open(directory / grey["path"]) as image:
        assert list(image.tobytes()) == [0, 51, 102, 153, 204, 255]


def test_run_prints_once(capfd, directory):
    assert capfd.readouterr().out == "printed at 6!\n"


def test_nothing_is_written_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(job, None)
    assert list(tmp_path.iterdir()) == []


def exchange_objects(run):
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


def test_objects_are_exchanged_between_workers():
    first, second = run_workers(joined, 2, exchange_objects)
    assert first == {
        "gather": [{"rank": 0}, {"rank": 1}],
        "all_gather": ["", "x"],
        "broadcast": [0, "first"],
        "sums": (2.0, [2.0, 2.0]),
        "means": (1.0, [1.0, 1.0]),
        "attributes": (0, 2, 2, True, "cpu", None),
    }
    assert second == {**first, "gather": None, "attributes": (1, 2, 2, False, "cpu", None)}


def test_objects_are_unchanged_with_one_worker():
    assert joined(exchange_objects) == {
        "gather": [{"rank": 0}],
        "all_gather": [""],
        "broadcast": [0, "first"],
        "sums": (0.5, [1.0, 1.0]),
        "means": (0.5, [1.0, 1.0]),
        "attributes": (0, 1, 2, True, "cpu", None),
    }
    sent = object()
    assert (
        joined(lambda run: [run.broadcast(sent), *run.all_gather(sent), *run.gather(sent)])
        == [sent] * 3
    )


def test_reduce_dict_needs_the_same_names_on_all_workers():
    ends = try_workers(joined, 2, lambda run: run.reduce_dict({("loss", "other")[run.rank]: 1.0}))
    assert [type(end.error) for end in ends] == [ss.DataError] * 2
    assert "['loss'] on worker 0 and ['other'] on worker 1" in str(ends[1].error)


def test_second_run_in_a_directory_is_an_error_while_the_first_one_runs(tmp_path):
    def second():
        with pytest.raises(RecordError, match=r"another run \(process"):
            ss.init(dir=tmp_path)

    with ss.init(dir=tmp_path):
        run_workers(second, 1)
    with ss.init(dir=tmp_path):
        pass
    assert [event["event"] for event in events(tmp_path)] == ["started", "finished"] * 2


@dataclass(frozen=True)
class Optimizer:
    rate: float
    kind: type


def test_a_start_has_the_job_s_settings_and_its_command(tmp_path):
    optimizer_settings = Optimizer(0.1, torch.optim.SGD)
    settings = {"optimizer": optimizer_settings, "sizes": (1, 2), 3: None}
    with ss.init(dir=tmp_path, settings=settings):
        pass
    (start,) = (event for event in read_events(tmp_path) if event["event"] == "started")
    optimizer = {"rate": 0.1, "kind": "<class 'torch.optim.sgd.SGD'>"}
    assert start["settings"] == {"optimizer": optimizer, "sizes": [1, 2], "3": None}
    assert shlex.split(start["command"]) == sys.argv
    versions = {"torch": torch.__version__, "numpy": np.__version__, "samestep": samestep_version()}
    assert start["environment"].items() >= versions.items()
    assert start["environment"]["python"] == platform.python_version()


@pytest.mark.parametrize("settings", [3, [("lr", 0.1)], "lr=0.1"])
def test_settings_that_are_no_dict_are_refused(settings):
    with pytest.raises(ss.ConfigError, match="settings must be a dict or dataclass"):
        ss.init(settings=settings)


def test_the_commit_of_the_script_is_recorded(tmp_path, monkeypatch):
    needs("git")
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text("")
    git = ["git", "-C", str(script.parent), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    monkeypatch.setattr(sys, "argv", [str(script)])
    for directory, text in (("clean", ""), ("dirty", "pass")):
        script.write_text(text)
        with ss.init(dir=tmp_path / directory):
            pass
        (start,) = (
            event for event in read_events(tmp_path / directory) if event["event"] == "started"
        )
        assert (start["commit"], start["dirty"]) == (commit.stdout.strip(), bool(text))
