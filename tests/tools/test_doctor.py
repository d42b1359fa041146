"""`samestep doctor` on this machine, and its checks on machines that a test defines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.cli import main
from samestep.tools import doctor
from samestep.tools.doctor import (
    Case,
    Finding,
    System,
    as_text,
    check_directory,
    check_gpus,
    check_interfaces,
    check_launcher,
    check_locked_memory,
    check_processors,
    default_workers,
    examine,
    note,
    problem,
)
from tests.slurm import SECOND_OF_TWO_TASKS


class Interface(NamedTuple):
    """A network interface, as psutil describes it."""

    isup: bool
    speed: int


NONE = ("", "")
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
ONE_OF_TWO_HOSTS = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29500",
}
ETHERNET = Interface(isup=True, speed=10_000)
ONE_INTERFACE = {"eth0": ETHERNET, "lo": Interface(isup=True, speed=0)}
WITH_INFINIBAND = {**ONE_INTERFACE, "ib0": Interface(isup=True, speed=200_000)}
TWO_GPUS = {
    "nvidia-smi -L": "GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g\nGPU 1: NVIDIA H100 (UUID: GPU-2)",
    "nvidia-smi": "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4     |",
}


class FakeSystem(System):
    """A healthy machine with 8 cores, except for what is given."""

    def __init__(self, environment=(), commands=(), locked=None, interfaces=None, **others):
        super().__init__(dict(environment))
        self._commands, self._locked = dict(commands), locked
        self._interfaces = interfaces or ONE_INTERFACE
        self._devices, self._kind = others.get("devices", []), others.get("kind", "xfs")

    def run(self, *command):
        return self._commands.get(" ".join(command), "")

    def names(self, path):
        return self._devices

    def usable_cores(self):
        return 8

    def locked_memory(self):
        return self._locked

    def interfaces(self):
        return self._interfaces

    def interface_towards(self, host):
        return "lo" if host.startswith("127.") else "eth0"

    def mounts(self):
        return [("/", "ext4"), ("/runs", self._kind)]


def found(check, *, workers=2, gpus=None, build=None, **system):
    """Return the severity of a check's only finding, and its text with the fix, if any."""
    case = Case(FakeSystem(**system), Path("/runs/one"), workers, gpus, build)
    ((severity, text),) = [
        (finding.severity, f"{finding.text} {finding.fix}") for finding in check(case)
    ] or [NONE]
    return severity, text


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (None, "built for CPUs only"),
        ("13.0", "built for CUDA 13.0; the driver supports CUDA 12.4"),
        ("12.4", "torch.cuda.init()"),
    ],
)
def test_gpus_that_torch_cannot_use_are_a_problem(build, text):
    severity, result = found(check_gpus, commands=TWO_GPUS, gpus=0, build=build)
    assert severity == "problem"
    assert text in result


def test_hidden_gpus_are_noted_and_those_that_torch_sees_need_nothing():
    assert found(check_gpus, commands=TWO_GPUS, gpus=2, build="12.4") == NONE
    assert found(check_gpus) == NONE
    hidden = {"commands": TWO_GPUS, "environment": {"CUDA_VISIBLE_DEVICES": "1"}}
    severity, text = found(check_gpus, gpus=1, build="12.4", **hidden)
    assert severity == "note"
    assert "torch sees 1 of 2 GPUs: CUDA_VISIBLE_DEVICES=1" in text


def test_workers_and_their_threads_count_against_the_cores():
    four = {"SAMESTEP_THREADS": "4"}
    assert found(check_processors) == found(check_processors, environment=four) == NONE
    severity, text = found(check_processors, workers=3, environment=four)
    assert severity == "problem"
    assert "3 workers with 4 threads each exceed the 8 cores" in text
    assert "samestep run -n 2," in text


