from __future__ import annotations

import pytest

from samestep.snapshot import room

MEMINFO = "MemTotal:       100 kB\nMemAvailable:    40 kB\nHugePages_Total:   0\n"
STAT = "anon 1000\nfile 9000\nshmem 500\n"


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [(MEMINFO, "max", 40 * 1024), (MEMINFO, "10000", 8500), (MEMINFO, "1000000", 40 * 1024), ("", "10000", 8500), ("", None, None)],
)
def test_the_tighter_of_host_and_container_counts(meminfo, limit, expected, tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text(meminfo)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.stat").write_text(STAT)
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "CGROUP", tmp_path)
    assert room.available_bytes() == expected


def test_this_system_says_how_much_there_is():
    assert room.available_bytes() > 0
