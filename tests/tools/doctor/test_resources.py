from __future__ import annotations

import resource

import pytest

from samestep.tools.doctor.resources import examine_limits, examine_memory, examine_processors
from samestep.tools.doctor.system import UNLIMITED, Memory, Space
from tests.tools.doctor.fake_system import GIGABYTE, case_of, findings

DOCKER = {"/dev/shm": Space(64 << 20, 64 << 20, None)}


def test_affinity_is_reported_together_with_all_cores(tmp_path):
    section = examine_processors(case_of(tmp_path))
    assert section.facts["model"] == "Abacus 8000"
    names = ("cores", "cores_allowed", "cores_quota")
    assert [section.facts[name] for name in names] == [12, 8, "unlimited"]
    assert findings(section, "problem") == findings(section, "note") == ""
    assert "2 workers with 1 thread each fit on 8 cores" in findings(section, "good")


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/cpu.max": "150000 100000"},
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/cpu.max": "150000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        },
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n0::/",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    ],
    ids=["version 2", "version 2, of a parent group", "version 1, in a container"],
)
def test_a_container_quota_limits_the_workers(tmp_path, files):
    section = examine_processors(case_of(tmp_path, files=files))
    assert section.facts["cores_quota"] == 1.5
    assert "2 workers with 1 thread each exceed the 1.5 cores" in findings(section, "problem")
    assert "samestep run -n 1," in findings(section, "problem")
    assert "the time of 1.5 of the 8 cores" in findings(section, "note")
    alone = examine_processors(case_of(tmp_path, files=files, workers=1))
    assert findings(alone, "problem") == ""


