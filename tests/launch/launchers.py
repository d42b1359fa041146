"""Launchers for tests: `samestep` on a simulated host, forked from the tests' process."""

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
WAIT_SECONDS = 240.0


class Here:
    """The host of the tests."""

    def enter(self):
        """Do nothing."""


HERE = Here()


class Launcher:
    """`samestep ARGUMENTS` on a host; `output()` is what it has printed."""

    def __init__(self, host, log, *arguments):
        self._log = log
        self._process = FORK.Process(target=self._run, args=(host, arguments))
        self._process.start()
        self.pid = self._process.pid

    def _run(self, host, arguments):
        atexit._clear()  # the exit functions of the tests' process
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
        """Wait until a text is printed."""
        self.wait_until(lambda: text in self.output())

    def wait_until(self, true):
        """Wait until a condition holds; fail if this launcher exits first."""
        try:
            wait_until(lambda: true() or self._process.exitcode is not None)
        finally:
            assert true(), self.output()

    def end(self):
        """Wait until the launcher exits; return its status."""
        self._process.join(WAIT_SECONDS)
        assert self._process.exitcode is not None, self.output()
        return self._process.exitcode

    def wait_for_exit(self):
        self._process.join(WAIT_SECONDS)

    def send(self, number):
        os.kill(self.pid, number)

    def close(self):
        with suppress(ProcessLookupError, AttributeError):
            self._process.kill()
        self._process.join()
        self._process.close()


@contextmanager
def launchers():
    """Yield `start(host, log, *arguments)`; kill all launchers at the end."""
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
    """Wait until a condition holds. Raises `TimeoutError`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
