"""The command on this machine, also with a limit that is really lowered."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from functools import partial

import pytest

from samestep.cli import main
from samestep.tools import doctor
from samestep.tools.doctor.system import Section, good, note, problem
from tests.slurm import slurm
from tests.tools.doctor.fake_system import case_of, findings

DOCTOR = [sys.executable, "-m", "samestep", "doctor", "--quick"]


def lower_open_files(limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def test_this_machine_is_examined_and_a_lowered_limit_is_found(tmp_path):
    command = [*DOCTOR, "--json", "--dir", str(tmp_path / "run"), "-n", "1"]
    lower = partial(lower_open_files, 256)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, preexec_fn=lower
    )
    report = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == 1
    assert not report["healthy"]
    sections = {section["name"]: section for section in report["sections"]}
    (found,) = [
        each for each in sections["limits"]["findings"] if "may open 256 files" in each["text"]
    ]
    assert found["severity"] == "problem"
    facts = {name: section["facts"] for name, section in sections.items()}
    assert facts["limits"]["open_files"] == 256
    assert "gloo" in facts["software"]["torch_backends"]
    assert facts["processors"]["cores_allowed"] >= 1
    assert facts["memory"]["total_bytes"] > 1 << 28
    assert facts["directory"]["nearest_existing"] == str(tmp_path)
    for name in (
        "exchange of gradients, 25 MB",
        "all-to-all, 4 kB",
        "all-reduce by gloo, 25 MB",
        "file written and synced, 16.8 MB",
    ):
        figure = facts["measured"][name]
        low, median, high = (figure[f"{key}_seconds"] for key in ("lowest", "median", "highest"))
        assert low <= median <= high
    assert not list(tmp_path.iterdir())


def test_a_task_of_a_real_slurm_job_is_recognized(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("s")) as cluster:
        done = cluster.run("srun", "-n2", "-N2", sys.executable, "-c", IN_SLURM)
    assert sorted(done.stdout.split("\n"))[1:] == [
        "rank 0 of 2 workers, started by slurm",
        "rank 1 of 2 workers, started by slurm",
    ]


IN_SLURM = """
from pathlib import Path
from samestep.tools.doctor.cluster import examine_launchers
from samestep.tools.doctor.system import Case, System
section = examine_launchers(Case(System(), Path(), 2))
assert section.findings[0].severity == "good", section
assert any("Slurm job" in finding.text for finding in section.findings), section
print(section.facts["this_process"].partition(", rendezvous")[0])
"""


@pytest.mark.parametrize("module", ["samestep.tools.doctor", "samestep.tools.doctor.probe"])
def test_torch_is_imported_only_to_be_measured(module):
    program = f"import sys, {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture
def fast(monkeypatch):
    """Skip all measurements."""
    monkeypatch.setattr(doctor, "measure", lambda *_, **__: ({}, ""))
    return monkeypatch


@pytest.mark.parametrize(
    ("finding", "status"),
    [(good("fine"), 0), (note("slow", "do it"), 0), (problem("broken", "fix it"), 1)],
)
def test_only_a_problem_is_a_failure(fast, capsys, finding, status):
    fast.setattr(doctor, "examine", lambda _: [Section("all", {}, [finding])])
    assert main(["doctor"]) == status
    assert finding.text in capsys.readouterr().out


def test_the_default_directory_is_that_of_the_environment(fast, capsys, tmp_path):
    fast.setenv("SAMESTEP_DIR", str(tmp_path / "run"))
    main(["doctor", "--json"])
    sections = json.loads(capsys.readouterr().out)["sections"]
    facts = {section["name"]: section["facts"] for section in sections}
    assert facts["directory"]["directory"] == str(tmp_path / "run")


def test_a_variable_with_any_bytes_is_printed(fast, capsys):
    fast.setattr(doctor, "examine", lambda _: [Section("all", {"SAMESTEP_DIR": "\udcff"}, [])])
    assert main(["doctor", "--verbose"]) == 0
    assert "\\udcff" in capsys.readouterr().out


def test_less_than_one_worker_is_refused(capsys):
    assert main(["doctor", "-n", "0"]) == 2
    assert "-n must be at least 1, got 0" in capsys.readouterr().err


def test_the_text_has_the_verdict_the_most_urgent_findings_and_facts_with_units():
    figure = {
        "bytes": 25_000_000,
        "times": 3,
        "median_seconds": 0.05,
        "lowest_seconds": 0.04,
        "highest_seconds": 0.5,
    }
    facts = {
        "free_bytes": 3 << 29,
        "files": 3_000_000,
        "quota": 1.5,
        "speed": None,
        "locks": True,
        "gpus": [{"name": "G1", "memory_bytes": 1 << 30}, {"name": "G2", "memory_bytes": None}],
    }
    sections = [
        Section("found", facts, [good("fine"), problem("broken", "fix it")]),
        Section("measured", {"all-reduce": figure, "variables": {}}, [note("slow", "hurry")]),
    ]
    expected = EXPECTED.strip("\n")
    assert doctor.as_text(sections, verbose=True) == expected
    findings, _, _ = expected.partition("found")
    assert doctor.as_text(sections, verbose=False) == f"{findings}facts: --verbose"


EXPECTED = """
1 problem to fix

