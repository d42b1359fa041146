"""A rule about imports that import-linter cannot state: it does not look into packages from elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "samestep"
MAY_TALK = {"launch", "comm"}
# beside samestep's own world, what torch has
MEASURES = {"tools/doctor/torches.py", "tools/doctor/workers.py"}
SILENT = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in MAY_TALK
    and str(path.relative_to(PACKAGE)) not in MEASURES
]


def knows_torch_distributed(text):
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return any(f"{name}.".startswith("torch.distributed.") for name in names)


@pytest.mark.parametrize("source", SILENT, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_launch_and_world_know_torch_distributed(source):
    assert not knows_torch_distributed(source.read_text())


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.launcher.api import elastic_launch", True),
        ("import torch; torch.distributed.get_rank()", True),
        ("import torch.distributions; torch.distributions.Normal", False),
        ("'torch.distributed'", False),
    ],
)
def test_every_way_to_know_it_is_seen(text, known):
    assert knows_torch_distributed(text) is known
