from __future__ import annotations

import pytest

from samestep.tools.doctor import cores
from tests.tools.doctor.fabricated import case_of, told


def test_affinity_is_told_beside_all_cores(tmp_path):
    section = cores.examine(case_of(tmp_path))
    assert section.facts["model"] == "Abacus 8000"
    assert (
        section.facts["cores"],
        section.facts["cores_allowed"],
        section.facts["cores_quota"],
    ) == (12, 8, "unlimited")
    assert told(section, "change") == told(section, "note") == ""
    assert "2 workers of 1 thread on 8 cores" in told(section, "good")


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
    ids=["version 2", "version 2, of a group above", "version 1, in a container"],
)
def test_a_quota_of_a_container_bounds_the_workers(tmp_path, files):
    section = cores.examine(case_of(tmp_path, files=files))
    assert section.facts["cores_quota"] == 1.5
    assert "2 workers of 1 thread on 1.5 cores" in told(section, "change")
    assert "samestep run -n 1," in told(section, "change")
    assert "the time of 1.5 of the 8 cores" in told(section, "note")
    alone = cores.examine(case_of(tmp_path, files=files, workers=1))
    assert told(alone, "change") == ""


def test_no_quota_of_version_1_is_none(tmp_path):
    files = {
        "proc/self/cgroup": "1:cpu:/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert cores.examine(case_of(tmp_path, files=files)).facts["cores_quota"] == "unlimited"


def test_threads_count_against_the_cores(tmp_path):
    assert (
        told(cores.examine(case_of(tmp_path, environment={"SAMESTEP_THREADS": "4"})), "change")
        == ""
    )
    section = cores.examine(case_of(tmp_path, workers=3, environment={"SAMESTEP_THREADS": "4"}))
    assert "3 workers of 4 threads on 8 cores" in told(section, "change")
    assert "samestep run -n 2," in told(section, "change")


def test_threads_that_workers_do_not_take_are_noted(tmp_path):
    assert "--threads 8" in told(
        cores.examine(case_of(tmp_path, environment={"OMP_NUM_THREADS": "8"})), "note"
    )
    assert (
        told(cores.examine(case_of(tmp_path, environment={"OMP_NUM_THREADS": "1"})), "note") == ""
    )
