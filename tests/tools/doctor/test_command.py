"""The command on this very machine, as it is and with a limit really lowered."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from functools import partial

import pytest

from samestep.cli import main
from samestep.tools.doctor import command, show
from samestep.tools.doctor.section import Section, change, good, note
from tests.slurm import slurm

DOCTOR = [sys.executable, "-m", "samestep", "doctor", "--quick"]


def doctor(*arguments, **options):
    return subprocess.run(
        [*DOCTOR, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        **options,
    )


def findings(report, tone):
    return [
        finding["text"]
        for section in report["sections"]
        for finding in section["findings"]
        if finding["tone"] == tone
    ]


def lower_open_files(limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def test_this_machine_is_examined_and_a_lowered_limit_is_found(tmp_path):
    done = doctor(
        "--json", "--dir", tmp_path / "run", "-n", 1, preexec_fn=partial(lower_open_files, 256)
    )
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == 1
    assert not report["healthy"]
    assert any("may open 256 files" in text for text in findings(report, "change"))
    facts = {section["name"]: section["facts"] for section in report["sections"]}
    assert facts["limits"]["open_files"] == 256
    assert "gloo" in facts["software"]["torch_backends"]
    assert facts["processors"]["cores_allowed"] >= 1
    assert facts["memory"]["total_bytes"] > 1 << 28
    assert facts["directory"]["nearest_that_exists"] == str(tmp_path)
    measured = facts["measured"]
    for name in (
        "exchange of gradients, 25 MB",
        "all-to-all, 4 kB",
        "all-reduce by gloo, 25 MB",
        "file written and synced, 16.8 MB",
    ):
        assert (
            measured[name]["lowest_seconds"]
            <= measured[name]["median_seconds"]
            <= measured[name]["highest_seconds"]
        )
    assert not list(tmp_path.iterdir())


def test_a_task_of_a_real_slurm_job_knows_its_place(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("s")) as cluster:
        done = cluster.run("srun", "-n2", "-N2", sys.executable, "-c", IN_SLURM)
    assert sorted(done.stdout.split("\n"))[1:] == [
        "worker 0 of 2, started by slurm",
        "worker 1 of 2, started by slurm",
    ]


IN_SLURM = """
from pathlib import Path
from samestep.tools.doctor import launchers
from samestep.tools.doctor.case import Case
from samestep.tools.doctor.system import System
section = launchers.examine(Case(System(), Path(), 2))
assert section.findings[0].tone == "good", section
assert any("of Slurm" in finding.text for finding in section.findings), section
print(section.facts["this_process"].partition(";")[0])
"""


def test_the_command_itself_needs_no_torch():
    program = "import sys, samestep.tools.doctor.command; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture
def fast(monkeypatch):
    """Measure nothing."""
    monkeypatch.setattr(command.measured, "measure", lambda *_, **__: ({}, ""))
    return monkeypatch


@pytest.mark.parametrize(
    ("finding", "status"),
    [(good("fine"), 0), (note("slow", "do it"), 0), (change("broken", "mend it"), 1)],
)
def test_only_what_has_to_be_changed_is_a_failure(fast, capsys, finding, status):
    fast.setattr(command, "examine", lambda _: [Section("all", {}, [finding])])
    assert main(["doctor"]) == status
    assert finding.text in capsys.readouterr().out


def test_the_directory_of_the_environment_is_meant_where_none_is_given(fast, capsys, tmp_path):
    fast.setenv("SAMESTEP_DIR", str(tmp_path / "run"))
    main(["doctor", "--json"])
    sections = {
        section["name"]: section["facts"]
        for section in json.loads(capsys.readouterr().out)["sections"]
    }
    assert sections["directory"]["directory"] == str(tmp_path / "run")


def test_a_variable_with_any_bytes_is_printed(fast, capsys):
    fast.setattr(command, "examine", lambda _: [Section("all", {"SAMESTEP_DIR": "\udcff"}, [])])
    assert main(["doctor"]) == 0
    assert "\\udcff" in capsys.readouterr().out


def test_less_than_a_worker_is_refused(capsys):
    assert main(["doctor", "-n", "0"]) == 2
    assert "-n 0 was given; expected at least 1" in capsys.readouterr().err


def test_the_text_has_facts_with_units_and_what_is_urgent_first():
    figure = {
        "bytes": 25_000_000,
        "times": 3,
        "median_seconds": 0.05,
        "lowest_seconds": 0.04,
        "highest_seconds": 0.5,
    }
    gpus = [{"name": "G1", "memory_bytes": 1 << 30}, {"name": "G2", "memory_bytes": None}]
    facts = {
        "free_bytes": 3 << 29,
        "files": 3_000_000,
        "quota": 1.5,
        "speed": None,
        "locks": True,
        "gpus": gpus,
    }
    sections = [
        Section("found", facts, [good("fine"), change("broken", "mend it")]),
        Section("measured", {"all-reduce": figure, "variables": {}}, [note("slow", "hurry")]),
    ]
    assert show.as_text(sections) == EXPECTED.strip("\n")


EXPECTED = """
found
  free   1.5 GiB
  files  3000000
  quota  1.5
  speed  unknown
  locks  yes
  gpus   G1, memory 1 GiB
         G2, memory unknown

measured
  all-reduce  50 ms (40 to 500, 3 times), 0.5 GB/s
  variables   none

change  broken
        do: mend it
note    slow
        do: hurry
good    fine

1 thing to change
"""
