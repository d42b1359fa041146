from __future__ import annotations

import os
import resource

from samestep.tools.doctor.system import System


def test_the_cores_of_this_machine_are_counted():
    assert 1 <= System().usable_cores() <= len(os.sched_getaffinity(0))


def test_the_loopback_interface_has_no_speed():
    loopback = System().interfaces()["lo"]
    assert loopback.isup
    assert loopback.speed == 0


def test_mounts_include_proc():
    assert ("/proc", "proc") in System().mounts()


def test_process_limits_are_numbers_or_none():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = None if hard == resource.RLIM_INFINITY else hard
    assert System().process_limits(resource.RLIMIT_NOFILE)[1] == expected
