from __future__ import annotations

import signal

import pytest
import torch

from benchmarks import recovery
from tests.workers import run_workers, try_workers


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # warnings of peers are not ours
def test_a_peer_resumes_after_a_kill(tmp_path):
    killed = try_workers(recovery.with_ddp, 2, tmp_path)
    assert killed[1].exitcode == -signal.SIGKILL
    assert killed[0].failed
    run_workers(recovery.with_ddp, 2, tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == recovery.STEPS


@pytest.mark.long
def test_the_time_to_recover_is_measured():
    assert recovery.recovery("samestep")["seconds"] > 0
