from __future__ import annotations

import resource

import pytest

from samestep.tools.doctor.resources import (
    check_locked_memory,
    check_memory,
    check_open_files,
    check_processes,
    check_processors,
    check_shared_memory,
)
from tests.tools.doctor.fake_system import GIGABYTE, Space, case_of, only_result, results

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


def test_a_thread_count_that_workers_ignore_is_noted(tmp_path):
    case = case_of(tmp_path, environment={"OMP_NUM_THREADS": "8"})
    ((severity, text),) = results(check_processors, case)
    assert severity == "note"
    assert "--threads 8" in text
    same = {"OMP_NUM_THREADS": "1"}
    assert only_result(check_processors, tmp_path, environment=same) == NONE


def test_a_container_limit_reduces_the_available_memory(tmp_path):
    assert only_result(check_memory, tmp_path) == NONE
    files = {
        "sys/fs/cgroup/memory.max": str(4 * GIGABYTE),
        "sys/fs/cgroup/memory.stat": f"anon {GIGABYTE}\nfile 5\nshmem {GIGABYTE}\n",
    }
    assert only_result(check_memory, tmp_path, files=files, workers=4) == NONE
    severity, text = only_result(check_memory, tmp_path, files=files, workers=5)
    assert severity == "problem"
    assert "2 GiB of memory is available (container limit: 4 GiB)" in text


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


def test_a_kernel_without_shared_files_is_a_problem(tmp_path):
    assert only_result(check_shared_memory, tmp_path) == NONE
    severity, text = only_result(check_shared_memory, tmp_path, lacking=["pidfd_open"])
    assert severity == "problem"
    assert "pidfd_open cannot be used" in text
    assert "In-memory snapshots" not in text
    assert "seccomp" in text
    _, text = only_result(check_shared_memory, tmp_path, lacking=["memfd_create"])
    assert "In-memory snapshots do not work" in text


@pytest.mark.parametrize(
    ("soft", "hard", "workers", "text"),
    [
        (65536, 65536, 2, ""),
        (256, 4096, 2, ""),  # a run raises the soft limit to the hard one
        (256, None, 2, ""),
        (None, None, 2, ""),
        (256, 256, 2, "docker run --ulimit nofile=65536"),
        (256, 256, 2, "limits.conf"),
        (1024, 1024, 32, ""),
        (1024, 1024, 64, "64 workers needs about 1536"),
    ],
)
def test_the_number_of_files_needed_grows_with_the_workers(tmp_path, soft, hard, workers, text):
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    result = only_result(check_open_files, tmp_path, limits=limits, workers=workers)
    assert result[0] == ("problem" if text else "")
    assert text in result[1]


def test_a_process_limit_of_a_container_is_a_problem(tmp_path):
    path = "sys/fs/cgroup/pids.max"
    severity, text = only_result(check_processes, tmp_path, files={path: "100"})
    assert severity == "problem"
    assert "--pids-limit" in text
    assert only_result(check_processes, tmp_path, files={path: "max"}) == NONE


def test_locked_memory_matters_only_with_infiniband(tmp_path):
    limits = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    assert only_result(check_locked_memory, tmp_path, limits=limits) == NONE
    files = {"sys/class/infiniband/mlx5_0/fw_ver": "1"}
    severity, text = only_result(check_locked_memory, tmp_path, limits=limits, files=files)
    assert severity == "problem"
    assert "mlx5_0" in text
    assert "ulimit -l unlimited" in text
    assert only_result(check_locked_memory, tmp_path, files=files) == NONE
