from __future__ import annotations

import pytest
import torch._dynamo  # noqa: F401  imported by the first step of an optimizer: once here

from benchmarks.recheck import PLACES, WORKERS, flips, print_flips, train
from tests.workers import run_workers


@pytest.mark.long
def test_every_flip_that_changes_what_is_compared_is_found(monkeypatch, capsys):
    """And the worker named; a flip that is not found is an error."""
    counts, *others = run_workers(flips, WORKERS, 48)
    assert all(other == counts for other in others)
    assert all(counts[place, "changed"] > 0 for place in PLACES)
    monkeypatch.setattr("samestep.launch", lambda *_, workers: counts)
    print_flips(48)
    assert "| gradients | 8 |" in capsys.readouterr().out
    counts["gradients", "found"] -= 1
    with pytest.raises(SystemExit, match="flips in gradients were not found"):
        print_flips(48)


def test_training_without_faults_raises_no_alarm():
    """Each of the jobs checks a lane in every step, and an update if its optimizer is sharded."""
    assert run_workers(train, 2, 5, 1, "streams") == [(5, 0)] * 2
    assert run_workers(train, 2, 5, 1, "attention, sharded") == [(5, 5)] * 2
