from __future__ import annotations

import json

import torch

from samestep.tools.doctor.probe import describe_torch
from tests.python import run_python


def test_torch_is_described_by_its_version_and_build():
    report = describe_torch()
    assert (report["version"], report["cuda_build"]) == (torch.__version__, torch.version.cuda)


def test_a_quick_probe_only_imports_torch_and_counts_gpus():
    command = ["-m", "samestep.tools.doctor.probe", "--quick", "--gpus"]
    report = json.loads(run_python(*command, check=True).stdout)
    assert report["gpus"] == 0  # conftest hides the GPUs of this machine
    assert report.keys() == {"import_seconds", "version", "cuda_build", "gpus"}
