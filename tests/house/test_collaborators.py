"""Collaborators are arguments of constructors: no module assigns attributes of other objects."""

from __future__ import annotations

import ast
import fnmatch
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.host import parse

SOURCE = Path(__file__).parents[2] / "src" / "samestep"

# `FILE TARGET` of assignments that no argument of a constructor could replace, and why
ALLOWED = {
    "* sys.*": "the interpreter's streams and arguments",
    "* torch.*": "switches of torch for the whole process",
    "*.grad": "torch: gradients",
    "step/*.data": "torch: the memory of a tensor that user code holds",
    "*.flags.writeable": "NumPy: a read-only array",
    "* parser.*": "argparse: what its constructor does not take, or was given elsewhere",
    "* parsed.*": "argparse: the parsed options",
    "* options.*": "argparse: the parsed options",
    "evaluate.py module.training": "torch: the mode of a module",
    "data/generators.py *.state": "NumPy: the state of a generator",
    "data/random_state.py bits.state": "NumPy: the state of a generator",
    "data/loader.py process._popen.terminate": "multiprocessing: there is no public method",
    "integrations/huggingface.py *": "transformers: the Trainer's own objects",
    "integrations/lightning.py module.*": "Lightning: the module refers to its Trainer",
    "integrations/lightning.py trainer._logged": "a step of the same file, which logs to it",
    "launch/attempt.py captured.stack": "traceback: an exception that came from another process",
    "launch/membership.py node.*": "records that only this state machine changes",
    "launch/membership.py *attempt.*": "records that only this state machine changes",
    "torch_internals.py module._create_c10d_store": "torch: its handlers cannot be replaced",
    "torch_internals.py distributed_c10d._pg_map": "torch: there is no public equivalent",
    "torch_internals.py *world.group_count": "torch: a failed try leaves its number behind",
    "torch_internals.py Variable._execution_engine": "torch: there is no public hook",
    "step/guards.py *optimizer.*": "torch: what user code may not use between two updates",
    "torch_internals.py optimizer._opt_called": "torch: what a scheduler reads",
    "torch_internals.py parameter._local_tensor": "torch: FSDP2 itself changes local tensors",
    "torch_internals.py *._training_state": "torch: FSDP2's own reset is in new versions only",
    "torch_internals.py state._state_ctx.*": "torch: FSDP2's own reset is in new versions only",
    "torch_internals.py obj.__class__": "torch: FSDP2 itself changes the classes of modules",
    "sharded/model.py ctx.function": "torch: what an autograd function keeps for backward",
    "torch_internals.py kind.apply": "torch: a method that is checked from then on",
    "torchmetrics.py leaf.*": "torchmetrics: its states have no public setter",
    "metrics.py copy.metric": "a copy is unpickled, so no constructor runs",
    "watch/server.py app.router.redirect_slashes": "FastAPI: not an argument",
}
# those of this package's objects that a constructor or method should replace
REMAINING = {
    "comm/connect.py world.local_ranks",
    "comm/connect.py world.made_group",
    "comm/watchdog.py client.seconds",
    "comm/watchdog.py self._client.key",
    "launch/coordinator.py self.node.last_seen",
    "launch/coordinator.py session.peer",
    "comm/store_server.py self._frames.max_bytes",
    "run/loops.py at.plan",
    "step/gradients.py placeholder.cleared",
    "step/gradients.py placeholder.number",
    "step/overlap.py self._world.is_exchanging",
    "step/shard.py buffer.is_in_step",
}


def assigned_attributes(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield each attribute that is assigned, except those of `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):  # any statement
            base = node.value
            if not isinstance(base, ast.Name) or base.id not in {"self", "cls"}:
                yield node


def fields_of_dataclasses(tree: ast.Module) -> set[str]:
    """Return the fields of the dataclasses of a module, which are records that it may change."""
    return {
        statement.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def patched(text: str) -> set[str]:
    """Return the attributes of other objects that a module's text assigns, such as `a.b.c`."""
    tree = parse(text)
    fields = fields_of_dataclasses(tree)
    return {
        ast.unparse(target) for target in assigned_attributes(tree) if target.attr not in fields
    }


@functools.cache
def assignments() -> set[str]:
    """Return all such assignments of the package, as `FILE TARGET`."""
    return {
        f"{path.relative_to(SOURCE)} {target}"
        for path in SOURCE.rglob("*.py")
        for target in patched(path.read_text())
    }


def is_allowed(assignment: str) -> bool:
    return any(fnmatch.fnmatchcase(assignment, pattern) for pattern in ALLOWED)


def test_no_module_assigns_attributes_of_other_objects():
    refused = {assignment for assignment in assignments() if not is_allowed(assignment)}
    assert refused - REMAINING == set(), (
        "pass it to the constructor, or give its class a method for it"
    )


def test_every_exception_is_needed():
    assigned = assignments()
    unused = [pattern for pattern in ALLOWED if not fnmatch.filter(assigned, pattern)]
    assert (unused, REMAINING - assigned) == ([], set())


@pytest.mark.parametrize(
    "text",
    [
        "a.b = 1",
        "a.b.c += 1",
        "self.a.b, c = 1, 2",
        "for a.b in c: pass",
        "with a as b.c: pass",
        "a().b = 1",
    ],
)
def test_every_kind_of_assignment_is_found(text):
    assert len(patched(text)) == 1


def test_own_attributes_and_fields_of_own_records_are_not_found():
    record = "@dataclass\nclass Node:\n    busy: bool\n\nnode.busy = True\nself.a = cls.b = 1"
    assert patched(record) == set()
