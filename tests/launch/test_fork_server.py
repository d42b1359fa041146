from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest

from samestep.errors import WorkerError
from samestep.handoff import LauncherState
from samestep.launch import fork_server as fork_server_module
from samestep.launch import launch
from tests.launch.processes import SOON_SECONDS, children, end_soon, for_ever, kernel_state

FORK = get_context("fork")
FOLDER = "FOLDER_OF_THE_MODULE"
EARLIER = "EARLIER_CHILDREN_OF_THE_LAUNCHER"
NOISY = """
import pathlib
print("imported")
pathlib.Path(__file__).with_suffix(".imported").touch()
"""


@pytest.fixture(autouse=True)
def note_children_of_other_tests(monkeypatch):
    monkeypatch.setenv(EARLIER, json.dumps(sorted(children(os.getpid()))))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that no process has imported."""
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    # on a busy machine an answer may take longer than the limit
    monkeypatch.setattr(
        import_module("samestep.launch.fork_server"), "ANSWER_SECONDS", SOON_SECONDS
    )
    return "noisy"


def begin(*modules):
    """Begin a run that needs these modules; return the fork server's process id, or None."""
    state = LauncherState.from_environment(os.environ)
    state.report_start("", 0)
    os.pwrite(state.modules, json.dumps(modules).encode(), 0)
    deadline = time.monotonic() + SOON_SECONDS
    earlier = {os.getpid(), *json.loads(os.environ[EARLIER])}
    while not (others := children(os.getppid()) - earlier):
        if time.monotonic() > deadline:
            return None
    return others.pop()


def is_first_attempt():
    return os.environ["SAMESTEP_INTERNAL_ATTEMPT"] == "0"


def wait_until_it_waits(fork_server):
    """Wait until the fork server has imported the module and is idle."""
    deadline = time.monotonic() + SOON_SECONDS
    asleep = 0
    while asleep < 20:
        assert time.monotonic() < deadline
        asleep = (
            asleep + 1
            if kernel_state(fork_server) == "S"
            and Path(os.environ[FOLDER], "noisy.imported").exists()
            else 0
        )
        time.sleep(0.005)


def wait_until_watched_by(launcher):
    """Wait until the launcher has a pidfd of this process."""
    line = f"Pid:\t{os.getpid()}\n"
    while True:
        for path in Path(f"/proc/{launcher}/fdinfo").iterdir():
            with suppress(FileNotFoundError):  # files come and go
                if line in path.read_text():
                    return


def kill(fork_server):
    os.kill(fork_server, signal.SIGKILL)
    assert end_soon([fork_server])


def interrupted(
    *modules, fault=lambda: os.kill(os.getpid(), signal.SIGKILL), before=wait_until_it_waits
):
    """Return a body that fails in the first attempt; the second returns whether the fork server is
    its parent, and which modules it has."""
    queue = FORK.SimpleQueue()

    def body():
        if is_first_attempt():
            fork_server = begin(*modules)
            queue.put(fork_server)
            before(fork_server)
            fault()
        print("worker")  # noqa: T201
        return os.getppid() == queue.get(), [name for name in modules if name in sys.modules]

    return body


def test_new_workers_are_forked_from_a_process_that_has_imported_their_modules(module, capfd):
    assert launch(interrupted(module), workers=1) == (True, [module])
    assert capfd.readouterr().out == "worker\n"


def test_a_module_that_cannot_be_imported_is_skipped(module):
    assert launch(interrupted("there.is.no.such.module", module), workers=1) == (True, [module])


def test_after_it_has_died_workers_are_forked_from_the_launcher(module):
    assert launch(interrupted(module, before=kill), workers=1) == (False, [])


def test_a_stopped_fork_server_is_killed(module, monkeypatch):
    def stop(fork_server):
        wait_until_it_waits(fork_server)
        os.kill(fork_server, signal.SIGSTOP)

    monkeypatch.setattr(import_module("samestep.launch.fork_server"), "ANSWER_SECONDS", 0.1)
    assert launch(interrupted(module, before=stop), workers=1) == (False, [])


