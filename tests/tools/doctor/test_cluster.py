from __future__ import annotations

import pytest

from samestep.tools.doctor.cluster import (
    examine_directory,
    examine_launchers,
    examine_links,
    nccl_interfaces,
)
from samestep.tools.doctor.system import Folder, Interface, Space
from tests.slurm import SECOND_OF_TWO_TASKS
from tests.tools.doctor.fake_system import (
    DIRECTORY,
    ETHERNET,
    GIGABYTE,
    LOOPBACK,
    case_of,
    findings,
)

ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
ONE_OF_TWO_HOSTS = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29500",
}
INFINIBAND = Interface("ib0", up=True, megabits=200_000, addresses=[])
WITH_INFINIBAND = [ETHERNET, INFINIBAND, LOOPBACK]


def test_a_process_without_a_launcher_is_reported(tmp_path):
    section = examine_launchers(case_of(tmp_path, commands={"srun": "", "sinfo": ""}))
    assert section.facts["commands"] == ["sinfo", "srun"]
    assert section.facts["this_process"] == "not started by a launcher"
    assert not section.findings


def test_a_worker_of_torchrun_is_reported_without_secrets(tmp_path):
    environment = {
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "RANK": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "8",
    }
    secret = {"PASSWORD": "secret", "SLURM_JOB_ID_TOKEN": "secret"}
    section = examine_launchers(case_of(tmp_path, environment={**environment, **secret}))
    process = "rank 3 of 8 workers, started by torchrun, rendezvous at n1:29500"
    assert section.facts["this_process"] == process
    assert section.facts["variables"] == environment


def test_leftover_variables_are_a_problem(tmp_path):
    section = examine_launchers(case_of(tmp_path, environment={"RANK": "0"}))
    assert "RANK=0" in findings(section, "problem")
    assert "WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in findings(section, "problem")


def test_a_task_of_slurm_is_reported(tmp_path):
    section = examine_launchers(
        case_of(tmp_path, environment=SECOND_OF_TWO_TASKS, commands={"srun": ""})
    )
    assert section.facts["this_process"].startswith("rank 1 of 2 workers, started by slurm")
    assert section.facts["variables"]["SLURM_JOB_ID"] == "7"
    assert "this is Slurm job 7" in findings(section, "good")


def test_a_batch_script_with_several_tasks_should_use_srun(tmp_path):
    environment = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    section = examine_launchers(case_of(tmp_path, environment=environment, commands={"srun": ""}))
    assert "Slurm job 7 with 4 tasks" in findings(section, "note")
    assert "srun python train.py" in findings(section, "note")


def test_a_job_without_srun_is_noted(tmp_path):
    environment = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}
    section = examine_launchers(case_of(tmp_path, environment=environment))
    assert "srun is not in PATH" in findings(section, "note")


def test_a_pod_reports_its_namespace_and_needs_no_token(tmp_path):
    files = {f"{ACCOUNT}/namespace": "lab\n", f"{ACCOUNT}/token": "secret"}
    section = examine_launchers(case_of(tmp_path, files=files, environment=POD))
    assert section.facts["pod"] == {"namespace": "lab", "service_account": True}
    assert "automountServiceAccountToken: false" in findings(section, "note")
    assert "secret" not in str(section)


def test_interfaces_are_reported_with_speed_and_addresses(tmp_path):
    section = examine_links(case_of(tmp_path))
    assert section.facts["interfaces"][0] == {
        "name": "eth0",
        "up": True,
        "megabits": 10_000,
        "addresses": ["10.0.0.5", "fe80::1"],
    }
    assert section.facts["gloo_uses"] == "eth0"
    assert section.facts["nccl_uses"] == ["eth0"]
    assert "reached through eth0 (10 Gbit/s)" in findings(section, "good")
    assert findings(section, "problem") == findings(section, "note") == ""


def test_a_faster_interface_is_a_problem_only_with_several_hosts(tmp_path):
    section = examine_links(case_of(tmp_path, interfaces=WITH_INFINIBAND))
    assert "GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in findings(section, "note")
    assert findings(section, "problem") == ""
    section = examine_links(
        case_of(tmp_path, interfaces=WITH_INFINIBAND, environment=ONE_OF_TWO_HOSTS)
    )
    expected = "eth0 (10 Gbit/s), but ib0 is faster (200 Gbit/s)"
    assert expected in findings(section, "problem")
    environment = {**ONE_OF_TWO_HOSTS, "GLOO_SOCKET_IFNAME": "ib0"}
    section = examine_links(case_of(tmp_path, interfaces=WITH_INFINIBAND, environment=environment))
    assert section.facts["gloo_uses"] == "ib0"
    assert findings(section, "problem") == ""


