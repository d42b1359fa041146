from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.errors import SnapshotError
from samestep.snapshot import digest
from samestep.snapshot.digest import run_state, sorted_plain, state_digest
from samestep.snapshot.read import inspect
from tests.faults import cut


def save(directory, change=lambda values: None, steps=0):
    """Save some values, and return the path of their snapshot."""
    values = {
        "numbers": torch.arange(6.0).view(2, 3),
        "deep": [{"bits": torch.tensor([True, False]), "empty": torch.empty(0, 4)}],
        "text": "a",
        5: -0.0,
    }
    change(values)
    with ss.init(dir=directory, lanes=1, stop_after=steps + 1) as run:
        model = run.replicate(nn.Linear(1, 1))
        run.track(values=values, model=model)
        for _ in run.batches([torch.ones(1)] * 4, 1, steps=steps):
            pass
    return directory / f"step-{steps:08d}"


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["numbers"][0].copy_(torch.tensor([-0.0, 1, 2])),
        lambda values: values.update(numbers=values["numbers"].view(3, 2)),
        lambda values: values.update(numbers=values["numbers"].double()),
        lambda values: values["deep"][0]["bits"].logical_not_(),
        lambda values: values["deep"][0].update(empty=torch.empty(0, 5)),
        lambda values: values.update(text="b"),
        lambda values: values.update({5: 0.0}),
        lambda values: values.update({"5": values.pop(5)}),
    ],
)
def test_a_digest_depends_on_each_bit(tmp_path, change):
    first = state_digest(save(tmp_path / "first"))
    assert first == state_digest(save(tmp_path / "again"))
    assert first != state_digest(save(tmp_path / "second", change))


def test_a_digest_depends_neither_on_the_run_nor_on_the_order_of_keys(tmp_path):
    first = save(tmp_path / "first")
    reordered = save(tmp_path / "other", lambda values: values.update({5: values.pop(5)}), steps=2)
    assert state_digest(first) == state_digest(reordered)
    assert run_state(inspect(first), "chain") != run_state(inspect(reordered), "chain")
    assert run_state(inspect(first), "step") == 0
    assert run_state(inspect(first), "nothing") is None
    nested = {"dict": [["b", {"dict": [[2, 1], [1, 1]]}], ["a", [3, 2]]]}
    ordered = {"dict": [["a", [3, 2]], ["b", {"dict": [[1, 1], [2, 1]]}]]}
    assert sorted_plain(nested) == ordered


def test_a_large_snapshot_is_given_up_and_a_damaged_one_is_refused(tmp_path, monkeypatch):
    path = save(tmp_path)
    assert state_digest(path, lambda: True) is not None  # it is small
    monkeypatch.setattr(digest, "SMALL_BYTES", 0)
    assert state_digest(path, lambda: True) is None
    shutil.copytree(path, tmp_path / "step-00000007")
    (data,) = (tmp_path / "step-00000007").glob("*.safetensors")
    cut(data, data.stat().st_size - 1)
    with pytest.raises(SnapshotError):
        state_digest(tmp_path / "step-00000007")
