"""The record as an offline run of Weights & Biases, written in its own process, read by wandb."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from hashlib import sha256
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from samestep.errors import ConfigError
from samestep.record import read_events
from samestep.record.sinks.trackers import WandbSink
from tests.record.sinks.send_record import CONFIG, ODD, write_image, write_start, write_step

ROOT = Path(__file__).parents[3]


def start(*command):
    """Run Python without a writable home or a reachable server; return the completed process."""
    environment = {**os.environ, "HOME": "/nonexistent", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    arguments = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


def send(directory, first=0, killed_after=""):
    """Send a record to the sink; return the completed process."""
    return start("tests.record.sinks.send_record", "wandb", directory, first, killed_after)


class Read:
    """The contents of all wandb files of a run, according to wandb's own reader."""

    def __init__(self, directory):
        self.files = sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
        program = Path(sys.executable).with_name("wandb")
        commands = [[program, "leet", "inspect", "--json", file] for file in self.files]
        environment = {**os.environ, "HOME": str(directory)}
        ends = [
            subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            for command in commands
        ]
        self._records = [
            json.loads(line) for line in chain(*(end.stdout.splitlines() for end in ends))
        ]

    def all(self, kind):
        return [record[kind] for record in self._records if record["type"] == kind]

    def losses(self):
        return [(row["item"]["step"], row["item"]["loss"]) for row in self.all("history")]


def test_configuration_scalars_and_images_are_written(record, tmp_path):
    write_step(record, 0, loss=1 / 3, wrong=float("nan"))
    write_step(record, 1, loss=0.25, step=5.0)
    write_step(record, 1)
    write_image(record, 1, np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    record.event("finished", step=2)
    # in a thread, as during training
    ended = start("samestep.record.exporter", tmp_path, "--to", "wandb")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "wandb shows 'step' as 'metric/step', because the name is reserved\n"
    stored = Read(tmp_path)
    assert {
        name: value for update in stored.all("config") for name, value in update["update"].items()
    } == CONFIG
    assert [
        metric["step_metric"] for metric in stored.all("metric") if metric.get("glob_name") == "*"
    ] == ["step"]
    assert [end.get("exit_code", 0) for end in stored.all("exit")] == [0]
    first, second, third, image = (row["item"] for row in stored.all("history"))
    assert (first["step"], first["loss"], first["wrong"]) == (0, 1 / 3, "NaN")
    assert (second["step"], second["loss"], second["metric/step"]) == (1, 0.25, 5)
    assert third[ODD] == 1
    times = [event["time"] for event in read_events(tmp_path)]
    assert [row["_timestamp"] for row in (first, second, third, image)] == pytest.approx(
        times[1:5], abs=1e-6
    )
    (file,) = (tmp_path / "images").iterdir()
    kept = stored.files[0].parent / "files" / image["cells.path"]
    assert (image["step"], image["cells.sha256"]) == (1, sha256(file.read_bytes()).hexdigest())
    assert kept.read_bytes() == file.read_bytes()


@pytest.mark.long
def test_a_resume_continues_the_same_run_and_a_failure_is_recorded(record, tmp_path):
    write_step(record, 0, loss=0.5)
    assert send(tmp_path).returncode == 0
    write_start(record, 1, timeout=9.0)
    write_step(record, 1, loss=0.25)
    record.event("failed", step=1)
    ended = send(tmp_path, 2)
    assert (ended.returncode, ended.stderr) == (0, "")
    stored = Read(tmp_path)
    assert (len(stored.files), len({run["run_id"] for run in stored.all("run")})) == (2, 1)
    assert stored.losses() == [(0, 0.5), (1, 0.25)]
    assert [end.get("exit_code", 0) for end in stored.all("exit")] == [0, 1]


@pytest.mark.long
def test_rows_written_a_second_before_a_kill_are_stored(record, tmp_path):
    write_step(record, 0, loss=0.5)
    # its service exits as well
    assert send(tmp_path, killed_after=2).returncode == -signal.SIGKILL
    assert Read(tmp_path).losses() == [(0, 0.5)]


def test_a_missing_package_raises_with_the_install_command(tmp_path, monkeypatch):
    for name in ("WANDB_CACHE_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'pip install "samestep\[wandb\]"'):
        WandbSink(tmp_path)
