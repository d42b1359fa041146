from __future__ import annotations

import pytest

from samestep.tools.doctor import software
from samestep.tools.doctor.software import (
    GPU_QUERY,
    check_gpus,
    check_torch,
    check_variables,
)
from tests.tools.doctor.fake_system import case_of, only_result, results

TWO_GPUS = {
    " ".join(GPU_QUERY): "0, 81559, 4\n1, 81559, 4",
    "nvidia-smi": "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4     |",
}


def test_torch_that_cannot_be_imported_is_a_problem(tmp_path):
    assert only_result(check_torch, tmp_path, torch={"version": "2.13.0"}) == ("", "")
    failure = "ModuleNotFoundError: No module named 'torch'"
    severity, text = only_result(check_torch, tmp_path, failure=failure)
    assert severity == "problem"
    assert failure in text
    assert "pip install torch" in text


@pytest.mark.parametrize(
    ("variable", "value", "texts"),
    [
        ("SAMESTEP_LANE", "8", ["samestep.init would fail: SAMESTEP_LANE"]),
        ("RANK", "0", ["samestep.init would fail", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"]),
        ("SAMESTEP_LANES", "8", []),
    ],
)
def test_wrong_or_incomplete_variables_are_a_problem(tmp_path, variable, value, texts):
    severity, text = only_result(check_variables, tmp_path, environment={variable: value})
    assert severity == ("problem" if texts else "")
    assert all(expected in text for expected in texts)


@pytest.fixture
def nvml(monkeypatch):
    """Provide the library that records the use of GPUs."""
    monkeypatch.setattr(software, "find_spec", lambda name: "a module")


def check_two_gpus(tmp_path, *, commands=TWO_GPUS, seen=2, build="12.4", **options):
    torch = {"cuda_build": build, "gpus": seen}
    return only_result(check_gpus, tmp_path, commands=commands, torch=torch, **options)


def test_gpus_that_torch_sees_need_nothing(tmp_path, nvml):
    assert check_two_gpus(tmp_path) == ("", "")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (None, "built for CPUs only"),
        ("13.0", "the driver supports CUDA 12.4 at most"),
        ("12.4", "torch finds none"),
    ],
)
def test_gpus_that_torch_cannot_use_are_a_problem(tmp_path, nvml, build, text):
    severity, result = check_two_gpus(tmp_path, seen=0, build=build)
    assert severity == "problem"
    assert text in result


def test_hidden_gpus_are_noted(tmp_path, nvml):
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    severity, text = check_two_gpus(tmp_path, seen=1, environment=environment, workers=1)
    assert severity == "note"
    assert "torch sees 1 of 2 GPUs, because CUDA_VISIBLE_DEVICES=1" in text


def test_more_workers_than_gpus_and_gpus_in_use_are_noted(tmp_path, nvml):
    commands = {" ".join(GPU_QUERY): "0, 81559, 4\n1, 81559, 60000"}
    case = case_of(tmp_path, commands=commands, torch={"gpus": 2}, workers=4)
    sharing, used = results(check_gpus, case)
    assert sharing[0] == used[0] == "note"
    assert "samestep run -n 2 --lanes 4" in sharing[1]
    assert used[1].startswith("GPU 1 has 60000 MiB in use")


def test_gpus_whose_use_cannot_be_recorded_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(software, "find_spec", lambda name: None)
    severity, text = check_two_gpus(tmp_path, seen=None)
    assert severity == "note"
    assert 'pip install "samestep[gpu]"' in text


def test_a_gpu_without_nvidia_smi_is_noted(tmp_path):
    assert only_result(check_gpus, tmp_path) == ("", "")
    severity, text = only_result(check_gpus, tmp_path, files={"dev/nvidia0": ""})
    assert severity == "note"
    assert "nvidia-smi does not respond" in text
