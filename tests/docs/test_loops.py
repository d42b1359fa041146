"""Ten loops are as short with samestep as docs/loops.md says, and keep their bits."""

from __future__ import annotations

import re
import runpy
import statistics

import pytest

import samestep as ss
from samestep.record import read_events
from tests.docs.loops import FOLDER, NAMES, PAGE, counts, difference, with_differences
from tests.jobs import fingerprint
from tests.python import run_python
from tests.workers import run_workers


def test_the_page_shows_every_difference_and_number():
    page = PAGE.read_text()
    assert with_differences(page) == page
    for name in NAMES:
        assert difference(name) in page
        assert f"(#{name}) | {' | '.join(map(str, counts(name)))} |" in page
    assert sorted(f"{name}{end}.py" for name in NAMES for end in ("", "_ddp")) == sorted(
        path.name for path in FOLDER.glob("*.py")
    )


def test_the_median_of_changed_lines_is_small():
    assert statistics.median(counts(name)[2] for name in NAMES) <= 12


def train(script):
    runpy.run_path(str(script), run_name="__main__")


def left_in(directory):
    snapshot = ss.read_snapshot(directory)
    events = [event for event in read_events(directory) if event["event"] == "scalars"]
    scalars = [(event["step"], event["values"]) for event in events]
    return snapshot.step, fingerprint(snapshot.state), scalars


@pytest.mark.parametrize("name", [pytest.param("dcgan", marks=pytest.mark.long), "segmentation"])
def test_two_workers_leave_the_bits_of_one(name, tmp_path):
    left = []
    for workers in (1, 2):
        directory = str(tmp_path / str(workers))
        options = {"SAMESTEP_DIR": directory, "SAMESTEP_STOP_AFTER": "3"}
        run_workers(train, workers, FOLDER / f"{name}.py", environment=options)
        left.append(left_in(directory))
    assert left[0] == left[1]
    assert left[0][0] == 3


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_loop_passes_verify_with_a_kill(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["-m", "samestep", "verify", "-n", "1,2,3", "--kill", FOLDER / f"{name}.py"]
    done = run_python(*command)
    assert done.returncode == 0, done.stdout
    assert "the same at every step" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_loop_trains_with_ddp(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_python(*torchrun, FOLDER / f"{name}_ddp.py")
    # not its status: a process of gloo may abort at its exit, after training
    assert re.search("epoch 0:|step [01]0?: ", done.stdout), done.stderr
