from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.models.__main__ import ROOT, main
from tests.models.jobs import JOBS

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def test_the_requirements_are_the_packages_of_all_jobs():
    named = re.findall(r"^\w+", REQUIREMENTS.read_text(), flags=re.MULTILINE)
    assert named == sorted({package for row in JOBS.values() for package in row.packages})


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["vit"])
    error = capsys.readouterr().err
    command = re.search("missing packages: transformers; .*`pip install -r ([^`]+)`", error)
    assert ROOT / command[1] == REQUIREMENTS


def test_an_unknown_job_is_an_error_and_all_names_are_listed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["vit", "lenet"])
    assert "no job has the name 'lenet'; --list prints the names" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(JOBS)
    assert len(JOBS) >= 20
