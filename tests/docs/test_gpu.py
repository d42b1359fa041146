"""docs/gpu-tests.md names tests that exist, and docs/graphs.md each reason against a graph."""

from __future__ import annotations

import ast
import re

from samestep.host import parse
from samestep.plugins.graph_choice import NOTES, REFUSALS
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "gpu-tests.md").read_text()
GRAPHS = (ROOT / "docs" / "graphs.md").read_text()
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)


def test_tests_that_the_page_names_exist():
    assert len(NAMED) > 40
    assert len(NAMED) == PAGE.count("`test_")  # none has another form
    for file in {file for file, _ in NAMED}:
        tree = parse((ROOT / "tests" / "gpu" / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name for other, name in NAMED if other == file} - functions == set()


def test_each_reason_against_a_graph_is_on_the_page():
    section = GRAPHS.partition("## What a lane may not do")[2].partition("Without a line")[0]
    rows = re.findall(r"\| (`.*) \|\n", section)  # their last cells
    assert len(rows) == len(NOTES | REFUSALS)
    for text in (NOTES | REFUSALS).values():
        clauses = [clause.strip(" ,") for clause in re.split(r"\{.*?\}|[;:.]", text)]
        clause = next(clause for clause in clauses if len(clause) > 14)
        clause = next(part for part in clause.split(", so that") if part)
        assert any(clause in row for row in rows), clause
