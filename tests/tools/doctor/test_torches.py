from __future__ import annotations

import os
import signal

import torch

from samestep.tools.doctor import torches
from tests.workers import run_workers


def test_torch_tells_its_version_and_backends():
    told = torches.describe()
    assert told["version"] == torch.__version__
    assert "gloo" in told["backends"]
    assert told["threads"] == 1


def test_gpus_are_asked_for_in_a_process_of_its_own():
    def body():
        return torches.cuda_in_child(), torch.cuda.is_initialized()

    # conftest hides those there are
    assert run_workers(body, 1) == [({"devices": [], "peers": [], "nccl": None}, False)]


def test_a_driver_that_ends_the_process_which_asks_is_no_answer():
    def body():
        torch.cuda.is_available = lambda: os.kill(os.getpid(), signal.SIGKILL)
        return torches.cuda_in_child()

    assert run_workers(body, 1) == [None]
