from __future__ import annotations

import resource

import pytest

from samestep.tools.doctor.resources import (
    check_locked_memory,
    check_processors,
    check_shared_memory,
)
from tests.tools.doctor.fake_system import GIGABYTE, Space, only_result

NONE = ("", "")
DOCKER = {"/dev/shm": Space(64 << 20, 64 << 20)}


def test_workers_and_their_threads_count_against_the_cores(tmp_path):
    assert only_result(check_processors, tmp_path) == NONE
    four = {"SAMESTEP_THREADS": "4"}
    assert only_result(check_processors, tmp_path, environment=four) == NONE
    severity, text = only_result(check_processors, tmp_path, workers=3, environment=four)
    assert severity == "problem"
    assert "3 workers with 4 threads each exceed the 8 cores" in text
    assert "samestep run -n 2," in text


@pytest.mark.parametrize(
    ("space", "environment", "text", "fix"),
    [
        (DOCKER["/dev/shm"], {}, "only 64 MiB free of 64 MiB", "docker run --shm-size=8g"),
        (
            DOCKER["/dev/shm"],
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
            "only 64 MiB free of 64 MiB",
            '"medium: Memory"',
        ),
        (Space(8 * GIGABYTE, 1 << 20), {}, "only 1 MiB free of 8 GiB", "ls -l /dev/shm"),
    ],
    ids=["of a container", "of a pod", "full"],
)
def test_too_little_shared_memory_is_a_problem(tmp_path, space, environment, text, fix):
    options = {"spaces": {"/dev/shm": space}, "environment": environment}
    severity, result = only_result(check_shared_memory, tmp_path, **options)
    assert severity == "problem"
    assert text in result
    assert fix in result
    assert ("docker" in result) == ("docker" in fix)


def test_locked_memory_matters_only_with_infiniband(tmp_path):
    limits = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    assert only_result(check_locked_memory, tmp_path, limits=limits) == NONE
    files = {"sys/class/infiniband/mlx5_0/fw_ver": "1"}
    severity, text = only_result(check_locked_memory, tmp_path, limits=limits, files=files)
    assert severity == "problem"
    assert "mlx5_0" in text
    assert "ulimit -l unlimited" in text
    assert only_result(check_locked_memory, tmp_path, files=files) == NONE
