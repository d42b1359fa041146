"""Forked workers can use GPUs, whatever the launcher and its imports have asked the driver."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch

import samestep as ss
from samestep.config import merge
from samestep.launch import fork_server, local, worker
from tests.gpu.simulated import VISIBLE
from tests.workers import run_workers


def devices():
    with ss.init(timeout=60) as run:
        return str(run.device)


def launched(**options):
    return ss.launch(devices, workers=2, **options)


def launched_after_asking(nvml, **options):
    os.environ.update({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if nvml else {})
    torch.cuda.is_available()
    if nvml or options:
        return launched(**options)
    with pytest.raises(ss.errors.LaunchError, match=r"torch\.cuda\.is_available\(\)"):
        launched()
    return None


def launched_after_asking_without_gpus():
    os.environ[VISIBLE] = ""
    torch.cuda.is_available()
    in_fork = run_workers(torch.cuda._is_in_bad_fork, 1)[0]
    with pytest.raises(ss.errors.WorkerError, match="torch finds no GPU"):
        launched(device="cuda")
    return in_fork, launched()


@pytest.mark.long
def test_launcher_may_ask_the_driver_on_a_machine_without_gpus(gpus):
    assert gpus.call(launched_after_asking_without_gpus) == (True, "cpu")


def test_launcher_that_asked_the_driver_is_refused(gpus):
    assert gpus.call(launched_after_asking, nvml=False) is None
    assert gpus.call(launched_after_asking, nvml=True) == "cuda:0"
    assert gpus.call(launched_after_asking, nvml=False, device="cpu") == "cpu"


def automatic():
    """Return how many workers a launcher starts by itself, and whether its forks are usable."""
    torch.version.cuda = "12.8"
    os.environ[VISIBLE] = "0,2,3"
    counts = [local.worker_count("auto", None, options) for options in ({}, {"devices": 2})]
    return counts, run_workers(torch.cuda._is_in_bad_fork, 1)


def test_launcher_counts_devices_without_spoiling_its_forks(gpus):
    assert gpus.call(automatic) == ([3, 1], [False])


def answer_of_fork_server(folder, nvml):
    """Return what the fork server says after it imported a module that asks the driver."""
    sys.path.insert(0, str(folder))
    fork_server.NVML_CHECK = worker.NVML_CHECK if nvml else {}
    job = worker.Job(print, merge({}, {}), {}, None, None, os.getpid())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = worker.FORK.Process(target=fork_server._serve, args=(job, ["asks"], theirs))
    process.start()
    theirs.close()
    answer = ours.recv(100)
    process.kill()
    process.join()
    return answer


@pytest.mark.parametrize(("nvml", "answer"), [(False, b""), (True, fork_server.READY)])
def test_fork_server_is_not_used_if_an_import_spoils_its_forks(nvml, answer, gpus, tmp_path):
    (tmp_path / "asks.py").write_text("import torch\ntorch.cuda.is_available()\n")
    assert gpus.call(answer_of_fork_server, tmp_path, nvml) == answer


def nvml_setting():
    return os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")


def launched_settings():
    assert nvml_setting() is None
    return ss.launch(nvml_setting, workers=2)


@pytest.mark.long
def test_launched_workers_ask_nvml_whether_there_are_gpus(gpus):
    assert gpus.call(launched_settings) == "1"


def asked_of_the_driver():
    from tests.gpu.simulated.device import calls

    with ss.init(device="cpu", timeout=60) as run:
        model = run.replicate(torch.nn.Linear(2, 2))
        for batch in run.batches([torch.ones(2)] * 4, 2, steps=2):
            run.backward(lambda model, batch: model(batch).mean(), model, batch)
    return calls, torch.cuda.is_initialized()


def test_device_cpu_asks_the_driver_nothing(gpus):
    assert gpus.call(asked_of_the_driver) == ([], False)


def without_gpus():
    os.environ[VISIBLE] = ""
    with ss.init(timeout=60) as run:
        return str(run.device)


def test_machine_without_gpus_uses_the_cpu(gpus):
    assert gpus.call(without_gpus) == "cpu"
