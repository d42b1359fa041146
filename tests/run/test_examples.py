"""The examples in public docstrings run and print what they show."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from types import ModuleType

import pytest
import torch

import samestep as ss
from samestep.record import read_events, read_history
from tests.docs import given
from tests.docs.blocks import ROOT

PUBLIC = [
    ss.init,
    ss.launch,
    ss.Run,
    ss.Means,
    ss.PackedList,
    ss.Weighted,
    ss.ByLength,
    ss.ShardOrder,
    ss.ShardedDataset,
    ss.Metric,
    ss.check_metric,
    ss.read_dcp,
    ss.read_snapshot,
]
READERS = [read_events, read_history]


def examples():
    """Return the examples in the docstrings of public objects and of their members."""
    finder = doctest.DocTestFinder(exclude_empty=False)
    for item in [*PUBLIC, *READERS]:
        yield from finder.find(item, item.__name__)
    for base in ss.Run.__mro__[1:-1]:
        yield from finder.find(base, "Run")


EXAMPLES = [example for example in examples() if example.examples]


def is_public(name, member):
    return not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))


def test_every_call_is_in_the_reference_and_has_an_example():
    calls = {
        f"Run.{name}" for name, member in inspect.getmembers(ss.Run) if is_public(name, member)
    }
    calls |= {item.__name__ for item in [*PUBLIC, *READERS]}
    assert calls - {example.name for example in EXAMPLES} == set()
    page = (ROOT / "docs" / "reference.md").read_text()
    entries = set(re.findall(r"^\.\. auto\w+:: (?:samestep\.record\.)?(\S+)$", page, re.MULTILINE))
    assert calls - entries == set()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # `save` without a group
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_is_right(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("example")  # classes of an example are pickled by their module
    monkeypatch.setitem(sys.modules, "example", module)
    example.globs = vars(module)
    example.globs.update({name: getattr(given, name) for name in given.__all__})
    example.globs.update(read_events=read_events, read_history=read_history)
    if example.name.startswith(("Run.", "Means")):
        with ss.init(lanes=2, dir=tmp_path / "run") as run:
            model = run.replicate(given.Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            example.globs.update(run=run, model=model, optimizer=optimizer)
            check(example)
    else:
        check(example)


def check(example):
    printed = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=printed.append, clear_globs=False)
    assert runner.failures == 0, "".join(printed)
