"""Runs that tools start are forked: each is spared an import of torch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from samestep import tools
from tests.python import start_python


@pytest.fixture(autouse=True)
def _forked_runs(monkeypatch):
    """Start what `samestep.tools.started` starts in a fork."""

    def start(command, **options):
        assert command[0] == sys.executable
        if options["stderr"] == subprocess.STDOUT:
            options["stderr"] = options["stdout"]
        return start_python(*command[1:], **options)

    names = {"Popen": start, "DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    monkeypatch.setattr(tools, "subprocess", SimpleNamespace(**names))