def test_locked_memory_matters_only_with_infiniband():
    assert found(check_locked_memory, locked=65536) == NONE
    assert found(check_locked_memory, devices=["mlx5_0"]) == NONE
    severity, text = found(check_locked_memory, locked=65536, devices=["mlx5_0"])
    assert severity == "problem"
    assert "mlx5_0" in text
    assert "ulimit -l unlimited" in text


def test_a_faster_interface_is_a_problem_only_with_several_hosts():
    assert found(check_interfaces) == NONE
    severity, text = found(check_interfaces, interfaces=WITH_INFINIBAND)
    assert severity == "note"
    assert "GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in text
    for environment in (SECOND_OF_TWO_TASKS, {"RANK": "0"}):  # on one host; incomplete
        given = {"interfaces": WITH_INFINIBAND, "environment": environment}
        assert found(check_interfaces, **given)[0] == "note"
    given = {"interfaces": WITH_INFINIBAND, "environment": ONE_OF_TWO_HOSTS}
    severity, text = found(check_interfaces, **given)
    assert severity == "problem"
    assert "eth0 (10 Gbit/s), but ib0 is faster (200 Gbit/s)" in text
    given["environment"] = {**ONE_OF_TWO_HOSTS, "GLOO_SOCKET_IFNAME": "ib0"}
    assert found(check_interfaces, **given) == NONE


def test_interfaces_that_are_down_or_virtual_are_no_faster_path():
    others = {"docker0": Interface(isup=True, speed=100_000), "ib0": Interface(False, 200_000)}
    assert found(check_interfaces, interfaces={**ONE_INTERFACE, **others}) == NONE


def test_the_loopback_reaches_no_other_host():
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    severity, text = found(check_interfaces, environment={**ONE_OF_TWO_HOSTS, **loopback})
    assert severity == "problem"
    assert "unset GLOO_SOCKET_IFNAME" in text
    assert found(check_interfaces, environment=loopback) == NONE


def test_a_batch_script_with_several_tasks_should_use_srun():
    script = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    severity, text = found(check_launcher, environment=script)
    assert severity == "note"
    assert "Slurm job 7 with 4 tasks" in text
    assert "srun python train.py" in text
    for environment in (SECOND_OF_TWO_TASKS, {**script, "SLURM_NTASKS": "1"}):
        assert found(check_launcher, environment=environment) == NONE


@pytest.mark.parametrize(
    ("kind", "environment", "severity", "text"),
    [
        ("xfs", {}, "", ""),
        ("tmpfs", {}, "problem", "is in memory (tmpfs)"),
        ("overlay", {}, "note", "docker run -v"),
        ("overlay", POD, "problem", "PersistentVolumeClaim"),
    ],
)
def test_the_kind_of_file_system_matters(kind, environment, severity, text):
    result = found(check_directory, kind=kind, environment=environment)
    assert result[0] == severity
    assert text in result[1]


