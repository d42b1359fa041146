from __future__ import annotations

import os
import resource
from pathlib import Path

from samestep.tools.doctor.system import UNLIMITED, Folder, System


def test_memory_and_cores_of_this_machine_are_read():
    memory, (cores, allowed) = System().memory(), System().cores()
    assert memory.total > 1 << 28
    assert 0 <= memory.swap_used <= memory.swap
    assert 1 <= allowed <= cores
    assert allowed == len(os.sched_getaffinity(0))


def test_the_loopback_interface_has_its_addresses_and_no_speed():
    (loopback,) = [each for each in System().interfaces() if each.name == "lo"]
    assert loopback.up
    assert loopback.megabits is None
    assert "127.0.0.1" in loopback.addresses
    assert not any("%" in address for each in System().interfaces() for address in each.addresses)


def test_mounts_include_proc():
    assert ("/proc", "proc") in System().mounts()


def test_process_limits_are_numbers_or_unlimited():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    assert System().process_limits(resource.RLIMIT_NOFILE)[1] == expected


def test_the_folder_of_a_new_run_is_tried_and_left_clean(tmp_path):
    assert System().folder(tmp_path / "runs" / "one") == Folder(tmp_path, writable=True, locks=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_files_is_not_writable():
    path = Path("/proc/sys/kernel")
    assert System().folder(path) == Folder(path, writable=False, locks=None)
