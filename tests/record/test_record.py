from __future__ import annotations

import math
import threading
import time
from functools import partial

import numpy as np
import pytest

from samestep.errors import RecordError
from samestep.record import FileRecord, Record, open_record, read_events
from samestep.record.images import AsyncImageWriter, write_picture


@pytest.fixture
def record(tmp_path):
    opened = open_record(tmp_path / "run", writes=True)
    yield opened
    opened.close()


def events_of(tmp_path):
    return [
        {name: value for name, value in event.items() if name != "time"}
        for event in read_events(tmp_path / "run")
    ]


def test_an_event_has_its_kind_its_time_and_its_fields(record, tmp_path):
    before = time.time()
    record.event("started", workers=2, names=["a", "b"])
    (event,) = read_events(tmp_path / "run")
    assert before <= event.pop("time") <= time.time()
    assert event == {"event": "started", "workers": 2, "names": ["a", "b"]}


def test_scalars_are_floats_with_the_lowest_and_highest_worker(record, tmp_path):
    record.scalars(
        3, 1, {"loss": np.float32(0.5), "accuracy": 1}, {"loss": 0.25}, {"loss": math.inf}
    )
    record.scalars(4, 1, {"loss": -math.inf})
    assert events_of(tmp_path) == [
        {
            "event": "scalars",
            "step": 3,
            "epoch": 1,
            "values": {"loss": 0.5, "accuracy": 1.0},
            "low": {"loss": 0.25},
            "high": {"loss": math.inf},
        },
        {
            "event": "scalars",
            "step": 4,
            "epoch": 1,
            "values": {"loss": -math.inf},
            "low": {},
            "high": {},
        },
    ]


def test_values_logged_between_steps_are_marked(record, tmp_path):
    record.scalars(3, 1, {"loss": 0.5}, between=True)
    record.image(3, "faces", np.zeros((4, 6), np.uint8), between=True)
    record.image(3, "faces", np.zeros((4, 6), np.uint8))
    record.flush()
    assert [event.get("between") for event in events_of(tmp_path)] == [True, True, None]


def test_timing_is_by_worker_and_part(record, tmp_path):
    record.timing(7, [{"data": 0.5, "compute": 1}, {"data": 0.25}])
    assert events_of(tmp_path) == [
        {"event": "timing", "step": 7, "workers": [{"data": 0.5, "compute": 1.0}, {"data": 0.25}]}
    ]


@pytest.mark.parametrize("field", ["time", "event"])
def test_reserved_fields_raise(record, field):
    with pytest.raises(RecordError, match=f"{field}.*rename"):
        record.event("started", **{field: 1})


def test_an_image_event_follows_the_complete_file(record, tmp_path):
    record.image(12, "faces", np.zeros((4, 6, 3), np.uint8))
    record.flush()
    (event,) = events_of(tmp_path)
    file = tmp_path / "run" / "images" / "faces-00000012.png"
    assert event == {
        "event": "image",
        "name": "faces",
        "step": 12,
        "path": "images/faces-00000012.png",
        "width": 6,
        "height": 4,
        "bytes": file.stat().st_size,
    }
    assert file.read_bytes().startswith(b"\x89PNG")


def test_dropped_images_are_counted(tmp_path, monkeypatch):
    let = threading.Semaphore(0)

    def write_when_let(directory, picture):
        let.acquire()
        return write_picture(directory, picture)

    monkeypatch.setattr("samestep.record.record.write_picture", write_when_let)
    monkeypatch.setattr(
        "samestep.record.record.AsyncImageWriter", partial(AsyncImageWriter, max_bytes=50)
    )
    record = open_record(tmp_path / "run", writes=True)
    for step in range(5):
        record.image(step, "faces", np.zeros((4, 6), np.uint8))  # 24 bytes
    let.release(9)
    record.flush()
    record.image(5, "faces", np.zeros((4, 6), np.uint8))
    record.close()
    written = [
        {name: event[name] for name in ("event", "step", "count") if name in event}
        for event in events_of(tmp_path)
    ]
    assert written[:1] == [{"event": "images_dropped", "count": 3, "step": 4}]
    assert [event["step"] for event in written[1:]] == [0, 1, 5]


def test_a_closed_record_has_every_image(tmp_path):
    record = open_record(tmp_path / "run", writes=True)
    for step in range(3):
        record.image(step, "faces", np.zeros((4, 6), np.uint8))
    record.close()
    assert [event["step"] for event in events_of(tmp_path)] == [0, 1, 2]


def test_a_failed_image_write_raises_at_the_next_call(record, tmp_path):
    (tmp_path / "run" / "images").write_text("a file")
    record.image(0, "faces", np.zeros((4, 6), np.uint8))
    with pytest.raises(RecordError, match=r"images/faces-00000000\.png cannot be written"):
        record.flush()


@pytest.mark.parametrize(("directory", "writes"), [(None, True), ("run", False)])
def test_workers_that_do_not_write_get_a_record_that_does_nothing(tmp_path, directory, writes):
    record = open_record(directory and tmp_path / directory, writes=writes)
    assert type(record) is Record
    record.event("started")
    record.scalars(0, 0, {"loss": 1.0})
    record.timing(0, [])
    record.image(0, "not even an image", None)
    record.flush()
    record.close()
    assert list(tmp_path.iterdir()) == []


def test_both_records_have_the_same_methods():
    def calls(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert calls(Record) == calls(FileRecord)


def test_timing_of_more_than_64_workers_is_summarized(record, tmp_path):
    workers = [
        {"compute": float(rank), "exchange": 100.0, "own": float(rank)} for rank in range(101)
    ]
    record.timing(7, workers[:64])
    record.timing(8, workers)
    few, many = events_of(tmp_path)
    assert len(few["workers"]) == 64
    assert "workers" not in many  # older versions of samestep skip the event
    assert many["count"] == 101
    assert many["slowest"] == 100
    assert many["mean"]["compute"] == 50
    assert many["quantiles"]["compute"] == many["quantiles"]["own"] == [0, 25, 50, 75, 100]
    assert many["quantiles"]["exchange"] == [100] * 5
    assert many["quantiles"]["snapshot"] == [0] * 5
