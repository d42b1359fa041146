from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from samestep.host import (
    available_bytes,
    cpu_quota,
    memory_left,
    memory_limit,
    read_file,
    usable_cores,
)
from tests.needs import needs

MEMINFO = {"proc/meminfo": "MemTotal:       100 kB\nMemAvailable:    40 kB\nHugePages_Total:   0\n"}
NO_LIMIT = "9223372036854771712"  # as version 1 writes it
USED = "anon 1000\nfile 9000\nshmem 500\n"
USED_1 = "cache 9000\nrss 7\nshmem 0\ntotal_cache 9000\ntotal_rss 1000\ntotal_shmem 500\n"
VERSION_1 = "9:name=systemd:/\n8:pids:/job/step\n4:memory:/job/step\n2:cpu,cpuacct:/job/step\n"


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("max 100000", 3)])
def test_usable_cores_are_those_that_a_container_grants(quota, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota}
    assert usable_cores(reader(tmp_path, files)) == cores


def reader(root, files):
    """Return what reads from a machine that has these files."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return lambda path: read_file(root / path.lstrip("/"))


def version_2(directory, limit, used=USED):
    """Return the files of a group of version 2."""
    return {
        f"sys/fs/cgroup/{directory}memory.max": limit,
        f"sys/fs/cgroup/{directory}memory.stat": used,
    }


def version_1(directory, limit, used=USED_1):
    """Return the files of a group of version 1."""
    return {
        f"sys/fs/cgroup/memory/{directory}memory.limit_in_bytes": limit,
        f"sys/fs/cgroup/memory/{directory}memory.stat": used,
    }


def member(groups, *files):
    """Return the files of a machine on which this process is in some groups."""
    return {
        "proc/self/cgroup": groups,
        **{name: content for group in files for name, content in group.items()},
    }


LIMITED = {
    "version 2, a container's own root": member("0::/", version_2("", "10000")),
    "version 2, nested": member(
        "0::/job/step", version_2("job/", "max"), version_2("job/step/", "10000")
    ),
    "version 2, of a group above": member(
        "0::/job/step", version_2("job/", "10000"), version_2("job/step/", "max", "anon 1\nshmem 1")
    ),
    "version 2, a path of the host's": member("0::/docker/c0ffee", version_2("", "10000")),
    "version 1": member(VERSION_1, version_1("", NO_LIMIT), version_1("job/step/", "10000")),
    "version 1, of a group above": member(
        VERSION_1, version_1("job/", "10000"), version_1("job/step/", NO_LIMIT, "total_rss 1")
    ),
    "version 1, a path of the host's": member(VERSION_1, version_1("", "10000")),
    "hybrid, by version 1": member(
        f"{VERSION_1}0::/", version_1("job/step/", "10000"), version_2("unified/", "max", "")
    ),
    "hybrid, by version 2": member("9:name=systemd:/\n0::/job", version_2("unified/job/", "10000")),
}


@pytest.mark.parametrize("files", LIMITED.values(), ids=LIMITED)
def test_the_limit_of_memory_is_found_and_what_is_left_of_it(files, tmp_path):
    read = reader(tmp_path, files)
    assert (memory_limit(read), memory_left(read)) == (10000, 8500)


@pytest.mark.parametrize(
    "files",
    [
        {},
        member("0::/"),
        member("0::/job", version_2("job/", "max")),
        member(VERSION_1, version_1("", NO_LIMIT)),
        member("", {}),
    ],
    ids=["no groups", "none of memory", "version 2", "version 1", "a system that hides them"],
)
def test_no_limit_is_none(files, tmp_path):
    read = reader(tmp_path, files)
    assert (memory_limit(read), memory_left(read), cpu_quota(read)) == (None, None, None)


def test_the_tightest_of_nested_groups_counts_and_nothing_is_left_of_what_was_exceeded(tmp_path):
    outer = {"sys/fs/cgroup/job/memory.max": "3000", "sys/fs/cgroup/job/memory.stat": "anon 4000"}
    read = reader(tmp_path, member("0::/job/step", outer, version_2("job/step/", "10000")))
    assert (memory_limit(read), memory_left(read)) == (3000, 0)


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        (MEMINFO, "max", 40 * 1024),
        (MEMINFO, "10000", 8500),
        (MEMINFO, "1000000", 40 * 1024),
        ({}, "10000", 8500),
        ({}, "max", None),
    ],
)
def test_the_tighter_of_host_and_container_is_available(meminfo, limit, expected, tmp_path):
    assert (
        available_bytes(reader(tmp_path, {**meminfo, **member("0::/", version_2("", limit))}))
        == expected
    )


@pytest.mark.parametrize(
    "files",
    [
        member(
            "0::/job",
            {"sys/fs/cgroup/job/cpu.max": "150000 100000"},
        ),
        member(
            VERSION_1,
            {},
            {
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            {
                "sys/fs/cgroup/cpu,cpuacct/job/step/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/job/step/cpu.cfs_period_us": "100000",
            },
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_processors_are_limited_likewise(files, tmp_path):
    read = reader(tmp_path, files)
    assert cpu_quota(read) == 1.5


def test_this_system_says_how_much_there_is():
    assert available_bytes() > 0


@pytest.fixture
def group():
    """An empty group of version 1 in the real kernel."""
    directory = Path(f"/sys/fs/cgroup/memory/samestep-test-{os.getpid()}")
    with suppress(OSError):
        directory.mkdir()
    needs("permission to make a memory control group of version 1", is_present=directory.exists())
    yield directory
    directory.rmdir()


def test_a_limit_that_the_kernel_holds_is_found(group, tmp_path):
    (tmp_path / "sys/fs").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").symlink_to("/sys/fs/cgroup")
    read = reader(tmp_path, {"proc/self/cgroup": f"4:memory:/{group.name}"})
    assert (memory_limit(read), memory_left(read)) == (None, None)
    (group / "memory.limit_in_bytes").write_text(str(1 << 26))
    assert (memory_limit(read), memory_left(read)) == (1 << 26, 1 << 26)
