"""Directories that somebody else wrote: each attack is bounded, refused or escaped."""

from __future__ import annotations

import os

import pytest

from samestep.errors import RecordError
from samestep.record import open_record, read_events, read_history
from samestep.record.events import LONGEST_LINE
from samestep.record.source import open_source
from tests.security.hostile import (
    LARGE,
    LIMITED,
    UNREADABLE,
    run_limited,
    write_runs,
)
from tests.watch.serving import serving, until
from tests.watch.writing import started, write


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "runs"
    folder.mkdir()
    write_runs(folder)
    return folder


@pytest.mark.long
def test_a_report_shows_the_good_run_and_says_what_is_wrong_with_the_bad_ones(runs, tmp_path):
    report = tmp_path / "report.html"
    ended = run_limited("-m", "samestep", "report", runs, "--out", report)
    assert ended.returncode == 0, ended.stderr
    page = report.read_text()
    assert "0.123" in page
    assert all(f'"id":"{name}"' in page for name in ("good", *LARGE))
    for name, (_, reason) in UNREADABLE.items():
        line = next(line for line in ended.stderr.splitlines() if f"/{name[:5]}" in line)
        assert reason in line
    assert "\x1b" not in ended.stderr + ended.stdout
    assert "secret" not in page + ended.stderr


@pytest.mark.long
def test_a_plot_draws_the_good_run(runs, tmp_path):
    plot = tmp_path / "plot.svg"
    words = ("plot", runs, "--scalars", "loss", "--out", plot)
    ended = run_limited("-m", "samestep", *words)
    assert ended.returncode == 0, ended.stderr
    assert ">good</text>" in plot.read_text()
    assert "not a regular file" in ended.stderr
    assert "\x1b" not in ended.stderr


def test_the_page_shows_the_good_run_and_says_what_is_wrong_with_the_bad_ones(runs):
    with serving(runs, prefix=LIMITED) as served:

        def answers():
            found = served.json("/api/runs")
            faults = {
                fault["location"].rpartition("/")[2]: fault["text"] for fault in found["faults"]
            }
            rows = {row["id"]: row for row in found["runs"]}
            read = all(rows[name]["updated"] for name in ("good", *LARGE))
            return (rows, faults) if read and faults.keys() >= UNREADABLE.keys() else None

        rows, faults = until(answers, 0.5)  # each answer is about ten thousand curves
        assert rows.keys() == {"good", *LARGE, *UNREADABLE}
        assert rows["good"]["principal"] == {
            "role": "loss",
            "name": "loss",
            "last": 0.123,
            "goal": "lowest",
        }
        for name, (_, reason) in UNREADABLE.items():
            assert reason in faults[name]
        for name in rows:
            summary = served.json("/api/run", id=name)
            served.json("/api/timing", id=name)
            assert len(summary["scalars"]) <= 10_001
        assert served.json("/api/run", id="names")["events"][-1]["text"].startswith("more than")
        assert served.get("/api/image", params={"id": "pictures", "number": 0}).status_code == 404


REFUSED = """
import sys
from samestep.errors import RecordError
from samestep.record import read_events, read_history

for path in sys.argv[1:]:
    for function in (read_events, read_history):
        try:
            events = [*function(path)]
        except RecordError:
            continue
        sys.exit(f"{function.__name__} read {len(events)} events of {path}")
"""


def test_functions_that_read_a_record_refuse_it(runs):
    names = [name for name in UNREADABLE if "newer" not in name]
    ended = run_limited("-c", REFUSED, *(runs / name for name in names))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_record_may_be_named_by_a_link(tmp_path):
    write(tmp_path / "run", started())
    (tmp_path / "latest").symlink_to("run")
    (tmp_path / "record").symlink_to("run/events.jsonl")
    for path in ("latest", "record"):
        assert [event["event"] for event in read_events(tmp_path / path)] == ["started"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordError, match="not a regular file"):
        next(read_history(tmp_path / "pipe"))


def test_an_event_that_readers_would_refuse_is_not_written(tmp_path):
    record = open_record(tmp_path, writes=True)
    record.event("started", step=0)
    with pytest.raises(RecordError, match=f"at most {LONGEST_LINE} bytes, got"):
        record.event("notes", text="x" * LONGEST_LINE)
    record.close()
    assert len(open_source(tmp_path).read(0).splitlines()) == 1