def test_interfaces_that_are_down_or_virtual_are_no_faster_path(tmp_path):
    interfaces = [
        Interface("docker0", up=True, megabits=100_000, addresses=[]),
        ETHERNET,
        Interface("ib0", up=False, megabits=200_000, addresses=[]),
    ]
    section = examine_links(case_of(tmp_path, interfaces=interfaces))
    assert section.facts["nccl_uses"] == ["eth0"]
    assert findings(section, "note") == ""


def test_a_variable_with_an_unknown_interface_is_a_problem(tmp_path):
    environment = {"GLOO_SOCKET_IFNAME": "eth0,eth7"}
    problem = findings(examine_links(case_of(tmp_path, environment=environment)), "problem")
    assert "GLOO_SOCKET_IFNAME names eth7, but this host has eth0, lo" in problem
    assert "export GLOO_SOCKET_IFNAME=eth0" in problem


def test_the_loopback_reaches_no_other_host(tmp_path):
    alone = {"GLOO_SOCKET_IFNAME": "lo"}
    section = examine_links(case_of(tmp_path, environment={**ONE_OF_TWO_HOSTS, **alone}))
    assert "unset GLOO_SOCKET_IFNAME" in findings(section, "problem")
    assert findings(examine_links(case_of(tmp_path, environment=alone)), "problem") == ""


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("=eth", []),
        ("^eth", ["ib0", "lo"]),
        ("^=eth0,lo", ["eth1", "ib0"]),
        ("", ["ib0"]),
    ],
)
def test_nccl_uses_what_its_variable_says(tmp_path, variable, expected):
    system = case_of(tmp_path, environment={"NCCL_SOCKET_IFNAME": variable}).system
    assert nccl_interfaces(system, ["eth0", "eth1", "ib0", "lo"]) == expected


def test_a_variable_that_leaves_nccl_no_interface_is_a_problem(tmp_path):
    section = examine_links(case_of(tmp_path, environment={"NCCL_SOCKET_IFNAME": "=eth"}))
    assert "NCCL_SOCKET_IFNAME==eth matches none of eth0, lo" in findings(section, "problem")


def test_a_local_disk_is_good(tmp_path):
    section = examine_directory(case_of(tmp_path))
    assert (section.facts["file_system"], section.facts["mounted_at"]) == ("xfs", "/runs")
    assert section.facts["free_bytes"] == 50 * GIGABYTE
    assert [finding.severity for finding in section.findings] == ["good"]


@pytest.mark.parametrize(
    ("kind", "environment", "severity", "text"),
    [
        ("tmpfs", {}, "problem", "is in memory (tmpfs)"),
        ("overlay", {}, "note", "docker run -v"),
        ("overlay", POD, "problem", "PersistentVolumeClaim"),
        ("nfs4", {}, "note", "on a network file system (nfs4)"),
        ("lustre", {}, "note", "on a network file system (lustre)"),
        ("ext4", ONE_OF_TWO_HOSTS, "note", "must share it"),
    ],
)
def test_the_kind_of_file_system_matters(tmp_path, kind, environment, severity, text):
    section = examine_directory(case_of(tmp_path, kind=kind, environment=environment))
    assert [finding.severity for finding in section.findings] == [severity]
    assert text in findings(section, severity)


def test_a_network_file_system_is_right_for_several_hosts(tmp_path):
    section = examine_directory(case_of(tmp_path, kind="nfs4", environment=ONE_OF_TWO_HOSTS))
    assert [finding.severity for finding in section.findings] == ["good"]


def test_a_disk_is_full_by_bytes_and_by_files(tmp_path):
    spaces = {str(DIRECTORY): Space(GIGABYTE, 1 << 20, 10)}
    problem = findings(examine_directory(case_of(tmp_path, spaces=spaces)), "problem")
    assert "has 1 MiB free" in problem
    assert "10 more files" in problem


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path):
    folder = Folder(DIRECTORY, writable=False, locks=None)
    section = examine_directory(case_of(tmp_path, folder=folder))
    assert "/runs/one cannot be written" in findings(section, "problem")


def test_a_directory_without_locks_is_noted(tmp_path):
    folder = Folder(DIRECTORY, writable=True, locks=False)
    section = examine_directory(case_of(tmp_path, folder=folder))
    assert "cannot be locked" in findings(section, "note")
