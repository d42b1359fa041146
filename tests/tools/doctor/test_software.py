from __future__ import annotations

import pytest

from samestep.tools.doctor import software
from samestep.tools.doctor.software import GPU_QUERY, examine_gpus, examine_software
from tests.tools.doctor.fake_system import case_of, findings

TORCH = {"version": "2.13.0", "cuda_build": None, "backends": ["gloo", "mpi"], "threads": 8}
REQUIREMENTS = [
    "torch>=2.6",
    'no-such-package>=1; extra == "remote"',
    "samestep[remote]; extra == 's3'",
    'pytest>=9 ; extra == "watch"',
]
TWO_GPUS = {
    " ".join(GPU_QUERY): "0, Abacus G1, 81559, 4, 550.54\n1, Abacus G1, 81559, 60000, 550.54",
    "nvidia-smi": "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4     |",
    "nvidia-smi topo -m": "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\n\nLegend:\n",
}


@pytest.fixture
def extras(monkeypatch):
    """Replace the extras of samestep."""
    monkeypatch.setattr(software, "requires", lambda _: REQUIREMENTS)


def test_versions_backends_and_variables_are_reported(tmp_path):
    environment = {
        "SAMESTEP_LANES": "8",
        "SAMESTEP_TOKEN": "0123456789abcdef",
        "SAMESTEP_INTERNAL_LAUNCHER_STATE": "3,4",
        "HOME": "/",
    }
    section = examine_software(case_of(tmp_path, torch=TORCH, environment=environment))
    assert section.facts["torch"] == "2.13.0"
    assert section.facts["torch_backends"] == ["gloo", "mpi"]
    assert section.facts["variables"] == {"SAMESTEP_LANES": "8", "SAMESTEP_TOKEN": "set"}
    assert "torch 2.13.0 has gloo, mpi" in findings(section, "good")
    assert findings(section, "problem") == ""


def test_torch_that_cannot_be_imported_is_a_problem(tmp_path):
    failure = "ModuleNotFoundError: No module named 'torch'"
    problem = findings(examine_software(case_of(tmp_path, failure=failure)), "problem")
    assert failure in problem
    assert "pip install torch" in problem


def test_torch_without_gloo_is_a_problem(tmp_path):
    section = examine_software(case_of(tmp_path, torch={**TORCH, "backends": []}))
    assert "has no gloo" in findings(section, "problem")


def test_a_wrong_variable_is_a_problem(tmp_path):
    environment = {"SAMESTEP_LANE": "8"}
    section = examine_software(case_of(tmp_path, torch=TORCH, environment=environment))
    assert "samestep.init would fail: SAMESTEP_LANE" in findings(section, "problem")


def test_missing_extras_are_noted_and_include_those_of_their_extras(tmp_path, extras):
    section = examine_software(case_of(tmp_path, torch=TORCH))
    assert section.facts["extras"]["s3"] == "missing no-such-package"
    assert section.facts["extras"]["remote"] == "missing no-such-package"
    assert section.facts["extras"]["watch"] == "installed"
    assert 'pip install "samestep[remote,s3]"' in findings(section, "note")


def test_an_extra_that_a_variable_needs_must_be_installed(tmp_path, extras):
    environment = {"SAMESTEP_DIR": "/runs/one", "SAMESTEP_REMOTE": "s3://bucket/one"}
    section = examine_software(case_of(tmp_path, torch=TORCH, environment=environment))
    assert 'pip install "samestep[s3]"' in findings(section, "problem")


def seen_by_torch(count=2, *, peers=True, build="12.4"):
    devices = [{"name": "Abacus G1", "memory_bytes": 1}] * count
    access = [[peers or one == other for other in range(count)] for one in range(count)]
    return {
        "cuda_build": build,
        "cuda": {"devices": devices, "peers": access, "nccl": "2.21.5"},
    }


def test_gpus_are_reported_with_their_links(tmp_path):
    section = examine_gpus(case_of(tmp_path, commands=TWO_GPUS, torch=seen_by_torch()))
    assert section.facts["driver_cuda"] == "12.4"
    assert section.facts["links"] == {"GPU0-GPU1": "NV4"}
    assert section.facts["gpus"][1] == {
        "index": 1,
        "name": "Abacus G1",
        "memory_bytes": 81559 << 20,
        "used_bytes": 60000 << 20,
        "driver": "550.54",
    }
    assert findings(section, "problem") == ""
    assert "torch sees all 2 GPUs" in findings(section, "good")
    assert "can access each other's memory" in findings(section, "good")
    assert findings(section, "note").startswith("GPU 1 has 60000 MiB in use")


@pytest.mark.parametrize("found", [None, "a module"])
def test_gpus_whose_use_cannot_be_recorded_are_noted(tmp_path, monkeypatch, found):
    monkeypatch.setattr(software, "find_spec", lambda name: found)
    section = examine_gpus(case_of(tmp_path, commands=TWO_GPUS, torch=seen_by_torch()))
    assert ('pip install "samestep[gpu]"' in findings(section, "note")) is (found is None)


@pytest.mark.parametrize(
    ("torch", "text"),
    [
        (seen_by_torch(0, build=None), "built for CPUs only"),
        (seen_by_torch(0, build="13.0"), "the driver supports CUDA 12.4 at most"),
        (seen_by_torch(0), "torch finds none"),
    ],
)
def test_gpus_that_torch_cannot_use_are_a_problem(tmp_path, torch, text):
    section = examine_gpus(case_of(tmp_path, commands=TWO_GPUS, torch=torch))
    assert text in findings(section, "problem")


def test_hidden_gpus_are_noted(tmp_path):
    environment, torch = {"CUDA_VISIBLE_DEVICES": "1"}, seen_by_torch(1)
    case = case_of(tmp_path, commands=TWO_GPUS, torch=torch, environment=environment, workers=1)
    expected = "torch sees 1 of 2 GPUs, because CUDA_VISIBLE_DEVICES=1"
    assert expected in findings(examine_gpus(case), "note")


def test_gpus_without_peer_access_are_noted(tmp_path):
    torch = seen_by_torch(peers=False)
    section = examine_gpus(case_of(tmp_path, commands=TWO_GPUS, torch=torch))
    assert "GPUs 0-1 cannot access each other's memory" in findings(section, "note")


def test_more_workers_than_gpus_are_noted(tmp_path):
    case = case_of(tmp_path, commands=TWO_GPUS, torch=seen_by_torch(), workers=4)
    assert "samestep run -n 2 --lanes 4" in findings(examine_gpus(case), "note")


def test_a_gpu_without_nvidia_smi_is_noted(tmp_path):
    section = examine_gpus(case_of(tmp_path, files={"dev/nvidia0": ""}))
    assert "nvidia-smi does not respond" in findings(section, "note")


def test_a_machine_without_gpus_has_no_findings(tmp_path):
    section = examine_gpus(case_of(tmp_path))
    assert section.facts == {"gpus": []}
    assert not section.findings
