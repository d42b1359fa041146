"""Reading a record while it grows, and after it was replaced or removed."""

from __future__ import annotations

import pytest

from samestep.errors import RecordError
from samestep.record.source import open_source
from samestep.watch import run_state
from samestep.watch import view as view_module
from samestep.watch.view import View
from tests.watch.writing import (
    START,
    histogram,
    scalars,
    started,
    system,
    timing,
    view_of,
    write,
)


def test_only_what_is_new_is_read(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))
    offsets = []
    read = view.source.read
    view.source.read = lambda offset: offsets.append(offset) or read(offset)
    assert view.refresh() is False
    assert offsets == []
    size = (tmp_path / "events.jsonl").stat().st_size
    write(tmp_path, scalars(1, loss=0.5))
    assert view.refresh() is True
    assert min(offsets) >= size - view_module.TAIL_BYTES
    assert view.curve("loss")["value"] == [1, 0.5]


def test_a_line_longer_than_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.record.source.READ_BYTES", view_module.TAIL_BYTES + 100)
    failure = {"event": "failed", "traceback": "x" * 9000}
    view = view_of(
        tmp_path,
        started(),
        *[scalars(step, loss=1.0) for step in range(20)],
        failure,
        scalars(20, loss=2.0),
    )
    assert view.curve("loss")["points"] == 21
    assert view.row()["state"] == "failed"


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_replaced_record_is_read_from_its_start(tmp_path, steps):
    """The other record may be shorter, equally long, or longer."""
    view = view_of(tmp_path, started(), *[scalars(step, loss=1.0) for step in range(3)])
    (tmp_path / "events.jsonl").unlink()
    write(
        tmp_path,
        started(workers=1),
        *[scalars(step, score=2.0) for step in range(steps)],
        start=START + 1000,
    )
    assert view.refresh() is True
    assert [scalar["name"] for scalar in view.summary()["scalars"]] == ["score"]
    assert view.curve("score")["points"] == steps
    assert view.row()["workers"] == 1


def test_a_removed_record_is_empty_until_a_new_one_is_written(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))
    (tmp_path / "events.jsonl").unlink()
    view.refresh()
    assert view.summary()["scalars"] == []
    write(tmp_path, started(), scalars(0, loss=4.0))
    assert view.refresh() is True
    assert view.curve("loss")["value"] == [4]


def test_a_storage_that_does_not_respond_changes_nothing(tmp_path):
    view = view_of(tmp_path, started(), scalars(0, loss=1.0))

    def fail(*_):
        raise RecordError("the storage did not respond")

    read, view.source.read = view.source.read, fail
    write(tmp_path, scalars(1, loss=2.0))
    with pytest.raises(RecordError, match="did not respond"):
        view.refresh()
    assert view.curve("loss")["value"] == [1]
    view.source.read = read
    assert view.refresh() is True
    assert view.curve("loss")["value"] == [1, 2]


def test_news_count_even_if_the_clock_of_the_run_is_behind(tmp_path, monkeypatch):
    view = view_of(tmp_path, scalars(0, loss=1.0))
    monkeypatch.setattr(view_module.time, "time", lambda: START + 9999)
    assert view.row()["state"] == "silent"
    write(tmp_path, scalars(1, loss=1.0))
    view.refresh()
    assert view.row()["state"] == "running"


def test_a_long_record_has_the_share_that_is_read_until_all_is(tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.record.source.READ_BYTES", 4096)
    monkeypatch.setattr(view_module, "LONG_BYTES", 2**14)
    write(tmp_path, started(), *[scalars(step, loss=float(step)) for step in range(400)])
    write(tmp_path, {"event": "finished", "step": 400})
    view = View(open_source(tmp_path))
    shares = []
    while view.advance():
        summary = view.summary()
        assert summary["scalars"][0]["points"] == len(view.curve("loss")["x"])
        shares.append(summary["reading"])
    assert shares.pop() is None
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.2
    assert 0.8 < shares[-1] <= 1
    assert view.curve("loss")["points"] == 400


def test_a_record_of_too_many_points_is_thinned_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.record.source.READ_BYTES", 4096)
    monkeypatch.setattr(view_module, "MOST_BYTES", 20_000)
    monkeypatch.setattr(view_module, "FEWEST_ROWS", 32)
    write(tmp_path, started(), *[scalars(step, a=step, b=-step) for step in range(1000)])
    view = View(open_source(tmp_path))
    while view.advance():
        assert view.bytes_held <= 20_000
    for name, last in {"a": 999, "b": -999}.items():
        curve = view.curve(name)
        assert not curve["exact"]
        assert (curve["value"][0], curve["value"][-1]) == (0, last)


def test_all_that_a_long_run_records_is_bounded(tmp_path, monkeypatch):
    """Timings, samples of hosts and histograms count as curves do."""
    monkeypatch.setattr("samestep.record.source.READ_BYTES", 2**16)
    monkeypatch.setattr(view_module, "MOST_BYTES", 150_000)
    monkeypatch.setattr(view_module, "FEWEST_ROWS", 64)
    monkeypatch.setattr(run_state, "MOST_HISTOGRAMS", 50)
    monkeypatch.setattr(run_state, "HISTOGRAM_BYTES", 10_000)
    events, held = [started()], []
    for step in range(1500):
        events += [timing(step, *[(0.1, 0.2, 0.1, 0.1, 0.0)] * 2), system("here")]
        events += [histogram(step, "weights", (0.0, 1))] if step % 3 == 0 else []
    write(tmp_path, *events, seconds=0.25)
    view = View(open_source(tmp_path))
    while view.advance():
        held.append(view.bytes_held)
    assert max(held) <= 150_000
    seconds = view.timing(points=5)
    assert (seconds["x"][0], seconds["parts"]["compute"]) == (0, pytest.approx([0.2] * 5))
    assert seconds["workers"] == [pytest.approx([0.4] * 5)] * 2
    histograms = view.histogram("weights")["items"]
    assert (histograms[0]["step"], histograms[-1]["step"]) == (0, 1497)
    assert len(histograms) * 500 < 10_000
    (use,) = [curve for curve in view.system()["curves"] if curve["name"] == "cpu"]
    assert use["value"][0] == use["value"][-1] == 25
