"""A run that only reads finds any snapshot of another run, and changes nothing."""

from __future__ import annotations

import shutil
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import samestep as ss
from samestep.errors import ConfigError, SnapshotError
from samestep.record.files import DirectoryLock
from samestep.run.start import Start
from samestep.snapshot.read import list_snapshots, remove
from tests.jobs import STEPS, Net, image_job, images, train
from tests.workers import run_workers


def score(model, batch):
    pictures, labels = batch
    return {"loss": F.cross_entropy(model(pictures), labels)}


def evaluate(**options):
    """Return the step and the score of a snapshot, as a script for evaluation does."""
    with ss.init(read_only=True, **options) as run:
        model = run.replicate(Net())
        run.track(model=model)
        return run.step, run.evaluate(score, model, images(50), 8)["loss"]


def contents(directory):
    """Return everything in a directory, with the times of its files."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in Path(directory).rglob("*")
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory of a finished run of 2 lanes, with a copy at a URL."""
    directory = tmp_path_factory.mktemp("finished")
    options = {"lanes": 2, "keep_last": 4, "remote": f"file://{directory}/far"}
    run_workers(train, 1, image_job, directory / "run", options)
    return directory


@pytest.mark.parametrize("workers", [1, 2])
def test_any_step_is_evaluated_beside_a_training_run_and_nothing_changes(finished, workers):
    directory = finished / "run"
    before = contents(finished)
    older = directory / f"step-{STEPS - 2:08d}"
    with closing(DirectoryLock(directory, None)):  # as long as the run trains
        before = contents(finished)
        newest = run_workers(lambda: evaluate(dir=directory, seed=3, lanes=4), workers)
        others = run_workers(lambda: evaluate(dir=directory, resume=str(older)), workers)
        assert contents(finished) == before
    snapshot = ss.read_snapshot(directory)
    model = Net()
    model.load_state_dict(snapshot.state["model"])
    pictures, labels = images(50).tensors
    with torch.no_grad():
        expected = F.cross_entropy(model.eval()(pictures), labels).item()
    assert newest == [(STEPS, pytest.approx(expected))] * workers
    assert others == [(STEPS - 2, others[0][1])] * workers
    assert others[0] != newest[0]


@pytest.mark.parametrize("resume", ["auto", f"step-{STEPS - 1:08d}"])
def test_a_remote_run_is_evaluated_without_a_directory(finished, tmp_path, monkeypatch, resume):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    url = f"file://{finished}/far"
    step, where = (
        (STEPS, {"remote": url}) if resume == "auto" else (STEPS - 1, {"resume": f"{url}/{resume}"})
    )
    before = contents(finished)
    assert [at for at, _ in run_workers(lambda: evaluate(**where), 2)] == [step] * 2
    assert contents(finished) == before
    assert not list(tmp_path.glob("samestep-*"))


def test_snapshots_that_the_run_removes_meanwhile_are_no_error(finished, tmp_path, monkeypatch):
    directory, find = tmp_path / "run", Start._find
    shutil.copytree(finished / "run", directory)
    *others, newest = list_snapshots(directory)
    later = newest.rename(tmp_path / newest.name)

    def find_late(*args):
        if later.exists():  # the run goes on before the first snapshot is read
            for path in others:
                remove(path)
            later.rename(newest)
            raise SnapshotError("there is none of those that were listed")
        return find(*args)

    monkeypatch.setattr(Start, "_find", find_late)
    assert evaluate(dir=directory)[0] == STEPS


def test_a_place_without_a_snapshot_is_an_error(tmp_path):
    with pytest.raises(SnapshotError, match="none has no complete snapshot to read"):
        evaluate(dir=tmp_path / "none")


def test_a_training_step_is_refused(finished):
    with pytest.raises(ConfigError, match="a step was begun, but with read_only=True nothing is"):
        train(partial(image_job, epochs=3), finished / "run", {"read_only": True, "lanes": 2})
