"""Every later version reads what earlier versions wrote.

tests/golden/VERSION holds the directory of a run of `train` on 2 workers, written by that version.
A version that changes a format adds a directory and leaves the others as they are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import samestep as ss
from samestep.record import read_events, read_history
from samestep.snapshot import check, load

GOLDEN = Path(__file__).parents[1] / "golden"
STEPS = 3


class Plain:
    """An object whose state has tensors of several dtypes, and plain values."""

    def __init__(self) -> None:
        self.state = {
            "bfloat16": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
            "transposed": torch.arange(6).reshape(2, 3).t(),
            "complex": torch.tensor([1 + 2j]),
            "empty": torch.zeros(0, 3, dtype=torch.uint8),
            "plain": {"text": "ü", (1, 2): [None, True, -0.0, 2**70, float("inf"), b"\0\xff"]},
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def train(directory: str, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], object]:
    """Train a small model with a sharded optimizer, and return its state and the plain object's."""
    with ss.init(dir=directory, lanes=2, snapshot_every=1, keep_last=1, keep_best=0) as run:
        model = run.replicate(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)))
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.1))
        plain = Plain()
        run.track(model=model, optimizer=optimizer, plain=plain)
        data = torch.linspace(-1, 1, 24).reshape(8, 3)
        for batch in run.batches(data, 4, steps=steps):
            run.backward(lambda model, x: model(x).square().mean(), model, batch)
            optimizer.step()
            optimizer.zero_grad()
            run.log(score=float(run.step))
            run.log_image("square", np.full((4, 4), 7, np.uint8))
    return model.state_dict(), plain.state


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir()))
def test_later_versions_resume_and_read_what_an_earlier_one_wrote(version, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(GOLDEN / version, directory)
    (snapshot,) = directory.glob("step-*")
    check(snapshot)
    stored = load(snapshot, ["model"]).state["model"]
    model, plain = train(str(directory))  # resumes, and has no step left
    assert set(plain) == set(Plain().state)
    for name, value in Plain().state.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == plain[name].dtype
            assert torch.equal(value, plain[name])
        else:
            assert repr(value) == repr(plain[name])
    assert all(torch.equal(model[name], value) for name, value in stored.items())
    logged = [event for event in read_history(directory) if event["event"] == "scalars"]
    assert [event["values"]["score"] for event in logged] == [0.0, 1.0, 2.0]
    kinds = [event["event"] for event in read_events(directory)]
    assert kinds[0] == "started"
    assert kinds.count("image") == STEPS
    assert "resumed" in kinds
