"""Faults of the negative control: each is a program, and `samestep verify` finds those tried."""

from __future__ import annotations

import pytest

from benchmarks.mutations.__main__ import try_one
from benchmarks.mutations.faults import FOLDER, mutations
from benchmarks.mutations.plant import Script
from tests.python import fork_what_tools_start


def test_each_fault_is_another_program_than_the_good_one():
    planted = {(mutation.kind.name, mutation.loop): mutation.script() for mutation in mutations()}
    assert len(planted) >= 60
    for (_, loop), script in planted.items():
        compile(script, loop, "exec")
        assert script != str(Script((FOLDER / f"{loop}.py").read_text()))
    assert len(set(planted.values())) == len(planted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("optimizer is not tracked", "differs"),
        ("a generator of the script in a lane", "differs"),
        ("an update inside a lane", "refused"),
    ],
)
def test_a_fault_is_found(kind, outcome, monkeypatch):
    fork_what_tools_start(monkeypatch)
    mutation = next(each for each in mutations() if each.kind.name == kind)
    assert try_one(mutation)[0] == outcome
