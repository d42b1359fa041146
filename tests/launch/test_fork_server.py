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
from samestep.launch import launch
from tests.launch.processes import SOON_SECONDS, children, end_soon, for_ever, state

FORK = get_context("fork")
FOLDER = "FOLDER_OF_THE_MODULE"
NOISY = """
import pathlib
print("imported")
pathlib.Path(__file__).with_suffix(".imported").touch()
"""


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
    """Begin a run that needs these modules; return the process id of the nursery when it is there, None where none comes."""
    kept = LauncherState.from_environment(os.environ)
    kept.report_start("", 0)
    os.pwrite(kept.modules, json.dumps(modules).encode(), 0)
    deadline = time.monotonic() + SOON_SECONDS
    while not (others := children(os.getppid()) - {os.getpid()}):
        if time.monotonic() > deadline:
            return None
    return others.pop()


def is_first_attempt():
    return os.environ["SAMESTEP_INTERNAL_ATTEMPT"] == "0"


def wait_until_it_waits(nursery):
    """Return when the nursery has imported the module, and sleeps for some time."""
    deadline = time.monotonic() + SOON_SECONDS
    asleep = 0
    while asleep < 20:
        assert time.monotonic() < deadline
        asleep = (
            asleep + 1
            if state(nursery) == "S" and Path(os.environ[FOLDER], "noisy.imported").exists()
            else 0
        )
        time.sleep(0.005)


def wait_until_watched_by(launcher):
    """Return when the launcher has a file that tells of this process's end."""
    told = f"Pid:\t{os.getpid()}\n"
    while True:
        for path in Path(f"/proc/{launcher}/fdinfo").iterdir():
            with suppress(FileNotFoundError):  # files come and go
                if told in path.read_text():
                    return


def kill(nursery):
    os.kill(nursery, signal.SIGKILL)
    assert end_soon([nursery])


def interrupted(
    *modules, fault=lambda: os.kill(os.getpid(), signal.SIGKILL), before=wait_until_it_waits
):
    """Return the body of a worker that suffers a fault in the first attempt, and in the second tells who forked it and what it found."""
    told = FORK.SimpleQueue()

    def body():
        if is_first_attempt():
            nursery = begin(*modules)
            told.put(nursery)
            before(nursery)
            fault()
        print("worker")  # noqa: T201
        return os.getppid() == told.get(), [name for name in modules if name in sys.modules]

    return body


def test_successors_are_forked_from_a_process_that_has_imported_what_workers_had_to(module, capfd):
    assert launch(interrupted(module), workers=1) == (True, [module])
    assert capfd.readouterr().out == "worker\n"


def test_what_cannot_be_imported_beforehand_is_left_to_the_worker(module):
    assert launch(interrupted("there.is.no.such.module", module), workers=1) == (True, [module])


def test_where_it_has_died_workers_are_forked_from_the_launcher(module):
    assert launch(interrupted(module, before=kill), workers=1) == (False, [])


def test_one_that_is_stopped_is_given_up(module, monkeypatch):
    def stop(nursery):
        wait_until_it_waits(nursery)
        os.kill(nursery, signal.SIGSTOP)

    monkeypatch.setattr(import_module("samestep.launch.fork_server"), "ANSWER_SECONDS", 0.1)
    assert launch(interrupted(module, before=stop), workers=1) == (False, [])


def test_one_that_is_stopped_and_has_workers_is_given_up(module, monkeypatch):
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

    monkeypatch.setattr(import_module("samestep.launch.fork_server"), "ANSWER_SECONDS", 0.1)
    assert launch(body, workers=1) == launcher


def test_where_an_import_has_used_cuda_workers_are_forked_from_the_launcher(module, tmp_path):
    (tmp_path / "noisy.py").write_text("import torch\ntorch.cuda.is_initialized = lambda: True")

    def until_it_has_ended(nursery):
        assert end_soon([nursery])

    assert launch(interrupted(module, before=until_it_has_ended), workers=1) == (False, [])


def test_how_its_workers_end_is_known(module):
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


def test_its_workers_end_with_it_and_are_replaced(module):
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


def test_without_restarts_there_is_none(module, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOON_SECONDS", 0.5)
    assert launch(lambda: begin(module), workers=1, max_restarts=0) is None


def test_a_launcher_that_has_all_modules_needs_none(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOON_SECONDS", 0.5)
    assert launch(lambda: begin("json"), workers=1) is None


def test_it_ends_with_the_launcher(module):
    told = FORK.SimpleQueue()

    def body():
        told.put(begin(module))
        for_ever()

    launcher = FORK.Process(target=launch, args=(body,), kwargs={"workers": 1})
    launcher.start()
    nursery = told.get()
    launcher.kill()
    launcher.join()
    assert nursery
    assert end_soon([nursery])
