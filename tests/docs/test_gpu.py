"""docs/gpu.md names tests that exist."""

from __future__ import annotations

import ast
import re

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "gpu.md").read_text()
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)


def test_tests_that_the_page_names_exist():
    assert len(NAMED) > 40
    assert len(NAMED) == PAGE.count("`test_")  # none has another form
    for file in {file for file, _ in NAMED}:
        tree = ast.parse((ROOT / "tests" / "gpu" / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name for other, name in NAMED if other == file} - functions == set()
