"""The small script before and after samestep, and the second on two workers."""

from __future__ import annotations

import runpy

import pytest
import sklearn.datasets  # noqa: F401  imported here once, not in each forked worker
import torch

import samestep as ss
from recipes.first import plain, train
from samestep.snapshot.read import list_snapshots, load
from tests.jobs import fingerprint, logged
from tests.recipes.in_order import in_order
from tests.workers import run_workers


def left_in(directory):
    return load(list_snapshots(directory)[-1]).state


def test_one_lane_leaves_the_bits_of_the_plain_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with in_order(plain):
        plain.main()
    with ss.init(lanes=1, dir=tmp_path / "run") as run:
        train.main(run)
    assert fingerprint(torch.load("digits.pt", weights_only=True)) == fingerprint(
        left_in(tmp_path / "run")["model"]
    )
    said, said_by_samestep = capsys.readouterr().out.splitlines()
    assert said == said_by_samestep
    assert float(said.removeprefix("accuracy ").rstrip("%")) > 80


def as_a_script():
    runpy.run_path(train.__file__, run_name="__main__")


@pytest.mark.long
def test_two_workers_leave_the_bits_of_one(tmp_path):
    left = []
    for workers in (1, 2):
        directory = tmp_path / str(workers)
        # in the 2nd epoch
        run_workers(
            as_a_script,
            workers,
            environment={"SAMESTEP_DIR": str(directory), "SAMESTEP_STOP_AFTER": "30"},
        )
        left.append({**fingerprint(left_in(directory)), **logged(directory)})
    assert left[0] == left[1]
    assert "accuracy at step 29" in left[0]
