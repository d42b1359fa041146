"""The record as TensorBoard's files, read back by its own reader."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import (
    SESSION_START_INFO_TAG,
    parse_session_start_info_plugin_data,
)

from samestep.errors import ConfigError
from samestep.record import read_history
from samestep.record.sinks.trackers import TensorBoardSink
from tests.record.sinks.send_record import (
    CONFIG,
    ODD,
    send,
    send_all,
    write_image,
    write_start,
    write_step,
)


def read(directory):
    """Return TensorBoard's reading of a run's directory."""
    accumulator = EventAccumulator(
        str(directory / "tensorboard"),
        size_guidance=dict.fromkeys(("scalars", "images", "tensors"), 0),
    )
    return accumulator.Reload()


def steps(directory, name):
    return [event.step for event in read(directory).Scalars(name)]


def expected(directory, name):
    """Return the scalars that count, as TensorBoard keeps them: steps and 32-bit floats."""
    events = [event for event in read_history(directory) if name in event.get("values", {})]
    return sorted((event["step"], float(np.float32(event["values"][name]))) for event in events)


def points(directory, name):
    return [(event.step, event.value) for event in read(directory).Scalars(name)]


def test_scalars_have_steps_times_and_values(record, tmp_path):
    write_step(record, 0, loss=1 / 3, wrong=float("nan"))
    write_step(record, 1, loss=1e30, wrong=float("-inf"))
    send_all("tensorboard", tmp_path)
    accumulator = read(tmp_path)
    assert accumulator.Tags()["scalars"] == ["loss", "wrong"]
    assert (
        points(tmp_path, "loss")
        == expected(tmp_path, "loss")
        == [(0, float(np.float32(1 / 3))), (1, float(np.float32(1e30)))]
    )
    times = [event["time"] for event in read_history(tmp_path) if event["event"] == "scalars"]
    assert [event.wall_time for event in accumulator.Scalars("loss")] == times
    assert [str(event.value) for event in accumulator.Scalars("wrong")] == ["nan", "-inf"]


def test_images_are_copies_of_the_files(record, tmp_path):
    for step in (0, 2):
        write_image(record, step, np.full((3, 5, 3), step, dtype=np.uint8))
    send_all("tensorboard", tmp_path)
    images = read(tmp_path).Images("cells")
    files = [
        (tmp_path / event["path"]).read_bytes()
        for event in read_history(tmp_path)
        if event["event"] == "image"
    ]
    assert [
        (image.step, image.width, image.height, image.encoded_image_string) for image in images
    ] == [
        (0, 5, 3, files[0]),
        (2, 5, 3, files[1]),
    ]


def test_the_configuration_is_written_as_text_and_hyperparameters(record, tmp_path):
    send_all("tensorboard", tmp_path)
    accumulator = read(tmp_path)
    (text,) = accumulator.Tensors("config")
    assert "| lanes | 4 |" in text.tensor_proto.string_val[0].decode()
    assert "| dir | runs/<b>a\\|b</b> |" in text.tensor_proto.string_val[0].decode()
    content = accumulator.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    hyperparameters = parse_session_start_info_plugin_data(content).hparams
    assert (
        hyperparameters["lanes"].number_value,
        hyperparameters["timeout"].number_value,
        hyperparameters["dir"].string_value,
    ) == (4, 1.5, CONFIG["dir"])


def test_unusual_names_are_unchanged(record, tmp_path):
    write_step(record, 0)
    send_all("tensorboard", tmp_path)
    assert points(tmp_path, ODD) == [(0, 0.0)]


@pytest.mark.parametrize("sinks", [1, 2], ids=["one process", "a process each"])
def test_a_resume_replaces_repeated_steps(record, tmp_path, sinks):
    for step in range(4):
        write_step(record, step, loss=float(step))
        if step in {1, 3}:
            write_step(record, step + 1, between=True, score=step + 0.5)
            write_image(record, step + 1, np.full((2, 2), step, dtype=np.uint8), between=True)
    if sinks == 2:
        send_all("tensorboard", tmp_path)
    write_start(record, 2)
    for step in (2, 3):
        write_step(record, step, loss=step + 100.0)
    send_all("tensorboard", tmp_path, {1: 0, 2: 9}[sinks])
    assert (
        points(tmp_path, "loss")
        == expected(tmp_path, "loss")
        == [(0, 0), (1, 1), (2, 102), (3, 103)]
    )
    assert points(tmp_path, "score") == expected(tmp_path, "score") == [(2, 1.5)]
    assert [image.step for image in read(tmp_path).Images("cells")] == [2]


def test_a_start_from_the_beginning_replaces_everything(record, tmp_path):
    write_step(record, 0, between=True, score=1.0)
    write_step(record, 0, loss=1.0)
    write_start(record, 0)
    write_step(record, 0, loss=2.0)
    write_step(record, 1, score=3.0)
    send_all("tensorboard", tmp_path)
    assert (points(tmp_path, "loss"), points(tmp_path, "score")) == ([(0, 2.0)], [(1, 3.0)])


@pytest.mark.parametrize("first", range(6))
def test_repeated_events_appear_once(record, tmp_path, first):
    write_step(record, 0, loss=0.0)
    write_step(record, 1, between=True, score=1.0)
    write_step(record, 1, loss=1.0)
    write_step(record, 1, other=2.0)
    write_step(record, 2, loss=2.0)
    killed = TensorBoardSink(tmp_path)
    send(killed, tmp_path)
    send_all("tensorboard", tmp_path, first)
    killed.close()
    assert steps(tmp_path, "loss") == [0, 1, 2]
    assert (steps(tmp_path, "score"), steps(tmp_path, "other")) == ([1], [1])


def test_a_truncated_file_is_not_continued(record, tmp_path):
    for step in range(3):
        write_step(record, step, loss=float(step))
    send_all("tensorboard", tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    send_all("tensorboard", tmp_path, 2)
    assert steps(tmp_path, "loss") == [0, 1, 2]


def test_a_missing_image_file_is_tolerated(record, tmp_path):
    write_image(record, 1, np.zeros((2, 2), dtype=np.uint8), between=True)
    send_all("tensorboard", tmp_path)
    for file in (tmp_path / "images").iterdir():
        file.unlink()
    write_start(record, 1)
    send_all("tensorboard", tmp_path, 2)
    assert read(tmp_path).Images("cells") == []


def test_a_missing_package_raises_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ConfigError, match=r'pip install "samestep\[tensorboard\]"'):
        TensorBoardSink(tmp_path)
