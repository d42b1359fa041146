from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from samestep.handoff import LauncherState, open_launcher_state
from samestep.host import lacking_calls, unnamed_file, unnamed_memory
from tests.seccomp import refuse
from tests.workers import run_workers


@pytest.fixture(params=["as it is", "by a sandbox", "by the kernel"])
def system(request):
    """A system that has memory without a name, or refuses it; whether it has."""
    if request.param == "as it is":
        yield True
        return
    number = {"by a sandbox": errno.EPERM, "by the kernel": errno.ENOSYS}[request.param]
    with mock.patch.object(os, "memfd_create", side_effect=OSError(number, os.strerror(number))):
        yield False


def test_a_file_without_a_name_is_to_be_had_in_any_case(system):
    file = unnamed_file("samestep-test")
    try:
        assert os.pwrite(file, b"kept", 3) == 4
        assert os.pread(file, 9, 0) == b"\0\0\0kept"
        assert os.fstat(file).st_nlink == 0
        assert not os.get_inheritable(file)
        assert (
            str(Path(f"/proc/self/fd/{file}").readlink()).startswith("/memfd:samestep-test")
            == system
        )
    finally:
        os.close(file)


def test_a_launcher_keeps_how_far_its_run_is_in_any_case(system):
    with open_launcher_state(2) as kept:
        assert LauncherState.from_environment(kept.environment) == kept
        assert [len(pair) for pair in kept.slots] == ([2, 2] if system else [])
        assert (kept.step, kept.is_under_way) == (None, False)
        kept.report_start("runs/one", 7)
        kept.report_modules()
        assert (kept.step, kept.is_under_way, kept.directory) == (7, True, "runs/one")
        assert "torch" in kept.modules_reported


def test_what_is_missing_for_a_moment_is_not_taken_for_refused():
    with (
        mock.patch.object(
            os, "memfd_create", side_effect=OSError(errno.EMFILE, "Too many open files")
        ),
        pytest.raises(OSError, match="Too many open files"),
    ):
        unnamed_memory("samestep-test")


@pytest.mark.parametrize("refused", [[], ["memfd_create"], ["memfd_create", "pidfd_open"]], ids=str)
def test_calls_that_are_refused_are_found(refused):
    def body():
        if refused:
            refuse(*refused)
        return lacking_calls()

    assert run_workers(body, 1) == [refused]
