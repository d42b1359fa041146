"""tests/house/slowest.txt lists tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from samestep.host import parse

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests" / "house" / "slowest.txt").read_text().splitlines()
NAMES = [line.split()[-1] for line in LINES if not line.startswith("#")]


def functions_in(path):
    return {node.name for node in parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", sorted({name.partition("::")[0] for name in NAMES}))
def test_the_slowest_tests_exist(file):
    listed = {name.partition("::")[2] for name in NAMES if name.startswith(f"{file}::")}
    assert listed <= functions_in(ROOT / file)


def test_there_are_fifty():
    assert len(set(NAMES)) == 50
