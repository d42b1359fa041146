"""`samestep compare --replay` repeats a step of two runs, and names the first other value."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from samestep.cli import main
from samestep.errors import ConfigError
from samestep.tools.replay import RecordedRun
from samestep.tools.values import _command_of, _difference, _gap
from tests.python import run_python
from tests.tools.test_replay import content

LONG = pytest.mark.long
AT = 5  # the step of a change
SCRIPT = f"""
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep as ss

KIND = sys.argv[1]


def up(value):
    return float(np.nextafter(np.float32(value), np.float32(9)))


class Scale(nn.Module):
    factor = 0.3

    def forward(self, inputs):
        return inputs * self.factor


def loss_fn(model, batch):
    return (model(batch[0]) - 1).square().mean()


points = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
if KIND == "data":
    rows = slice({AT} * 8, {AT} * 8 + 8)
    points[rows] = torch.nextafter(points[rows], torch.tensor(9.0))
with ss.init(lanes=4, snapshot_every=4, keep_last=9, system_every=None) as run:
    model = run.replicate(nn.Sequential(nn.Linear(4, 8), Scale(), nn.Linear(8, 1)))
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.7))
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(TensorDataset(points), 8, epochs=1, shuffle=False):
        if KIND == "eps" and run.step == {AT}:
            optimizer.param_groups[0]["eps"] = up(0.7)
        if KIND == "forward" and run.step >= {AT}:
            model[1].factor = up(0.3)
        run.log(run.backward(loss_fn, model, batch))
        optimizer.step()
        optimizer.zero_grad()
"""


def start(folder, kind, *flags, workers=1):
    """Train with a change of a kind; return the directory of the run."""
    words = "run", "-n", workers, "--dir", folder / kind, *flags, folder / "train.py", kind
    run_python("-m", "samestep", *words, check=True)
    return folder / kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the script, and a run in which nothing is changed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").write_text(SCRIPT)
    start(folder, "nothing", workers=2)
    return folder


@pytest.fixture
def compare(capfd):
    """Return a function that compares two runs, and returns the exit status and the output."""

    def run(first, second, *flags):
        status = main(["compare", str(first), str(second), *flags])
        return status, "".join(capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("kind", "part", "value"),
    [
        (
            "forward",
            "losses",
            r"step 5, lane 0, output of Sequential\.1 \(Scale\): \d+ of 16 values, by .*e-0[78] ",
        ),
        pytest.param("eps", "rates", "after step 5, 'model/.* values, by at most .*e-", marks=LONG),
        pytest.param(
            "data", "losses", "step 5, lane 0, its batch '0': 8 of 8 values, by at most", marks=LONG
        ),
    ],
)
def test_the_first_value_that_one_ulp_changes_is_named(folder, compare, kind, part, value):
    before = content(folder / "nothing")
    status, printed = compare(folder / "nothing", start(folder, kind), "--replay")
    assert status == 1, printed
    assert f"first in its {part}\n" in printed
    assert re.search(f"first other value: {value}", printed), printed
    assert content(folder / "nothing") == before


def test_runs_that_cannot_be_repeated_are_errors(folder, compare, tmp_path):
    """Their program is another one now, or the snapshot with which one began is gone."""
    first, trunk = folder / "nothing", tmp_path / "trunk"
    shutil.copytree(first, trunk)
    shutil.copy(folder / "train.py", tmp_path)
    begun = start(tmp_path, "forward", "--resume", trunk / "step-00000004")
    (tmp_path / "train.py").write_text(SCRIPT.replace("- 1)", "- 2)"))
    status, printed = compare(first, begun, "--replay")
    assert status == 2, printed
    assert "DIFFERENT from step 5 on, first in its losses\n" in printed
    assert f"error: {begun} cannot be repeated: it has other losses from step 4 on" in printed
    assert re.search(r"not as in its record:\n  file train\.py: \w+ -> \w+\n", printed)
    shutil.rmtree(trunk)
    status, printed = compare(first, begun, "--replay")
    assert status == 2, printed
    assert f"error: {begun} has no snapshot before step 5, and the run began with" in printed
    assert compare(first, begun)[0] == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train.py --token '***'", "its record masks a secret in the arguments of train.py"),
        ("train.py 1", "its record says that 'train.py' is its script, and there is no such file"),
        (None, "its record says that '' is its script"),
        ("'' 1", "its record says that '' is its script"),
    ],
)
def test_a_run_without_all_of_its_command_is_refused(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = RecordedRun(Path("run"), 3, {"command": command}, None, 0, 0)
    with pytest.raises(ConfigError, match=f"^run cannot be repeated: {re.escape(words)}"):
        _command_of(record)


NAN, ONE = torch.tensor([float("nan"), 1]), torch.tensor([1.0])


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (ONE, ONE.clone(), ""),
        (NAN, NAN.clone(), ""),
        (NAN, NAN + 1, "1 of 2 values, by at most 1 (1 in A, 2 in B)"),
        (NAN, torch.zeros(2), "2 of 2 values, by at most inf (nan in A, 0 in B)"),
        (ONE * 0, ONE * -0.0, "0 of 1 values, by at most 0 (0 in A, -0 in B)"),
        (ONE[0], ONE[0] + 2**-23, "1 of 1 values, by at most 1.19e-07 (1 in A, 1.00000012 in B)"),
        (ONE, ONE.double(), "float32 [1] in A, float64 [1] in B"),
        (ONE, NAN, "float32 [1] in A, float32 [2] in B"),
        (ONE > 0, ONE < 0, "1 of 1 values, by at most 1 (1 in A, 0 in B)"),
        (torch.empty(0, 3), torch.empty(0, 3), ""),
        (ONE * torch.inf, ONE * torch.inf, ""),
    ],
)
def test_a_gap_between_tensors_is_the_largest_one(first, second, text):
    assert _gap(first, second) == text


def test_steps_that_compute_something_else_differ_in_their_names():
    values = {"000000 lane 0, its batch": ONE, "000001 lane 0, its loss": ONE}
    others = {"000000 lane 0, its batch": ONE, "000001 lane 0, output of a": ONE + 1}
    text = "what is computed: lane 0, its loss in A, {} in B"
    assert _difference([values, others]) == text.format("lane 0, output of a")
    assert _difference([values, {"000000 lane 0, its batch": ONE}]) == text.format("nothing")
    assert _difference([values, values]) == ""
