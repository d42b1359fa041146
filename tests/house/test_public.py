from __future__ import annotations

from importlib import import_module

import samestep
from tests.house.public import FROZEN, described
from tests.workers import run_workers


def test_public_names_and_the_command_line_are_frozen():
    (now,) = run_workers(described, 1)
    assert now == FROZEN.read_text(), (
        "if the change is intended, run python -m tests.house.public and add it to CHANGELOG.md"
    )


def test_subpackages_do_not_hide_public_names():
    def body():
        for package in ("launch", "run"):
            import_module(f"samestep.{package}")
        return [name for name in samestep.__all__ if not callable(getattr(samestep, name))]

    assert run_workers(body, 1) == [[]]
