from __future__ import annotations

import json
import os

import pytest
import torch

from samestep.tools.doctor import probe
from samestep.tools.doctor.probe import check_measurements, describe_torch, measure
from tests.python import run_python
from tests.tools.doctor.fake_system import only_result


def test_torch_is_described_by_its_version_and_build():
    report = describe_torch()
    assert (report["version"], report["cuda_build"]) == (torch.__version__, torch.version.cuda)


def test_the_probe_imports_torch_and_counts_gpus():
    command = ["-m", "samestep.tools.doctor.probe", "--gpus"]
    report = json.loads(run_python(*command, check=True).stdout)
    assert report["gpus"] == 0  # conftest hides the GPUs of this machine
    assert report.keys() == {"import_seconds", "version", "cuda_build", "gpus"}


@pytest.mark.parametrize(
    ("report", "severity", "text"),
    [
        ({"import_seconds": 40.0}, "note", "importing torch took 40 s"),
        ({"import_seconds": 2.0}, "", ""),
    ],
)
def test_a_slow_import_is_only_a_note(tmp_path, report, severity, text):
    result = only_result(check_measurements, tmp_path, torch=report)
    assert result[0] == severity
    assert text in result[1]


def test_a_failing_import_of_torch_is_reported(tmp_path, monkeypatch):
    reason = "libwrong.so: cannot open shared object file"
    (tmp_path / "torch.py").write_text(f"raise ImportError({reason!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    report, failure = measure(gpus=False)
    assert report == {}
    assert failure.endswith(f"status 1: ImportError: {reason}")


def test_a_missing_python_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(probe.sys, "executable", str(tmp_path / "python"))
    assert "a process could not be started" in measure(gpus=False)[1]
