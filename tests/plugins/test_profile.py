"""Traces of some steps: which ones, in which files, and that they change no bit."""

from __future__ import annotations

import gzip
import json

import pytest

import samestep as ss
from samestep.config import merge
from samestep.errors import ConfigError
from samestep.watch.run_state import describe
from tests.jobs import STEPS, events, image_job, left_by

OPTIONS = {"lanes": 4, "system_every": None}


def train(directory, fails_at=None, **options):
    def hook(step):
        if step == fails_at:
            raise ZeroDivisionError

    with ss.init(dir=directory, **OPTIONS, **options) as run:
        image_job(run, hook=hook)


def traced(path):
    """Return the steps that a trace has, in their order."""
    with gzip.open(path, "rt") as file:
        shown = json.load(file)["traceEvents"]
    names = {event["ts"]: event["name"] for event in shown if "ts" in event}
    marks = {at: name for at, name in names.items() if name.startswith("step ")}
    return [int(name.removeprefix("step ")) for _, name in sorted(marks.items())]


def files(directory):
    return sorted(path.name for path in directory.glob("profiles/*"))


def test_each_worker_writes_its_steps_and_the_bits_are_the_same(tmp_path):
    plain = left_by(image_job, tmp_path / "plain", 2, lanes=4)
    assert left_by(image_job, tmp_path / "traced", 2, lanes=4, profile="2:5") == plain
    names = [f"step-2-5-rank-{rank}.json.gz" for rank in range(2)]
    assert files(tmp_path / "traced") == names
    for name in names:
        assert traced(tmp_path / "traced" / "profiles" / name) == [2, 3, 4]
    (event,) = events(tmp_path / "traced", "profiled")
    assert (event["first"], event["step"]) == (2, 5)
    assert (tmp_path / "traced" / event["file"]).is_file()
    assert describe(event, "profiled", {})[0] == f"traced steps 2:5, in {event['file']}"


@pytest.mark.long
def test_a_run_that_ends_within_the_steps_writes_those_and_the_next_start_the_others(
    tmp_path, capsys
):
    with pytest.raises(SystemExit):
        train(tmp_path, profile="3:100", stop_after=5)
    assert files(tmp_path) == ["step-3-5-rank-0.json.gz"]
    train(tmp_path, profile="3:100")
    assert files(tmp_path) == ["step-3-5-rank-0.json.gz", f"step-5-{STEPS}-rank-0.json.gz"]
    assert traced(tmp_path / "profiles" / files(tmp_path)[1]) == [5, 6, 7]
    assert [event["event"] for event in events(tmp_path)][-1] == "finished"
    capsys.readouterr()
    train(tmp_path, profile="3:4")  # the run is already after them
    assert (
        "nothing was traced: this start made none of the steps profile=3:4"
        in capsys.readouterr().err
    )
    assert len(files(tmp_path)) == 2


def test_an_error_in_a_traced_step_ends_the_trace(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, fails_at=3, profile="2:6")
    assert files(tmp_path) == []
    train(tmp_path, profile="2:6", resume="never")  # a second trace in this process
    assert files(tmp_path) == ["step-2-6-rank-0.json.gz"]


def test_a_trace_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "profiles").write_text("a file")
    train(tmp_path, profile="0:1")
    assert "cannot be written" in capsys.readouterr().err
    assert events(tmp_path, "profiled") == []
    assert events(tmp_path, "finished")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("20", "FIRST below END"),
        ("25:20", "FIRST below END"),
        ("20:20", "FIRST below END"),
        ("-1:5", "FIRST below END"),
        ("2:3,5:6", "one range of steps"),
    ],
)
def test_a_malformed_range_is_refused(value, says):
    with pytest.raises(ConfigError, match=says) as caught:
        merge({"profile": value})
    assert "profile must be" in str(caught.value)


def test_a_trace_needs_a_directory():
    with pytest.raises(ConfigError, match="requires dir"):
        ss.init(profile="0:1")
