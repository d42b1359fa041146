from __future__ import annotations

from samestep.tools.doctor import memory
from samestep.tools.doctor.system import Space
from tests.tools.doctor.fabricated import GIGABYTE, case_of, told

DOCKERS = {"/dev/shm": Space(64 << 20, 64 << 20, None)}


def test_a_healthy_machine_has_nothing_to_change(tmp_path):
    section = memory.examine(case_of(tmp_path))
    assert section.facts["total_bytes"] == 64 * GIGABYTE
    assert section.facts["available_bytes"] == 60 * GIGABYTE
    assert section.facts["container_limit_bytes"] == "unlimited"
    assert section.facts["huge_pages"] == "madvise"
    assert told(section, "change") == told(section, "note") == ""


def test_the_shared_memory_of_a_container_is_too_small(tmp_path):
    section = memory.examine(case_of(tmp_path, spaces=DOCKERS))
    assert "/dev/shm holds 64 MiB" in told(section, "change")
    assert "docker run --shm-size=8g" in told(section, "change")


def test_that_of_a_pod_is_mended_by_a_volume(tmp_path):
    section = memory.examine(
        case_of(tmp_path, spaces=DOCKERS, environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    )
    assert '"medium: Memory"' in told(section, "change")
    assert "docker" not in told(section, "change")


def test_shared_memory_that_is_full_is_told_from_one_that_is_small(tmp_path):
    section = memory.examine(
        case_of(tmp_path, spaces={"/dev/shm": Space(8 * GIGABYTE, 1 << 20, None)})
    )
    assert "1 MiB left of 8 GiB" in told(section, "change")
    assert "ls -l /dev/shm" in told(section, "change")


def test_the_limit_of_a_container_bounds_what_is_available(tmp_path):
    files = {
        "sys/fs/cgroup/memory.max": str(4 * GIGABYTE),
        "sys/fs/cgroup/memory.stat": f"anon {GIGABYTE}\nfile 5\nshmem {GIGABYTE}\n",
    }
    section = memory.examine(case_of(tmp_path, files=files, workers=4))
    assert section.facts["available_bytes"] == 2 * GIGABYTE
    assert told(section, "change") == ""
    section = memory.examine(case_of(tmp_path, files=files, workers=5))
    assert "2 GiB of memory are left of the 4 GiB" in told(section, "change")


def test_the_limit_of_version_1_is_found_and_its_word_for_none_is_none(tmp_path):
    of_group = {
        "proc/self/cgroup": "4:memory:/job",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert (
        memory.examine(case_of(tmp_path / "a", files=of_group)).facts["container_limit_bytes"]
        == "unlimited"
    )
    of_group |= {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(GIGABYTE),
        "sys/fs/cgroup/memory/job/memory.stat": f"rss 0\ntotal_rss {GIGABYTE // 2}",
    }
    section = memory.examine(case_of(tmp_path / "b", files=of_group))
    assert section.facts["container_limit_bytes"] == GIGABYTE
    assert section.facts["available_bytes"] == GIGABYTE // 2


def test_memory_that_was_swapped_out_is_noted(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapTotal: 4194304 kB\nSwapFree: 1048576 kB\n"
    }
    assert "3 GiB are swapped out" in told(memory.examine(case_of(tmp_path, files=files)), "note")


def test_a_kernel_without_shared_files_is_told(tmp_path):
    section = memory.examine(case_of(tmp_path, lacking=["pidfd_open"]))
    assert "lacks pidfd_open" in told(section, "change")
    assert "hot copies" not in told(section, "change")
    assert "nor are there hot copies" in told(
        memory.examine(case_of(tmp_path, lacking=["memfd_create"])), "change"
    )
    assert "seccomp" in told(section, "change")
