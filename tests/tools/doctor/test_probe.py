from __future__ import annotations

import json
from pathlib import Path

import torch

from samestep.tools.doctor.probe import describe_torch, measure_disk
from tests.python import run_python


def test_torch_is_described_by_its_version_and_build():
    report = describe_torch()
    assert (report["version"], report["cuda_build"]) == (torch.__version__, torch.version.cuda)


def test_a_quick_probe_only_imports_torch_and_counts_gpus(tmp_path):
    command = ["-m", "samestep.tools.doctor.probe", tmp_path, "--quick", "--gpus"]
    report = json.loads(run_python(*command, check=True).stdout)
    assert report["gpus"] == 0  # conftest hides the GPUs of this machine
    assert report.keys() == {"import_seconds", "version", "cuda_build", "gpus"}


def test_a_disk_is_measured_and_left_clean(tmp_path):
    assert measure_disk(tmp_path) > 0
    assert not list(tmp_path.iterdir())


def test_a_directory_that_takes_no_files_is_not_measured():
    assert measure_disk(Path("/proc/sys/kernel")) is None
