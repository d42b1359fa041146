from __future__ import annotations

import pytest

from samestep.tools.doctor import software
from tests.tools.doctor.fabricated import case_of, told

TORCH = {"version": "2.13.0", "cuda_build": None, "backends": ["gloo", "mpi"], "threads": 8}
REQUIREMENTS = [
    "torch>=2.6",
    'no-such-package>=1; extra == "remote"',
    "samestep[remote]; extra == 's3'",
    'pytest>=9 ; extra == "watch"',
]


@pytest.fixture
def extras(monkeypatch):
    """Let samestep's extras be others."""
    monkeypatch.setattr(software, "requires", lambda _: REQUIREMENTS)


def test_versions_backends_and_variables_are_told(tmp_path):
    environment = {
        "SAMESTEP_LANES": "8",
        "SAMESTEP_TOKEN": "0123456789abcdef",
        "SAMESTEP_INTERNAL_LAUNCHER_STATE": "3,4",
        "HOME": "/",
    }
    section = software.examine(case_of(tmp_path, torch=TORCH, environment=environment))
    assert section.facts["torch"] == "2.13.0"
    assert section.facts["torch_backends"] == ["gloo", "mpi"]
    assert section.facts["variables"] == {"SAMESTEP_LANES": "8", "SAMESTEP_TOKEN": "set"}
    assert "torch 2.13.0 has gloo, mpi" in told(section, "good")
    assert told(section, "change") == ""


def test_torch_that_does_not_start_is_told_with_the_reason(tmp_path):
    section = software.examine(
        case_of(tmp_path, failure="ModuleNotFoundError: No module named 'torch'")
    )
    assert "No module named 'torch'" in told(section, "change")
    assert "pip install torch" in told(section, "change")


def test_torch_without_gloo_is_found(tmp_path):
    assert "has no gloo" in told(
        software.examine(case_of(tmp_path, torch={**TORCH, "backends": []})), "change"
    )


def test_a_wrong_variable_is_found(tmp_path):
    section = software.examine(case_of(tmp_path, torch=TORCH, environment={"SAMESTEP_LANE": "8"}))
    assert "SAMESTEP_LANE is no option of samestep; did you mean lanes?" in told(section, "change")


def test_extras_that_are_missing_are_noted_and_those_of_an_extra_count(tmp_path, extras):
    section = software.examine(case_of(tmp_path, torch=TORCH))
    assert (
        section.facts["extras"]["s3"]
        == section.facts["extras"]["remote"]
        == "lacks no-such-package"
    )
    assert section.facts["extras"]["watch"] == "installed"
    assert 'pip install "samestep[remote,s3]"' in told(section, "note")


def test_an_extra_that_a_variable_needs_has_to_be_installed(tmp_path, extras):
    environment = {"SAMESTEP_DIR": "/runs/one", "SAMESTEP_REMOTE": "s3://bucket/one"}
    assert 'pip install "samestep[s3]"' in told(
        software.examine(case_of(tmp_path, torch=TORCH, environment=environment)), "change"
    )
