"""The commands of samestep work with programs that train sharded models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.python import run_python
from tests.sharded import script

SCRIPT = Path(script.__file__)


@pytest.mark.long
def test_verify_finds_the_same_steps_also_after_a_kill():
    words = ["verify", "-n", "1,2,3", "--kill", "--steps", "4", SCRIPT]
    done = run_python("-m", "samestep", *words, check=True, merges=True)
    assert "the same at every step" in done.stdout


@pytest.mark.long
def test_replay_repeats_a_step_on_one_worker(tmp_path):
    flags = ["--dir", tmp_path / "run", "--snapshot-every", "1", "--keep-last", "9"]
    run_python("-m", "samestep", "run", "-n", "3", *flags, SCRIPT, check=True)
    words = ["replay", tmp_path / "run", "--step", "4", "--compare-state", SCRIPT]
    done = run_python("-m", "samestep", *words, check=True, merges=True)
    assert "state: the same bits" in done.stdout, done.stdout
