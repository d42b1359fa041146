"""Launchers for tests: `samestep` in a process that is forked from the tests', which has torch, on a host of its own."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

from samestep import cli

FORK = get_context("fork")
TOKEN = "token-of-the-tests"
PORT = 29400
JOB = Path(__file__).with_name("job.py")
WAIT_SECONDS = 60.0


class Here:
    """The host of the tests."""

    def enter(self):
        """Be there already."""


HERE = Here()


class Launcher:
    """`samestep ARGUMENTS` on a host; what it prints is in `output()`."""

    def __init__(self, host, log, *arguments):
        self._log = log
        self._process = FORK.Process(target=self._run, args=(host, arguments))
        self._process.start()
        self.pid = self._process.pid

    def _run(self, host, arguments):
        atexit._clear()  # what the tests' process does at its end is not to be done here
        file = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
        os.environ["SAMESTEP_TOKEN"] = TOKEN
        host.enter()
        sys.argv = ["samestep", *arguments]
        cli.main_and_exit()

    def output(self):
        return self._log.read_text() if self._log.exists() else ""

    def wait_for(self, text):
        """Return when a text was printed."""
        self.wait_until(lambda: text in self.output())

    def wait_until(self, true):
        """Return when a condition holds, for which this launcher must not have ended."""
        try:
            wait_until(lambda: true() or self._process.exitcode is not None)
        finally:
            assert true(), self.output()

    def end(self):
        """Return the exit status of the launcher, which ends by itself."""
        self._process.join(WAIT_SECONDS)
        assert self._process.exitcode is not None, self.output()
        return self._process.exitcode

    def send(self, number):
        os.kill(self.pid, number)

    def close(self):
        with suppress(ProcessLookupError, AttributeError):
            self._process.kill()
        self._process.join()
        self._process.close()


@contextmanager
def launchers():
    """Yield what starts launchers: `start(host, folder / "log", *arguments)`. None is left at the end."""
    started = []

    def start(*arguments):
        started.append(Launcher(*arguments))
        return started[-1]

    try:
        yield start
    finally:
        for launcher in started:
            launcher.close()


def wait_until(true):
    """Return when a condition holds. Raises `TimeoutError`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
