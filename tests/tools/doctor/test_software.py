from __future__ import annotations

import pytest

from samestep.tools.doctor.software import check_gpus, check_torch
from tests.tools.doctor.fake_system import only_result

TWO_GPUS = {
    "nvidia-smi -L": "GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g\nGPU 1: NVIDIA H100 (UUID: GPU-2)",
    "nvidia-smi": "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4     |",
}


def test_torch_that_cannot_be_imported_is_a_problem(tmp_path):
    assert only_result(check_torch, tmp_path, torch={"version": "2.13.0"}) == ("", "")
    failure = "ModuleNotFoundError: No module named 'torch'"
    severity, text = only_result(check_torch, tmp_path, failure=failure)
    assert severity == "problem"
    assert failure in text
    assert "pip install torch" in text
    assert "again when other programs have ended" in text


def check_two_gpus(tmp_path, *, commands=TWO_GPUS, seen=2, build="12.4", **options):
    torch = {"cuda_build": build, "gpus": seen}
    return only_result(check_gpus, tmp_path, commands=commands, torch=torch, **options)


def test_gpus_that_torch_sees_need_nothing(tmp_path):
    assert check_two_gpus(tmp_path) == ("", "")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (None, "built for CPUs only"),
        ("13.0", "built for CUDA 13.0; the driver supports CUDA 12.4"),
        ("12.4", "torch.cuda.init()"),
    ],
)
def test_gpus_that_torch_cannot_use_are_a_problem(tmp_path, build, text):
    severity, result = check_two_gpus(tmp_path, seen=0, build=build)
    assert severity == "problem"
    assert text in result


def test_hidden_gpus_are_noted(tmp_path):
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    severity, text = check_two_gpus(tmp_path, seen=1, environment=environment, workers=1)
    assert severity == "note"
    assert "torch sees 1 of 2 GPUs: CUDA_VISIBLE_DEVICES=1" in text


def test_more_workers_than_gpus_are_noted(tmp_path):
    severity, text = check_two_gpus(tmp_path, workers=4)
    assert severity == "note"
    assert "samestep run -n 2 --lanes 4" in text


def test_a_machine_without_gpus_needs_none(tmp_path):
    assert only_result(check_gpus, tmp_path, torch={"gpus": None}, workers=4) == ("", "")
