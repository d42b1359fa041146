"""Runs that tools start are forked: each is spared an import of torch."""

from __future__ import annotations

import pytest

from tests.python import fork_what_tools_start


@pytest.fixture(autouse=True)
def _forked_runs(monkeypatch):
    fork_what_tools_start(monkeypatch)
