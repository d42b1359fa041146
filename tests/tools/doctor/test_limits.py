from __future__ import annotations

from samestep.tools.doctor import limits
from tests.tools.doctor.fabricated import LIMITS, case_of, told


def with_limits(
    tmp_path, *, files=65536, most_files=65536, locked="unlimited", workers=2, **others
):
    text = LIMITS.format(files=files, most_files=most_files, locked=locked)
    return limits.examine(
        case_of(tmp_path, workers=workers, files={"proc/self/limits": text, **others})
    )


def test_enough_files_are_good(tmp_path):
    section = with_limits(tmp_path)
    assert section.facts["open_files"] == 65536
    assert told(section, "change") == ""
    assert "65536 open files are allowed" in told(section, "good")


def test_too_few_files_are_mended_by_the_shell_where_that_may(tmp_path):
    section = with_limits(tmp_path, files=256, most_files=4096)
    assert "may open 256 files" in told(section, "change")
    assert told(section, "change").endswith("ulimit -n 4096")
    assert told(with_limits(tmp_path, files=256, most_files="unlimited"), "change").endswith(
        "ulimit -n 65536"
    )


def test_and_outside_of_it_where_it_may_not(tmp_path):
    section = with_limits(tmp_path, files=256, most_files=256)
    assert "docker run --ulimit nofile=65536" in told(section, "change")
    assert "limits.conf" in told(section, "change")


def test_what_is_enough_for_few_workers_is_too_little_for_many(tmp_path):
    assert told(with_limits(tmp_path, files=1024, workers=32), "change") == ""
    assert "64 workers needs about 1536" in told(
        with_limits(tmp_path, files=1024, workers=64), "change"
    )


def test_processes_of_a_container_are_limited(tmp_path):
    section = with_limits(tmp_path, **{"sys/fs/cgroup/pids.max": "100"})
    assert section.facts["processes_of_container"] == 100
    assert "--pids-limit" in told(section, "change")
    assert told(with_limits(tmp_path, **{"sys/fs/cgroup/pids.max": "max"}), "change") == ""


def test_locked_memory_matters_beside_infiniband_alone(tmp_path):
    assert told(with_limits(tmp_path, locked=65536), "change") == ""
    section = with_limits(tmp_path, locked=65536, **{"sys/class/infiniband/mlx5_0/fw_ver": "1"})
    assert "mlx5_0" in told(section, "change")
    assert "ulimit -l unlimited" in told(section, "change")
