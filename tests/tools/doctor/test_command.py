"""The command on this machine, also with a limit that is really lowered."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from samestep.cli import main
from samestep.tools.doctor import command
from samestep.tools.doctor.system import Finding, note, problem
from tests.slurm import slurm

DOCTOR = [sys.executable, "-m", "samestep", "doctor"]


def test_this_machine_is_examined(tmp_path):
    done = subprocess.run(
        [*DOCTOR, "--json", "--dir", str(tmp_path / "run"), "-n", "4096"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == 1
    assert not report["healthy"]
    findings = [Finding(**finding) for finding in report["findings"]]
    (cores,) = [finding for finding in findings if "4096 workers with 1 thread" in finding.text]
    assert cores.severity == "problem"
    untested = [each.text for each in findings if "torch could not be tested" in each.text]
    assert all("no result within" in text for text in untested)  # the machine may be busy
    assert not list(tmp_path.iterdir())


def test_a_task_of_a_real_slurm_job_is_recognized(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("s")) as cluster:
        done = cluster.run("srun", "-n2", "-N2", sys.executable, "-c", IN_SLURM)
    assert done.stdout.splitlines() == ["True []", "True []"]


IN_SLURM = """
from pathlib import Path
from samestep.tools.doctor.cluster import check_launcher, has_several_hosts
from samestep.tools.doctor.system import Case, System
print(has_several_hosts(System()), list(check_launcher(Case(System(), Path(), 2))))
"""


@pytest.mark.parametrize("module", ["command", "probe"])
def test_torch_is_imported_only_to_be_measured(module):
    program = f"import sys, samestep.tools.doctor.{module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture
def fast(monkeypatch):
    """Skip all measurements."""
    monkeypatch.setattr(command, "measure", lambda *_, **__: ({}, ""))
    return monkeypatch


@pytest.mark.parametrize(
    ("finding", "status"),
    [(note("slow", "do it"), 0), (problem("broken", "fix it"), 1)],
)
def test_only_a_problem_is_a_failure(fast, capsys, finding, status):
    fast.setattr(command, "examine", lambda _: [finding])
    assert main(["doctor"]) == status
    assert finding.text in capsys.readouterr().out


def test_the_default_directory_is_that_of_the_environment(fast, tmp_path):
    cases = []
    fast.setattr(command, "examine", lambda case: cases.append(case) or [])
    fast.setenv("SAMESTEP_DIR", str(tmp_path / "run"))
    main(["doctor"])
    assert [case.directory for case in cases] == [tmp_path / "run"]


def test_a_variable_with_any_bytes_is_printed(fast, capsys):
    fast.setattr(command, "examine", lambda _: [note("SAMESTEP_DIR=\udcff", "unset it")])
    assert main(["doctor"]) == 0
    assert "\\udcff" in capsys.readouterr().out


def test_less_than_one_worker_is_refused(capsys):
    assert main(["doctor", "-n", "0"]) == 2
    assert "-n must be at least 1, got 0" in capsys.readouterr().err


def test_the_text_has_the_verdict_and_the_most_urgent_findings_first(fast):
    findings = [note("slow", "hurry"), problem("broken", "fix it")]
    fast.setattr(command, "CHECKS", [lambda _: findings])
    findings = command.examine(None)
    assert command.as_text(findings) == EXPECTED.strip("\n")
    assert command.as_text([]) == "no problems"


EXPECTED = """
1 problem to fix

problem  broken
         do: fix it
note     slow
         do: hurry
"""