problem  broken
         do: fix it
note     slow
         do: hurry
good     fine

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
"""


def row(name, *seconds, nbytes=0):
    return {"name": name, "seconds": seconds, "bytes": nbytes}


def examine_rows(tmp_path, *rows, **others):
    return doctor.examine_measurements(case_of(tmp_path, torch={"measured": rows, **others}))


def test_figures_are_medians_with_their_spread(tmp_path):
    exchange = row("all-to-all", 0.5, 0.25, 4.0, nbytes=25_000_000)
    section = examine_rows(tmp_path, exchange, row("import of torch", 1.5))
    assert section.facts == {
        "all-to-all, 25 MB": {
            "bytes": 25_000_000,
            "times": 3,
            "median_seconds": 0.5,
            "lowest_seconds": 0.25,
            "highest_seconds": 4.0,
        },
        "import of torch": {
            "bytes": None,
            "times": 1,
            "median_seconds": 1.5,
            "lowest_seconds": 1.5,
            "highest_seconds": 1.5,
        },
    }


@pytest.mark.parametrize(
    ("measurement", "text"),
    [
        (row(doctor.WRITE, 1.0, nbytes=50_000_000), "a snapshot of 1 GB takes 20 s"),
        (row(doctor.SYNC, 0.1, nbytes=4096), "syncing a small file takes 100 ms"),
        (row(doctor.IMPORT, 40.0), "importing torch took 40 s"),
    ],
)
def test_a_slow_figure_is_only_a_note(tmp_path, measurement, text):
    section = examine_rows(tmp_path, measurement)
    assert [finding.severity for finding in section.findings] == ["note"]
    assert text in findings(section, "note")


def test_a_fast_figure_is_good(tmp_path):
    section = examine_rows(
        tmp_path,
        row(doctor.WRITE, 1.0, nbytes=1 << 30),
        row(doctor.EXCHANGE, 9.0, nbytes=4000),
        row(doctor.EXCHANGE, 0.01, nbytes=25_000_000),
        row(doctor.ALL_REDUCE, 0.04, nbytes=25_000_000),
    )
    assert [finding.severity for finding in section.findings] == ["good", "good"]
    assert "1 GiB per second" in findings(section, "good")
    expected = "25 MB of gradients in 10.0 ms; gloo's all-reduce takes 40.0 ms"
    assert expected in findings(section, "good")


def test_workers_that_cannot_communicate_are_a_problem(tmp_path):
    section = examine_rows(tmp_path, workers_error="timed out waiting for rank 1")
    assert "timed out waiting for rank 1" in findings(section, "problem")


def test_a_failing_import_of_torch_is_reported(tmp_path, monkeypatch):
    reason = "libwrong.so: cannot open shared object file"
    (tmp_path / "torch.py").write_text(f"raise ImportError({reason!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report, failure = doctor.measure(tmp_path, quick=True, gpus=False)
    assert report == {}
    assert failure.endswith(f"status 1: ImportError: {reason}")


def test_a_missing_python_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    assert "a process could not be started" in doctor.measure(tmp_path, quick=True, gpus=False)[1]
