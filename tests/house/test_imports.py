"""Rules about imports that import-linter cannot check.

It neither looks into other packages nor counts imports within functions or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from samestep.host import parse

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "samestep"
MAY_USE_DISTRIBUTED = {"comm", "launch", "torch_internals.py"}
# It writes the files of torch.distributed.checkpoint, alone (no_dist), and uses nothing else.
CHECKPOINTS = "snapshot/dcp.py"
OTHERS = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in MAY_USE_DISTRIBUTED
]


def imported(tree, package=()):
    """Return the full names of everything that is imported anywhere in a module of a package."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def uses_torch_distributed(text, allowed=()):
    if "distributed" not in text:
        return False
    tree = parse(text)
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {name for name in imported(tree) | attributes if not name.startswith(allowed)}
    return any(f"{name}.".startswith("torch.distributed.") for name in names)


def test_only_comm_and_launch_use_torch_distributed():
    allowed = {PACKAGE / CHECKPOINTS: ("torch.distributed.checkpoint.",)}
    assert OTHERS
    assert [
        path for path in OTHERS if uses_torch_distributed(path.read_text(), allowed.get(path, ()))
    ] == []


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.launcher.api import elastic_launch", True),
        ("import torch; torch.distributed.get_rank()", True),
        ("import torch.distributions; torch.distributions.Normal", False),
        ("'torch.distributed'", False),
    ],
)
def test_every_use_of_torch_distributed_is_found(text, used):
    assert uses_torch_distributed(text) is used


def cycles(source):
    """Return import cycles among the modules of a source folder, each as text."""
    paths = {path.relative_to(source).with_suffix(""): path for path in source.rglob("*.py")}
    modules = {_name(module) for module in paths}
    graph = {}
    for module, path in paths.items():
        names = imported(parse(path.read_text()), module.parts[:-1])
        graph[_name(module)] = {
            name if name in modules else name.rpartition(".")[0] for name in names
        }
    texts = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle = error.args[1][::-1]  # each module imports the next one
            texts.append(" imports ".join(cycle))
            graph[cycle[0]].remove(cycle[1])
        else:
            return texts


def _name(module):
    return ".".join(module.parts[:-1] if module.name == "__init__" else module.parts)


def test_modules_do_not_import_each_other_in_a_cycle():
    assert cycles(SOURCE) == []


def test_cycles_are_found_under_type_checking_and_in_functions(tmp_path):
    package = tmp_path / "package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("from package.one import name\nimport torch\n")
    (package / "one.py").write_text("if TYPE_CHECKING:\n    from package.two import Name\n")
    (package / "two.py").write_text("def body():\n    from package.deep import three\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "three.py").write_text("from .. import one\nfrom . import four\n")
    (package / "deep" / "four.py").write_text("import json\n")
    (cycle,) = cycles(tmp_path)
    assert sorted(cycle.split(" imports ")[1:]) == [
        "package.deep.three",
        "package.one",
        "package.two",
    ]