def test_a_stopped_fork_server_with_workers_is_killed(module, monkeypatch):
    launcher = os.getpid()

    def body():
        attempt = int(os.environ["SAMESTEP_INTERNAL_ATTEMPT"])
        if attempt == 0:
            wait_until_it_waits(begin(module))
        if attempt == 1:
            assert os.getppid() != launcher
            wait_until_watched_by(launcher)
            os.kill(os.getppid(), signal.SIGSTOP)
        if attempt < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getppid()

    monkeypatch.setattr(import_module("samestep.launch.fork_server"), "ANSWER_SECONDS", 1.0)
    assert launch(body, workers=1) == launcher


def test_if_an_import_used_cuda_workers_are_forked_from_the_launcher(module, tmp_path):
    is_seen = tmp_path / "seen"
    lines = [
        "import pathlib, time, torch",
        f"while not pathlib.Path({str(is_seen)!r}).exists():",
        "    time.sleep(0.01)",
        "torch.cuda.is_initialized = lambda: True",
    ]
    (tmp_path / "noisy.py").write_text("\n".join(lines))

    def until_it_has_ended(fork_server):
        is_seen.touch()  # it could end before this worker has seen it
        assert end_soon([fork_server])

    assert launch(interrupted(module, before=until_it_has_ended), workers=1) == (False, [])


def test_exit_codes_of_its_workers_are_known(module):
    ends = {1: signal.SIGKILL, 2: signal.SIGSEGV}

    def body():
        attempt = int(os.environ["SAMESTEP_INTERNAL_ATTEMPT"])
        if attempt == 0:
            wait_until_it_waits(begin(module))
            os.kill(os.getpid(), signal.SIGKILL)
        faulthandler.disable()
        os.kill(os.getpid(), ends[attempt])

    with pytest.raises(WorkerError, match="killed by SIGSEGV") as caught:
        launch(body, workers=1)
    assert caught.value.status == 128 + signal.SIGSEGV


def test_its_workers_exit_with_it_and_restart(module):
    launcher = os.getpid()

    def body():
        attempt = int(os.environ["SAMESTEP_INTERNAL_ATTEMPT"])
        if attempt == 0:
            wait_until_it_waits(begin(module))
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1:
            assert os.getppid() != launcher
            wait_until_watched_by(launcher)
            os.kill(os.getppid(), signal.SIGKILL)
            for_ever()
        return attempt

    assert launch(body, workers=1) == 2


def test_without_restarts_there_is_no_fork_server(module, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOON_SECONDS", 0.5)
    assert launch(lambda: begin(module), workers=1, max_restarts=0) is None


def test_a_launcher_with_all_modules_needs_no_fork_server(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOON_SECONDS", 0.5)
    assert launch(lambda: begin("json"), workers=1) is None


def test_it_exits_with_the_launcher(module):
    queue = FORK.SimpleQueue()

    def body():
        queue.put(begin(module))
        for_ever()

    launcher = FORK.Process(target=launch, args=(body,), kwargs={"workers": 1})
    launcher.start()
    fork_server = queue.get()
    launcher.kill()
    launcher.join()
    assert fork_server
    assert end_soon([fork_server])


def test_a_worker_that_exits_before_the_launcher_knows_it_runs_once(module, tmp_path, monkeypatch):
    log = tmp_path / "log"
    too_late = []

    class Late(fork_server_module.ForkedWorker):
        def __init__(self, pid, *arguments):
            deadline = time.monotonic() + SOON_SECONDS
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            too_late.append(not Path(f"/proc/{pid}").exists())
            super().__init__(pid, *arguments)

    monkeypatch.setattr(fork_server_module, "ForkedWorker", Late)

    def body():
        if is_first_attempt():
            wait_until_it_waits(begin(module))
            os.kill(os.getpid(), signal.SIGKILL)
        with log.open("a") as file:
            file.write("once\n")
        return "done"

    assert launch(body, workers=1) == "done"
    assert too_late == [True]
    assert log.read_text() == "once\n"
