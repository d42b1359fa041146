from __future__ import annotations

import ast
import errno
import gc
import os
import resource
import signal
import stat
import sys
from pathlib import Path
from unittest import mock

import pytest

from samestep import host
from samestep.errors import ConfigError
from samestep.handoff import LauncherState, open_launcher_state
from samestep.host import (
    anonymous_file,
    anonymous_memory,
    interrupts_deferred,
    missing_system_calls,
    parse,
    raise_file_limit,
)
from tests.seccomp import refuse
from tests.workers import run_workers


def test_a_clock_stands_still_while_the_process_does_not_run(monkeypatch):
    now = 100.0
    monkeypatch.setattr(host.time, "monotonic", lambda: now)
    clock = host.RunningClock()
    for seconds, expected in [(1.0, 101.0), (2.0, 103.0), (3600.0, 103.0), (0.5, 103.5)]:
        now += seconds
        assert clock.now() == expected
    assert clock.resumed_at == 3703.0


def test_an_interrupt_is_raised_at_the_end_of_a_block(monkeypatch):
    now = 100.0
    monkeypatch.setattr(host.time, "monotonic", lambda: now)
    reached = []

    def interrupted_twice(after_seconds):
        nonlocal now
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            now += after_seconds
            reached.append("the second")
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(0.9)  # an echo
    assert reached == ["the second", "the end"]
    with pytest.raises(KeyboardInterrupt):
        interrupted_twice(1.1)
    assert reached == ["the second", "the end", "the second"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_is_not_deferred():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_deferred():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["as it is", "by a sandbox", "by the kernel"])
def system(request):
    """Whether this system has anonymous memory; some simulated ones refuse it."""
    if request.param == "as it is":
        yield True
        return
    number = {"by a sandbox": errno.EPERM, "by the kernel": errno.ENOSYS}[request.param]
    with mock.patch.object(os, "memfd_create", side_effect=OSError(number, os.strerror(number))):
        yield False


def test_an_anonymous_file_is_always_available(system):
    file = anonymous_file("samestep-test")
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


def test_launcher_state_always_has_the_progress(system):
    with open_launcher_state(2) as state:
        assert LauncherState.from_environment(state.environment) == state
        assert [len(pair) for pair in state.slots] == ([2, 2] if system else [])
        assert (state.step, state.is_under_way) == (None, False)
        state.report_start("runs/one", 7)
        state.report_modules()
        assert (state.step, state.is_under_way, state.directory) == (7, True, "runs/one")
        assert "torch" in state.modules_reported


def test_modules_are_recorded_while_a_finalizer_imports_one():
    class Importing:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            sys.modules[f"imported by {id(self)}"] = sys

    before, threshold = set(sys.modules), gc.get_threshold()
    with open_launcher_state(2) as state:
        pairs = [(number, state) for number in range(5000)]  # Python has no free tuples left
        try:
            Importing()
            gc.set_threshold(gc.get_count()[0] + 100)  # so that it is collected meanwhile
            state.report_modules()
        finally:
            gc.set_threshold(*threshold)
            gc.collect()
            for name in sys.modules.keys() - before:
                del sys.modules[name]
        assert "torch" in state.modules_reported
    assert len(pairs) == 5000


def test_a_temporary_error_is_raised():
    with (
        mock.patch.object(
            os, "memfd_create", side_effect=OSError(errno.EMFILE, "Too many open files")
        ),
        pytest.raises(OSError, match="Too many open files"),
    ):
        anonymous_memory("samestep-test")


@pytest.mark.parametrize("refused", [[], ["memfd_create"], ["memfd_create", "pidfd_open"]], ids=str)
def test_refused_system_calls_are_found(refused):
    def body():
        if refused:
            refuse(*refused)
        return missing_system_calls()

    assert run_workers(body, 1) == [refused]


@pytest.mark.parametrize(
    ("owner", "mode", "fault"),
    [
        ("own", 0o600, None),
        ("own", 0o400, None),
        ("own", 0o640, "must be readable only by you; run chmod 600"),
        ("own", 0o604, "must be readable only by you"),
        ("root", 0o440, None),  # a Secret that Kubernetes mounts with an fsGroup
        ("root", 0o644, "must be readable only by you"),
        ("root", 0o660, "must be readable only by you"),
        ("other", 0o600, r"belongs to another user \(4321\)"),
    ],
)
def test_a_secret_is_read_only_from_a_private_file(tmp_path, monkeypatch, owner, mode, fault):
    file = tmp_path / "token"
    file.write_text("a secret\n")
    user = {"own": 1234, "root": 0, "other": 4321}[owner]

    def fstat(number, fstat=os.fstat):
        fields = list(fstat(number))[:10]
        fields[0], fields[4] = stat.S_IFREG | mode, user
        return os.stat_result(fields)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        patch.setattr(os, "geteuid", lambda: 1234)
        if fault is None:
            assert host.read_secret(file, "the file") == "a secret"
            return
        with pytest.raises(ConfigError, match=f"the file {fault}"):
            host.read_secret(file, "the file")


def test_a_secret_may_come_from_a_pipe():
    reading, writing = os.pipe()
    os.write(writing, b"a secret\n")
    os.close(writing)
    assert host.read_secret(Path(f"/dev/fd/{reading}"), "the pipe") == "a secret"
    os.close(reading)


def test_the_soft_limit_of_files_is_raised_and_never_lowered():
    def body(limits):
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        raise_file_limit()
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    assert run_workers(body, 1, (256, 4096)) == [(4096, 4096)]
    assert run_workers(body, 1, (4096, 4096)) == [(4096, 4096)]


def test_a_launcher_keeps_files_of_several_runs_open_by_name(tmp_path):
    with open_launcher_state(1) as state:
        ends = {}
        for name in ("one", "two"):
            read, write = os.pipe()
            state.keep_open(write, name)
            os.close(write)
            ends[name] = read
        assert [state.is_open(name) for name in ("one", "two", "three")] == [True, True, False]
        state.close_kept("two")
        assert [state.is_open(name) for name in ("one", "two")] == [True, False]
        assert os.read(ends["two"], 1) == b""  # closed
        os.set_blocking(ends["one"], False)
        with pytest.raises(BlockingIOError):  # still open
            os.read(ends["one"], 1)
    assert os.read(ends["one"], 1) == b""
    for end in ends.values():
        os.close(end)


class Parsing:
    """Garbage whose finalizer parses deeper in the stack."""

    def __init__(self):
        self.cycle = self

    def __del__(self, depth=30):
        if depth:
            self.__del__(depth - 1)
        else:
            parse("1 + 1")


def test_a_finalizer_that_parses_does_not_disturb_another_parser():
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(50)
        for _ in range(20):
            Parsing()
            assert isinstance(parse(Path(__file__).read_text()), ast.Module)
    finally:
        gc.set_threshold(*threshold)
        gc.collect()
    assert gc.isenabled()
