from __future__ import annotations

import pytest

from samestep.tools.doctor.cluster import (
    check_directory,
    check_interfaces,
    check_launcher,
    has_several_hosts,
)
from samestep.tools.doctor.system import System
from tests.slurm import SECOND_OF_TWO_TASKS
from tests.tools.doctor.fake_system import (
    ETHERNET,
    LOOPBACK,
    Interface,
    only_result,
)

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
INFINIBAND = Interface(isup=True, speed=200_000)
WITH_INFINIBAND = {"eth0": ETHERNET, "ib0": INFINIBAND, "lo": LOOPBACK}


def test_several_hosts_are_recognized_by_the_variables_of_launchers():
    assert has_several_hosts(System(ONE_OF_TWO_HOSTS))
    assert not has_several_hosts(System(SECOND_OF_TWO_TASKS))  # both on one host
    assert not has_several_hosts(System({}))
    assert not has_several_hosts(System({"RANK": "0"}))  # incomplete


def test_a_batch_script_with_several_tasks_should_use_srun(tmp_path):
    script = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    severity, text = only_result(check_launcher, tmp_path, environment=script)
    assert severity == "note"
    assert "Slurm job 7 with 4 tasks" in text
    assert "srun python train.py" in text
    assert only_result(check_launcher, tmp_path, environment=SECOND_OF_TWO_TASKS) == NONE
    alone = {**script, "SLURM_NTASKS": "1"}
    assert only_result(check_launcher, tmp_path, environment=alone) == NONE


def test_a_faster_interface_is_a_problem_only_with_several_hosts(tmp_path):
    assert only_result(check_interfaces, tmp_path) == NONE
    severity, text = only_result(check_interfaces, tmp_path, interfaces=WITH_INFINIBAND)
    assert severity == "note"
    assert "GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in text
    severity, text = only_result(
        check_interfaces, tmp_path, interfaces=WITH_INFINIBAND, environment=ONE_OF_TWO_HOSTS
    )
    assert severity == "problem"
    assert "eth0 (10 Gbit/s), but ib0 is faster (200 Gbit/s)" in text
    environment = {**ONE_OF_TWO_HOSTS, "GLOO_SOCKET_IFNAME": "ib0"}
    selected = {"interfaces": WITH_INFINIBAND, "environment": environment}
    assert only_result(check_interfaces, tmp_path, **selected) == NONE


def test_interfaces_that_are_down_or_virtual_are_no_faster_path(tmp_path):
    interfaces = {
        "docker0": Interface(isup=True, speed=100_000),
        "eth0": ETHERNET,
        "ib0": Interface(isup=False, speed=200_000),
    }
    assert only_result(check_interfaces, tmp_path, interfaces=interfaces) == NONE


def test_the_loopback_reaches_no_other_host(tmp_path):
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    environment = {**ONE_OF_TWO_HOSTS, **loopback}
    severity, text = only_result(check_interfaces, tmp_path, environment=environment)
    assert severity == "problem"
    assert "unset GLOO_SOCKET_IFNAME" in text
    assert only_result(check_interfaces, tmp_path, environment=loopback) == NONE


@pytest.mark.parametrize(
    ("kind", "environment", "severity", "text"),
    [
        ("xfs", {}, "", ""),
        ("tmpfs", {}, "problem", "is in memory (tmpfs)"),
        ("overlay", {}, "note", "docker run -v"),
        ("overlay", POD, "problem", "PersistentVolumeClaim"),
    ],
)
def test_the_kind_of_file_system_matters(tmp_path, kind, environment, severity, text):
    result = only_result(check_directory, tmp_path, kind=kind, environment=environment)
    assert result[0] == severity
    assert text in result[1]
