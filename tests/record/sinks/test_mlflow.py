"""The record as a run of MLflow in a folder of files, read back by MLflow's own client."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from samestep.errors import ConfigError
from samestep.record import read_events
from samestep.record.sinks.trackers import MlflowSink
from tests.record.sinks.send_record import (
    CONFIG,
    ODD,
    send,
    send_all,
    write_image,
    write_start,
    write_step,
)


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and put back as it was, whatever the sink sets


def client(directory):
    from mlflow.tracking import MlflowClient  # takes more than a second

    return MlflowClient((directory / "mlflow").as_uri())


def the_run(directory):
    """Return the only run of a directory's store."""
    store = client(directory)
    (experiment,) = [
        experiment for experiment in store.search_experiments() if experiment.name == "samestep"
    ]
    (run,) = store.search_runs([experiment.experiment_id])
    return run


def history(directory, name):
    return client(directory).get_metric_history(the_run(directory).info.run_id, name)


def test_scalars_have_steps_times_and_values(record, tmp_path):
    values = [1 / 3, math.inf, -math.inf, 1e-300]
    for step, value in enumerate(values):
        write_step(record, step, loss=value)
    send_all("mlflow", tmp_path)
    points = history(tmp_path, "loss")
    assert [(point.step, point.value) for point in points] == list(enumerate(values))
    assert [point.timestamp for point in points] == [
        int(event["time"] * 1000) for event in read_events(tmp_path)
    ][1:]
    assert the_run(tmp_path).info.run_name == tmp_path.name


def test_scalars_are_split_into_requests(record, tmp_path):
    for step in range(3):
        record.scalars(step, 0, {f"m{number}": float(step) for number in range(700)})
    send_all("mlflow", tmp_path)
    metrics = the_run(tmp_path).data.metrics
    assert (len(metrics), set(metrics.values())) == (700, {2.0})


def test_images_are_identical_artifacts(record, tmp_path):
    write_image(record, 3, np.arange(60, dtype=np.uint8).reshape(4, 5, 3), "cells/nuclei")
    send_all("mlflow", tmp_path)
    (file,) = (tmp_path / "images").iterdir()
    run = the_run(tmp_path).info
    assert [
        artifact.path for artifact in client(tmp_path).list_artifacts(run.run_id, "images")
    ] == [f"images/{file.name}"]
    assert (
        Path(urlsplit(run.artifact_uri).path, "images", file.name).read_bytes() == file.read_bytes()
    )


def test_the_configuration_is_written_as_parameters(record, tmp_path):
    send_all("mlflow", tmp_path)
    assert the_run(tmp_path).data.params == {
        "lanes": "4",
        "seed": "7",
        "dir": CONFIG["dir"],
        "stop_after": "null",
        "devices": '["cpu", "cpu"]',
        "timeout": "1.5",
    }


@pytest.mark.parametrize(
    ("event", "status"), [("finished", "FINISHED"), ("failed", "FAILED"), ("stopped", "KILLED")]
)
def test_the_end_of_the_run_sets_its_status(record, tmp_path, event, status):
    send_all("mlflow", tmp_path)
    assert the_run(tmp_path).info.status == "RUNNING"
    record.event(event, step=0)
    send_all("mlflow", tmp_path, 1)
    info = the_run(tmp_path).info
    assert (info.status, info.end_time) == (
        status,
        int(list(read_events(tmp_path))[-1]["time"] * 1000),
    )


def test_a_resume_continues_the_same_run(record, tmp_path):
    write_step(record, 0, loss=0.5)
    record.event("stopped", step=1)
    send_all("mlflow", tmp_path)
    write_start(record, 1, timeout=9.0, new=1)
    write_step(record, 1, loss=0.25)
    send_all("mlflow", tmp_path, 3)
    run = the_run(tmp_path)
    assert [(point.step, point.value) for point in history(tmp_path, "loss")] == [
        (0, 0.5),
        (1, 0.25),
    ]
    assert (run.info.status, run.data.params["timeout"], run.data.params["new"]) == (
        "RUNNING",
        "1.5",
        "1",
    )
    assert run.data.tags["timeout"] == "9.0"


def test_repeated_events_only_duplicate_points(record, tmp_path):
    write_step(record, 0, loss=0.5)
    write_image(record, 0, np.zeros((2, 2), dtype=np.uint8))
    send(MlflowSink(tmp_path), tmp_path)  # and killed before that was noted
    before = the_run(tmp_path)
    send_all("mlflow", tmp_path)
    assert the_run(tmp_path).data.to_dictionary() == before.data.to_dictionary()
    assert [(point.step, point.value) for point in history(tmp_path, "loss")] == [(0, 0.5)] * 2
    assert len(client(tmp_path).list_artifacts(before.info.run_id, "images")) == 1


def test_names_that_mlflow_rejects_are_changed_with_one_warning(record, tmp_path, caplog):
    names = [
        ODD,
        "/a",
        "a//b",
        "../x",
        ".",
        "x" * 251,
        "",
        "loss",
        "loss/aux",
        "deep/er/one",
        "deep",
        "good name: a-b.c/d",
        "ü",
        "\ud800",
    ]
    for step in range(2):
        record.scalars(step, 0, {name: float(number) for number, name in enumerate(names)})
    with caplog.at_level(logging.WARNING, "samestep"):
        send_all("mlflow", tmp_path)
    metrics = the_run(tmp_path).data.metrics
    assert sorted(metrics.values()) == list(range(len(names)))
    kept = {name for name in names if metrics.get(name) == names.index(name)}
    assert kept == {"loss", "deep/er/one", "good name: a-b.c/d", "ü"}
    warnings = [message for message in caplog.messages if "it rejects the name" in message]
    assert len(warnings) == len(names) - len(kept)
    send_all("mlflow", tmp_path)
    assert the_run(tmp_path).data.metrics == metrics


def test_a_run_deleted_from_the_store_is_created_again(record, tmp_path):
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "run-id").write_text("0" * 32)
    send_all("mlflow", tmp_path)
    assert the_run(tmp_path).info.run_id == (tmp_path / "mlflow" / "run-id").read_text()


def test_metrics_of_a_failed_request_are_written_by_the_next(record, tmp_path, monkeypatch):
    from mlflow import exceptions, tracking

    def fail(*_, **__):
        raise exceptions.MlflowException("the store does not answer")

    write_step(record, 0, loss=0.5)
    sink = MlflowSink(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tracking.MlflowClient, "log_batch", fail)
        with pytest.raises(exceptions.MlflowException):
            send(sink, tmp_path, 1)
    sink.close()
    assert [point.value for point in history(tmp_path, "loss")] == [0.5]


def test_the_tracking_uri_and_experiment_are_used(record, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere" / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    send_all("mlflow", tmp_path)
    store = client(tmp_path / "elsewhere")
    assert (
        store.get_run((tmp_path / "mlflow" / "run-id").read_text()).info.experiment_id
        == store.get_experiment_by_name("mine").experiment_id
    )


def test_a_missing_package_raises_with_the_install_command(record, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    with pytest.raises(ConfigError, match=r'pip install "samestep\[mlflow\]"'):
        MlflowSink(tmp_path)
