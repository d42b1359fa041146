"""The commands of samestep work with programs that train sharded models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.python import run_python
from tests.sharded import script

SCRIPT = Path(script.__file__)


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "lanes"),
    [("transformer", 8), ("pictures", 7), ("tied", 8), ("frozen", 7), ("partly", 8)],
)
def test_verify_finds_the_bits_of_replicated_parameters_also_after_a_kill(job, lanes, tmp_path):
    end = tmp_path / "end"
    words = [SCRIPT, job, "--lanes", str(lanes), "--end", end]
    verify = ["-m", "samestep", "verify", "-n", "1,2,3,4", "--kill", "--steps", "9"]
    done = run_python(*verify, *words, "--shard", "full", check=True, merges=True)
    assert "the same at every step" in done.stdout
    run_python(*words, check=True)  # replicated, on one worker
    ends = end.read_text().split()
    assert len(ends) > 4, done.stdout
    assert len({*ends}) == 1, ends


@pytest.mark.long
def test_replay_repeats_a_step_on_one_worker(tmp_path):
    flags = ["--dir", tmp_path / "run", "--snapshot-every", "1", "--keep-last", "9"]
    script = [SCRIPT, "tied", "--shard", "full", "--end", tmp_path / "end"]
    run_python("-m", "samestep", "run", "-n", "3", *flags, *script, check=True)
    words = ["replay", tmp_path / "run", "--step", "4", "--compare-state", *script]
    done = run_python("-m", "samestep", *words, check=True, merges=True)
    assert "state: the same bits" in done.stdout, done.stdout
