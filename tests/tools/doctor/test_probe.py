from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from samestep.tools import doctor
from samestep.tools.doctor.probe import LARGE_FILE, describe_torch, measure_disk, query_cuda
from tests.workers import run_workers


def test_torch_is_described_by_version_and_backends():
    report = describe_torch()
    assert report["version"] == torch.__version__
    assert "gloo" in report["backends"]
    assert report["threads"] == 1


def test_gpus_are_queried_in_a_child_process():
    def body():
        return query_cuda(), torch.cuda.is_initialized()

    # conftest hides the GPUs of this machine
    assert run_workers(body, 1) == [({"devices": [], "peers": [], "nccl": None}, False)]


def test_a_driver_that_crashes_the_child_process_gives_no_report():
    def body():
        torch.cuda.is_available = lambda: os.kill(os.getpid(), signal.SIGKILL)
        return query_cuda()

    assert run_workers(body, 1) == [None]


def test_a_disk_is_measured_and_left_clean(tmp_path):
    found = {name: (times, nbytes) for name, times, nbytes in measure_disk(tmp_path, quick=True)}
    assert found[doctor.WRITE][1] == found["file read, not cached"][1] == LARGE_FILE
    assert doctor.SYNC in found
    assert all(seconds > 0 for times, _ in found.values() for seconds in times)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_takes_no_files_is_not_measured():
    assert measure_disk(Path("/proc/sys/kernel"), quick=True) == []
