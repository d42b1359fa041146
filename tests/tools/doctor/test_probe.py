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
    times = {"import_seconds", "cpu_seconds", "queued_seconds"}
    assert report.keys() == {*times, "version", "cuda_build", "gpus"}
    assert all(isinstance(report[name], float) for name in times)


def imported(seconds, cpu, queued):
    return {"import_seconds": seconds, "cpu_seconds": cpu, "queued_seconds": queued}


@pytest.mark.parametrize(
    ("report", "severity", "text"),
    [
        (imported(40.0, None, None), "note", "slow file system, or other programs keep the c"),
        (imported(40.0, 2.0, 0.5), "note", "and 38 s for files. Python's packages are on a s"),
        (imported(40.0, 3.0, 36.0), "note", "36 s waiting for a core and 1 s for files. This "),
        (imported(40.0, 38.0, 1.0), "note", "38 s computing, 1 s waiting for a core and 1 s f"),
        (imported(40.0, 12.0, 9.0), "note", "and 19 s for files. This machine is busy or slow."),
        (imported(40.0, 3.0, 60.0), "note", "60 s waiting for a core and 0 s for files. This "),
        (imported(2.0, 1.0, 1.0), "", ""),
    ],
)
def test_a_slow_import_is_only_a_note_and_a_busy_machine_no_slow_disk(
    tmp_path, report, severity, text
):
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


def test_a_probe_that_takes_too_long_says_how_busy_the_machine_is(monkeypatch):
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(probe.os, "getloadavg", lambda: (12.4, 1.0, 1.0))
    assert "no result within 0 s, while programs wanted 12 of" in measure(gpus=False)[1]
