"""Refusals of what the blocks of an evaluation leave behind: lists, counters, tensors.

Each worker evaluates its own blocks, so that a list of predictions that the function appends to, or
a matrix that it adds to, has those of one worker. The first two blocks are compared: what a model
prepares once, such as a table of positions, is there after the first.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.nn import Module, Parameter

from samestep.data.search import Reference, is_metric, walk
from samestep.errors import EvaluationError
from samestep.guards.reach import Place, code_of, is_plain, readable
from samestep.step.lane_pass import StepPlugin
from samestep.torch_internals import versions_of
from samestep.user_code import is_users

LOOKS: Final = 2  # at a function
MOST_BYTES: Final = 1 << 20  # of an array that is compared
NUMBERS: Final = (int, float, complex, np.number)
SEQUENCES: Final = (list, deque, set)


class BlockState(StepPlugin):
    """Refuses functions of `run.evaluate` that keep something of each block."""

    def __init__(self) -> None:
        self._looks: dict[Any, int] = {}  # by function

    def blocks(self, fn: Any, model: Any, own_blocks: int) -> Callable[[], object] | None:
        """Note what a function and its model reach, before the blocks of this worker."""
        code = code_of(fn)
        looks = self._looks.get(code, 0)
        if looks == LOOKS or own_blocks == 0:
            return None
        self._looks[code] = looks + 1
        return _Blocks({"fn": fn, "model": model}, has_second=own_blocks > 1).after_block


class _Blocks:
    """What a function reaches, before its first block and after the first two."""

    def __init__(self, roots: Mapping[str, Any], *, has_second: bool) -> None:
        self._roots, self._waits_for_second = roots, has_second
        self._marks: dict[Place, tuple[Reference, Any]] | None = _marks(roots)

    def after_block(self) -> None:
        """Raise `EvaluationError` if a block has changed what the next one may read."""
        if (before := self._marks) is None:
            return
        now = _marks(self._roots)
        if self._waits_for_second:  # what is made once is there now
            self._marks, self._waits_for_second = now, False
            return
        self._marks = None
        for place, (reference, mark) in before.items():
            _, other = now.get(place, (None, None))
            if _has_changed(mark, other):
                raise _changed(readable(reference).removeprefix("fn: "))


def _has_changed(mark: Any, other: Any) -> bool:
    """Return whether the content differs of a value that has the same kind and form."""
    if other is None or mark[:2] != other[:2]:
        return False  # such as a table that was made larger
    kind, _, content = mark
    return bool(other[2] > content) if issubclass(kind, SEQUENCES) else content != other[2]


def _marks(roots: Mapping[str, Any]) -> dict[Place, tuple[Reference, Any]]:
    """Return what user code holds, by place."""
    marks = {}
    for reference, value, of_module in _parts(roots):
        if (mark := _mark(value, of_module=of_module)) is not None:
            marks[id(reference.owner), reference.key] = reference, mark
    return marks


def _parts(roots: Mapping[str, Any]) -> Iterator[tuple[Reference, Any, bool]]:
    """Yield what user code holds, and whether it is an attribute of a module."""
    of_metrics: set[int] = set()  # what metrics hold, which are merged if they are returned
    for _, holder, parts, is_of_user in walk(**roots):
        if is_metric(holder) or id(holder) in of_metrics:
            of_metrics.update(id(content) for _, content in parts)
        elif is_of_user:
            is_module = isinstance(holder, Module)
            yield from ((reference, value, is_module) for reference, value in parts)
        code = getattr(holder, "__code__", None)
        if isinstance(code, CodeType) and is_users(code.co_filename):
            names = holder.__globals__
            for each in dis.get_instructions(code):
                if each.opname == "STORE_GLOBAL":
                    reference = Reference(each.argval, dict.__getitem__, names, each.argval)
                    yield reference, names.get(each.argval), False


def _mark(value: Any, *, of_module: bool) -> tuple[Any, ...] | None:
    """Return (kind, form, content) of a value that may be added to, None of others.

    A module may set its attributes in each forward pass, such as to its last activations, so that
    only changes in place count there.
    """
    identity = id(value) if of_module else None
    if isinstance(value, SEQUENCES):
        return type(value), None, len(value)
    if isinstance(value, NUMBERS) and not isinstance(value, bool):
        return None if of_module else (type(value), None, repr(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufcb" and value.nbytes <= MOST_BYTES:
        return np.ndarray, (value.shape, value.dtype, identity), value.tobytes()
    if is_plain(value) and not isinstance(value, Parameter) and value.grad_fn is None:
        # no bits, for which a GPU would have to be awaited
        return Tensor, (value.shape, value.dtype, identity), (id(value), versions_of([value]))
    return None


def _changed(name: str) -> EvaluationError:
    return EvaluationError(
        f"the function of run.evaluate changed {name} in each block: every worker evaluates its own"
        " blocks, so it would hold those of one worker. Return what belongs to a sample, and get"
        " that of all samples in order with run.evaluate(..., gather=True); return a metric"
        " (torchmetrics, or an ss.Metric), which is merged; or return a mean or a sum"
    )