WORDS = st.sampled_from(["max", "-1", "0", "9" * 30, "²", "0-", ":", "\0", "[", "1,2", ", "])
GARBAGE = st.lists(WORDS | st.text(max_size=5), max_size=8).map(" ".join)
TEXTS = st.lists(GARBAGE, max_size=4).map("\n".join) | st.sampled_from([*TWO_GPUS.values()])
NAMES = st.text(min_size=1, max_size=4) | st.just("eth0")
INTERFACES = st.dictionaries(NAMES, st.builds(Interface, st.booleans(), st.integers(0, 9)))
VARIABLES = [
    *("SAMESTEP_THREADS", "RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS"),
    *("KUBERNETES_SERVICE_HOST", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"),
]


class RandomSystem(System):
    """A machine with random content, which is the same for every query."""

    def __init__(self, draw):
        super().__init__(draw(st.dictionaries(st.sampled_from(VARIABLES), GARBAGE, max_size=4)))
        self._texts = draw(st.lists(TEXTS, min_size=1, max_size=8))
        self._names = draw(st.lists(NAMES, max_size=3))
        self._locked = draw(st.none() | st.integers(0, 9))
        self._interfaces = draw(INTERFACES)
        self._towards = draw(st.none() | st.just("eth0"))
        self._mounts = draw(st.lists(st.tuples(st.just("/") | GARBAGE, GARBAGE), max_size=3))

    def names(self, path):
        return self._names

    def run(self, *command):
        return self._texts[crc32(" ".join(command).encode()) % len(self._texts)]

    def locked_memory(self):
        return self._locked

    def interfaces(self):
        return self._interfaces

    def interface_towards(self, host):
        return self._towards

    def mounts(self):
        return self._mounts


@given(st.data())
def test_any_machine_is_examined(data):
    system, gpus = RandomSystem(data.draw), data.draw(st.none() | st.integers(0, 3))
    findings = examine(Case(system, Path("/runs/one"), default_workers(system), gpus))
    assert as_text(findings)
    json.dumps([asdict(finding) for finding in findings])


def test_this_machine_is_examined_without_torch(tmp_path):
    program = (
        "import sys; from samestep.cli import main; "
        f"arguments = '--json', '-n', '4096', '--dir', {str(tmp_path / 'run')!r}; "
        "assert main(['doctor', *arguments]) == 1; "
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PATH": str(tmp_path)}  # without nvidia-smi
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    report = json.loads(done.stdout)
    assert not report["healthy"]
    findings = [Finding(**finding) for finding in report["findings"]]
    (cores,) = [finding for finding in findings if "4096 workers with 1 thread" in finding.text]
    assert cores.severity == "problem"
    assert not list(tmp_path.iterdir())


def test_this_machine_has_a_loopback_and_mounts():
    system = System()
    loopback = system.interfaces()["lo"]
    assert (loopback.isup, loopback.speed) == (True, 0)
    assert ("/proc", "proc") in system.mounts()
    assert 1 <= system.usable_cores() <= len(os.sched_getaffinity(0))
    assert system.locked_memory() is None or system.locked_memory() >= 0


def test_gpus_are_counted_by_the_driver_and_by_torch(monkeypatch, capsys):
    monkeypatch.setattr(System, "run", lambda _, *command: TWO_GPUS[" ".join(command)])
    monkeypatch.setattr(doctor, "count_gpus", lambda: 0)
    assert main(["doctor"]) == 1
    assert "torch sees 0 of 2 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("finding", "status"), [(note("slow", "do it"), 0), (problem("broken", "fix it"), 1)]
)
def test_only_a_problem_is_a_failure(monkeypatch, capsys, finding, status):
    monkeypatch.setattr(doctor, "examine", lambda _: [finding])
    assert main(["doctor"]) == status
    assert finding.text in capsys.readouterr().out


def test_the_default_directory_is_that_of_the_environment(monkeypatch, tmp_path):
    cases = []
    monkeypatch.setattr(doctor, "examine", lambda case: cases.append(case) or [])
    monkeypatch.setenv("SAMESTEP_DIR", str(tmp_path / "run"))
    main(["doctor"])
    assert [case.directory for case in cases] == [tmp_path / "run"]


def test_a_variable_with_any_bytes_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda _: [note("SAMESTEP_DIR=\udcff", "unset it")])
    assert main(["doctor"]) == 0
    assert "\\udcff" in capsys.readouterr().out


def test_less_than_one_worker_is_refused(capsys):
    assert main(["doctor", "-n", "0"]) == 2
    assert "-n must be at least 1, got 0" in capsys.readouterr().err


def test_the_text_has_the_verdict_and_the_most_urgent_findings_first(monkeypatch):
    findings = [note("slow", "hurry"), problem("broken", "fix it")]
    monkeypatch.setattr(doctor, "CHECKS", [lambda _: findings])
    assert as_text(examine(None)) == EXPECTED.strip("\n")
    assert as_text([]) == "no problems"


EXPECTED = """
1 problem to fix

problem  broken
         do: fix it
note     slow
         do: hurry
"""
