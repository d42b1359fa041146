from __future__ import annotations

from importlib import import_module

import samestep
from samestep import errors
from tests.house.public import FROZEN, described
from tests.workers import run_workers


def test_public_names_and_command_line_are_the_frozen_ones():
    (now,) = run_workers(described, 1)
    hint = "if this change is intended: python -m tests.house.public, and add it to CHANGELOG.md"
    assert now == FROZEN.read_text(), hint


def test_every_exception_can_be_caught_by_its_name_in_the_package():
    classes = {name: member for name, member in vars(errors).items() if isinstance(member, type)}
    assert classes.keys() <= set(samestep.__all__)
    assert {name: getattr(samestep, name) for name in classes} == classes


def test_public_names_are_not_hidden_by_modules_of_the_same_name():
    def body():
        for part in ("launch", "run"):
            import_module(f"samestep.{part}")
        return [name for name in samestep.__all__ if not callable(getattr(samestep, name))]

    assert run_workers(body, 1) == [[]]