def test_a_version_1_group_without_quota_is_unlimited(tmp_path):
    files = {
        "proc/self/cgroup": "1:cpu:/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    section = examine_processors(case_of(tmp_path, files=files))
    assert section.facts["cores_quota"] == "unlimited"


def test_threads_count_against_the_cores(tmp_path):
    four = {"SAMESTEP_THREADS": "4"}
    assert findings(examine_processors(case_of(tmp_path, environment=four)), "problem") == ""
    section = examine_processors(case_of(tmp_path, workers=3, environment=four))
    assert "3 workers with 4 threads each exceed the 8 cores" in findings(section, "problem")
    assert "samestep run -n 2," in findings(section, "problem")


def test_a_thread_count_that_workers_ignore_is_noted(tmp_path):
    section = examine_processors(case_of(tmp_path, environment={"OMP_NUM_THREADS": "8"}))
    assert "--threads 8" in findings(section, "note")
    section = examine_processors(case_of(tmp_path, environment={"OMP_NUM_THREADS": "1"}))
    assert findings(section, "note") == ""


def test_a_healthy_machine_has_no_problem(tmp_path):
    section = examine_memory(case_of(tmp_path))
    assert section.facts["total_bytes"] == 64 * GIGABYTE
    assert section.facts["available_bytes"] == 60 * GIGABYTE
    assert section.facts["container_limit_bytes"] == "unlimited"
    assert section.facts["huge_pages"] == "madvise"
    assert findings(section, "problem") == findings(section, "note") == ""


def test_shared_memory_of_a_container_is_too_small(tmp_path):
    section = examine_memory(case_of(tmp_path, spaces=DOCKER))
    assert "/dev/shm has a size of only 64 MiB" in findings(section, "problem")
    assert "docker run --shm-size=8g" in findings(section, "problem")


def test_shared_memory_of_a_pod_is_fixed_by_a_volume(tmp_path):
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    section = examine_memory(case_of(tmp_path, spaces=DOCKER, environment=environment))
    assert '"medium: Memory"' in findings(section, "problem")
    assert "docker" not in findings(section, "problem")


def test_full_shared_memory_is_not_reported_as_too_small(tmp_path):
    spaces = {"/dev/shm": Space(8 * GIGABYTE, 1 << 20, None)}
    section = examine_memory(case_of(tmp_path, spaces=spaces))
    assert "only 1 MiB free of 8 GiB" in findings(section, "problem")
    assert "ls -l /dev/shm" in findings(section, "problem")


def test_a_container_limit_reduces_the_available_memory(tmp_path):
    files = {
        "sys/fs/cgroup/memory.max": str(4 * GIGABYTE),
        "sys/fs/cgroup/memory.stat": f"anon {GIGABYTE}\nfile 5\nshmem {GIGABYTE}\n",
    }
    section = examine_memory(case_of(tmp_path, files=files, workers=4))
    assert section.facts["available_bytes"] == 2 * GIGABYTE
    assert findings(section, "problem") == ""
    section = examine_memory(case_of(tmp_path, files=files, workers=5))
    assert "2 GiB of memory is available (container limit: 4 GiB)" in findings(section, "problem")


def test_a_version_1_limit_is_found_and_its_largest_number_is_unlimited(tmp_path):
    files = {
        "proc/self/cgroup": "4:memory:/job",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    section = examine_memory(case_of(tmp_path / "a", files=files))
    assert section.facts["container_limit_bytes"] == "unlimited"
    files |= {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(GIGABYTE),
        "sys/fs/cgroup/memory/job/memory.stat": f"rss 0\ntotal_rss {GIGABYTE // 2}",
    }
    section = examine_memory(case_of(tmp_path / "b", files=files))
    assert section.facts["container_limit_bytes"] == GIGABYTE
    assert section.facts["available_bytes"] == GIGABYTE // 2


def test_swapped_memory_is_noted(tmp_path):
    memory = Memory(8 * GIGABYTE, swap=4 * GIGABYTE, swap_used=3 * GIGABYTE)
    section = examine_memory(case_of(tmp_path, memory=memory))
    assert "3 GiB is swapped out" in findings(section, "note")


def test_a_kernel_without_shared_files_is_a_problem(tmp_path):
    section = examine_memory(case_of(tmp_path, lacking=["pidfd_open"]))
    assert "pidfd_open cannot be used" in findings(section, "problem")
    assert "In-memory snapshots" not in findings(section, "problem")
    assert "seccomp" in findings(section, "problem")
    section = examine_memory(case_of(tmp_path, lacking=["memfd_create"]))
    assert "In-memory snapshots do not work" in findings(section, "problem")


def examine_files(tmp_path, soft, hard=4096, **others):
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    return examine_limits(case_of(tmp_path, limits=limits, **others))


def test_enough_files_are_good(tmp_path):
    section = examine_limits(case_of(tmp_path))
    assert section.facts["open_files"] == 65536
    assert findings(section, "problem") == ""
    assert "65536 open files are allowed" in findings(section, "good")


def test_a_run_raises_the_soft_limit_of_files_to_the_hard_one(tmp_path):
    assert "4096 open files are allowed" in findings(examine_files(tmp_path, 256), "good")
    unlimited = findings(examine_files(tmp_path, 256, UNLIMITED), "good")
    assert "65536 open files are allowed" in unlimited


def test_too_few_files_are_fixed_outside_the_shell(tmp_path):
    problem = findings(examine_files(tmp_path, 256, 256), "problem")
    assert "docker run --ulimit nofile=65536" in problem
    assert "limits.conf" in problem


def test_the_number_of_files_needed_grows_with_the_workers(tmp_path):
    assert findings(examine_files(tmp_path, 1024, 1024, workers=32), "problem") == ""
    problem = findings(examine_files(tmp_path, 1024, 1024, workers=64), "problem")
    assert "64 workers needs about 1536" in problem


def test_a_process_limit_of_a_container_is_a_problem(tmp_path):
    path = "sys/fs/cgroup/pids.max"
    section = examine_limits(case_of(tmp_path, files={path: "100"}))
    assert section.facts["container_processes"] == 100
    assert "--pids-limit" in findings(section, "problem")
    section = examine_limits(case_of(tmp_path, files={path: "max"}))
    assert findings(section, "problem") == ""


def test_locked_memory_matters_only_with_infiniband(tmp_path):
    limits = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    section = examine_limits(case_of(tmp_path, limits=limits))
    assert findings(section, "problem") == ""
    files = {"sys/class/infiniband/mlx5_0/fw_ver": "1"}
    section = examine_limits(case_of(tmp_path, limits=limits, files=files))
    assert "mlx5_0" in findings(section, "problem")
    assert "ulimit -l unlimited" in findings(section, "problem")
