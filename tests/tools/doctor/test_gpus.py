from __future__ import annotations

import pytest

from samestep.tools.doctor import gpus
from tests.tools.doctor.fabricated import case_of, told

QUERY = " ".join(gpus.QUERY)
TWO = {
    QUERY: "0, Abacus G1, 81559, 4, 550.54.15\n1, Abacus G1, 81559, 60000, 550.54.15",
    "nvidia-smi": "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |",
    "nvidia-smi topo -m": "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\n\nLegend:\n",
}
SEES = [{"name": "Abacus G1", "memory_bytes": 1}, {"name": "Abacus G1", "memory_bytes": 1}]


def seen_by_torch(devices=2, *, peers=True, build="12.4"):
    access = [[peers or one == other for other in range(devices)] for one in range(devices)]
    return {
        "cuda_build": build,
        "cuda": {"devices": SEES[:devices], "peers": access, "nccl": "2.21.5"},
    }


def test_gpus_are_told_with_their_links(tmp_path):
    section = gpus.examine(case_of(tmp_path, commands=TWO, torch=seen_by_torch()))
    assert section.facts["driver_cuda"] == "12.4"
    assert section.facts["links"] == {"GPU0-GPU1": "NV4"}
    assert section.facts["gpus"][1] == {
        "index": 1,
        "name": "Abacus G1",
        "memory_bytes": 81559 << 20,
        "used_bytes": 60000 << 20,
        "driver": "550.54.15",
    }
    assert told(section, "change") == ""
    assert "torch sees all 2 GPUs" in told(section, "good")
    assert "reach each other's memory" in told(section, "good")
    assert told(section, "note").startswith("GPU 1 has 60000 MiB in use")


@pytest.mark.parametrize(
    ("torch", "says"),
    [
        (seen_by_torch(0, build=None), "built for CPUs alone"),
        (seen_by_torch(0, build="13.0"), "the driver runs CUDA 12.4 at most"),
        (seen_by_torch(0), "torch finds none"),
    ],
)
def test_gpus_that_torch_cannot_use_have_to_be_mended(tmp_path, torch, says):
    assert says in told(gpus.examine(case_of(tmp_path, commands=TWO, torch=torch)), "change")


def test_gpus_that_were_hidden_are_noted(tmp_path):
    hidden = case_of(
        tmp_path,
        commands=TWO,
        torch=seen_by_torch(1),
        environment={"CUDA_VISIBLE_DEVICES": "1"},
        workers=1,
    )
    assert "torch sees 1 of 2 GPUs, because CUDA_VISIBLE_DEVICES=1" in told(
        gpus.examine(hidden), "note"
    )


def test_gpus_without_a_way_to_each_other_are_noted(tmp_path):
    section = gpus.examine(case_of(tmp_path, commands=TWO, torch=seen_by_torch(peers=False)))
    assert "GPUs 0-1 do not reach each other's memory" in told(section, "note")


def test_more_workers_than_gpus_are_noted(tmp_path):
    section = gpus.examine(case_of(tmp_path, commands=TWO, torch=seen_by_torch(), workers=4))
    assert "samestep run -n 2 --lanes 4" in told(section, "note")


def test_a_gpu_without_its_command_is_noted(tmp_path):
    assert "nvidia-smi does not answer" in told(
        gpus.examine(case_of(tmp_path, files={"dev/nvidia0": ""})), "note"
    )


def test_a_machine_without_gpus_has_nothing_to_tell(tmp_path):
    section = gpus.examine(case_of(tmp_path))
    assert section.facts == {"gpus": []}
    assert not section.findings
