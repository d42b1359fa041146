from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing import get_context

import pytest

from samestep.launch import launch
from samestep.launch.kept import Kept
from tests.launch.processes import SOON_SECONDS, children, end_soon, for_ever

FORK = get_context("fork")
NOISY = "print('imported by', __name__)"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that no process has imported."""
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    return "noisy"


def begin(*modules):
    """Begin a run that needs these modules; return the process ids of its spares when they are there."""
    kept = Kept.from_environment(os.environ)
    kept.tell_start("", 0)
    os.pwrite(kept.modules, json.dumps(modules).encode(), 0)
    deadline = time.monotonic() + SOON_SECONDS
    while not (spares := children(os.getppid()) - {os.getpid()}):
        if time.monotonic() > deadline:
            return set()
    return spares


def is_first_attempt():
    return os.environ["SAMESTEP_INTERNAL_ATTEMPT"] == "0"


def interrupted(*modules, before=lambda spares: None):
    """Return the body of a worker that is killed in the first attempt, and in the second tells whether a spare took its place."""
    told = FORK.SimpleQueue()

    def body():
        if is_first_attempt():
            spares = begin(*modules)
            told.put(spares)
            before(spares)
            os.kill(os.getpid(), signal.SIGKILL)
        print("worker")  # noqa: T201
        return os.getpid() in told.get(), [name for name in modules if name in sys.modules]

    return body


def kill_all(pids):
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert end_soon(pids)


def test_a_spare_takes_the_place_of_a_killed_worker_and_has_imported_what_that_had(module, capfd):
    assert launch(interrupted(module), workers=1) == (True, [module])
    assert capfd.readouterr().out == "worker\n"


def test_what_a_spare_cannot_import_is_left_to_the_worker(module):
    assert launch(interrupted("there.is.no.such.module", module), workers=1) == (True, [module])


def test_where_a_spare_has_died_a_worker_is_forked(module):
    assert launch(interrupted(module, before=kill_all), workers=1) == (False, [])


def test_without_restarts_there_are_no_spares(module, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOON_SECONDS", 0.5)
    assert launch(lambda: begin(module), workers=1, restarts=0) == set()


def test_a_module_that_the_launcher_has_needs_no_spares(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOON_SECONDS", 0.5)
    assert launch(lambda: begin("json"), workers=1) == set()


def test_spares_end_with_their_launcher(module):
    told = FORK.SimpleQueue()

    def body():
        told.put(begin(module))
        for_ever()

    launcher = FORK.Process(target=launch, args=(body,), kwargs={"workers": 1})
    launcher.start()
    spares = told.get()
    launcher.kill()
    launcher.join()
    assert spares
    assert end_soon(spares)
