"""Refusals of what forward passes keep in attributes of modules, which are in no snapshot.

The attributes and tensors of the user's modules are compared before and after each of the first
passes of this worker. Two kinds of state are no caches:

- A module initializes itself from the first samples, and notes that in a flag: the first pass sets
  a flag that the code reads and writes a tensor, and the second one changes neither. After a resume
  it would initialize itself again, unless the flag is a buffer, so that is an error.
- Counters and averages: each pass reads an attribute, then gives it another value of the same form.
  They would start again after a resume, which a line says. A cache changes in the first pass only,
  or changes its form when it grows.
"""

from __future__ import annotations

import dis
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from samestep.data.attributes import SCALARS
from samestep.data.search import own_dict
from samestep.errors import LossError
from samestep.guards.reach import MOST_PARTS, code_of, is_array, is_plain, may_be_replaced
from samestep.step.hashing import hashes_of
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import NO_CONTEXT, LanePass, StepPlugin, StepResult
from samestep.torch_internals import MODULE_DICTS, buffers_in, versions_of
from samestep.user_code import is_installed, is_users

LOOKS: Final = 3  # at passes
READS: Final = {"LOAD_ATTR", "LOAD_METHOD"}
FLAGS: Final = {"None", "False", "True", "0", "1"}  # the values of a flag


class Mark(NamedTuple):
    """The value of an attribute, to compare; values of one form may be a state."""

    form: tuple[Any, ...]
    content: Any

    @property
    def is_tensor(self) -> bool:
        """Whether it is that of a tensor."""
        return self.form[0] is Tensor


Change = tuple[Mark | None, Mark]  # before and after a pass


class _Owner(NamedTuple):
    """A module of a class of the user, and its attributes and tensors before a pass."""

    name: str
    module: Module
    marks: Mapping[str, Mark]
    tensors: Mapping[str, Tensor]  # its parameters and its own buffers

    def changes(self) -> dict[str, Change]:
        """Return the attributes that have changed since, with their marks."""
        return {
            name: (self.marks.get(name), mark)
            for name, mark in _marks(self.module).items()
            if self.marks.get(name) != mark
        }

    def codes(self) -> Iterator[CodeType]:
        """Yield the code of the user's methods."""
        for base in type(self.module).__mro__:
            for member in vars(base).values():
                if isinstance(member, FunctionType) and is_users(member.__code__.co_filename):
                    yield member.__code__


class _Start(NamedTuple):
    """A flag that the first pass set, and a tensor that it initialized."""

    flag: str
    name: str
    tensor: Tensor


class KeptAttributes(StepPlugin):
    """Refuses modules that initialize themselves under a flag; says what starts again on resume."""

    def __init__(self, engine: LaneEngine) -> None:
        self._engine = engine
        self._calls = 0
        self._looks = 0  # at lanes of this worker
        self._starts: list[_Start] = []  # of the first pass
        self._error: LossError | None = None
        self._changes: Counter[str] = Counter()  # passes that read and changed an attribute

    def lane(self, lane_pass: LanePass, lane: int, batch: Any) -> AbstractContextManager[None]:
        """Return the context of a lane, which is compared if it is one of the first."""
        return NO_CONTEXT if self._looks == LOOKS else self._compared(code_of(lane_pass.loss.fn))

    def report(self) -> None:
        """Raise `LossError` if a module has initialized itself."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self, result: StepResult) -> None:
        """Say what starts again on a resume, after the last look."""
        self._calls += 1
        if self._calls < LOOKS:  # of all workers, which may have other numbers of lanes
            return
        self._engine.dismiss(self)
        names = [name for name, passes in self._changes.items() if passes == LOOKS]
        if names and self._engine.lanes == 1:  # with several, `LaneState` looks at them
            logging.getLogger("samestep").warning(
                "the forward pass changes %s and reads it in the next step, but no snapshot has it:"
                " a run that resumes begins with its first value. Make it a buffer, such as with"
                " register_buffer(%r, torch.zeros(()))",
                ", ".join(names),
                names[0].rpartition(".")[2],
            )

    @contextmanager
    def _compared(self, loss_code: Any) -> Iterator[None]:
        before = [*self._owners()]
        tensors = {id(tensor): tensor for owner in before for tensor in owner.tensors.values()}
        values = self._values([*tensors.values()])
        yield
        after = zip(tensors, values, self._values([*tensors.values()]), strict=True)
        written = {number for number, old, new in after if old != new}
        changed = [(owner, owner.changes()) for owner in before]
        self._looks += 1
        if self._looks == 1:
            for owner, changes in changed:
                self._starts += _starts(owner, changes, written, loss_code)
        elif self._looks == 2:
            names = {f"{owner.name}.{name}" for owner, changes in changed for name in changes}
            for start in self._starts:
                if start.flag not in names and id(start.tensor) not in written:
                    self._error = _initialized(start, self._engine.lanes)
        for owner, changes in changed:
            self._changes.update(f"{owner.name}.{name}" for name in _kept(owner, changes))

    def _values(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return numbers that change with a tensor; in the first passes also through `.data`.

        Of several lanes, each leaves buffers as before, with another version if it wrote them.
        """
        if self._looks >= 2:
            return [0] * len(tensors)
        return hashes_of(tensors) if self._engine.lanes == 1 else versions_of(tensors)

    def _owners(self) -> Iterator[_Owner]:
        # a table that each lane would compute is a buffer of the first lane
        homes = self._engine.buffers.homes
        of_first = {id(home.registry.get(home.name)) for home in homes if home.rule == "first"}
        for root in self._engine.models.modules:
            for path, module in root.named_modules():
                kind = type(module)
                if is_installed(kind) or kind.get_extra_state is not Module.get_extra_state:
                    continue  # of a package, or its attributes may be in snapshots
                if self._engine.lanes == 1:
                    tensors = {n: p for n, p in module.named_parameters() if is_plain(p)}
                else:  # where no lane may change a parameter
                    tensors = {
                        name: buffer
                        for name, buffer in buffers_in(module).items()
                        if is_plain(buffer) and id(buffer) not in of_first
                    }
                yield _Owner(path or kind.__name__, module, _marks(module), tensors)


def _marks(module: Module) -> dict[str, Mark]:
    """Return the marks of a module's attributes, and of what small dicts and objects there have."""
    marks: dict[str, Mark] = {}
    for name, value in own_dict(module).items():
        if name in MODULE_DICTS:
            continue
        parts = {name: value}
        if type(value) is dict:
            parts |= {f"{name}[{key!r}]": part for key, part in islice(value.items(), MOST_PARTS)}
        elif may_be_replaced(value):
            attributes = islice(own_dict(value).items(), MOST_PARTS)
            parts |= {f"{name}.{key}": part for key, part in attributes}
        found = {path: _mark(part) for path, part in parts.items()}
        marks |= {path: mark for path, mark in found.items() if mark is not None}
    return marks


def _mark(value: Any) -> Mark | None:
    if isinstance(value, SCALARS):
        return Mark((type(value),), repr(value))
    if is_plain(value):
        return Mark((Tensor, value.shape, value.dtype), (id(value), *versions_of([value])))
    if is_array(value):
        return Mark((np.ndarray, value.shape, value.dtype), value.tobytes())
    return None


def _starts(
    owner: _Owner, changes: Mapping[str, Change], written: set[int], loss_code: Any
) -> Iterator[_Start]:
    """Yield flags that the first pass set and the code reads, with what it initialized."""
    initialized = [(name, value) for name, value in owner.tensors.items() if id(value) in written]
    if not initialized:
        return
    path, tensor = initialized[0]
    codes = [*owner.codes(), *([loss_code] if isinstance(loss_code, CodeType) else [])]
    for name, (before, now) in changes.items():
        uses = (_first_use(code, name) for code in codes)
        if _may_be_flag(before, now) and not {*READS, "LOAD_CONST"}.isdisjoint(uses):
            yield _Start(f"{owner.name}.{name}", f"{owner.name}.{path}", tensor)


def _may_be_flag(before: Mark | None, now: Mark) -> bool:
    if now.is_tensor:
        return before is not None and now.form[2] == torch.bool
    return now.content in FLAGS and (before is None or before.content in FLAGS)


def _kept(owner: _Owner, changes: Mapping[str, Change]) -> Iterator[str]:
    """Yield the names of attributes that a pass has read and then changed, not of caches."""
    same_form = {
        name: (before, now)
        for name, (before, now) in changes.items()
        if before is not None and before.form == now.form
    }
    if any(now.is_tensor for name, (_, now) in changes.items() if name not in same_form):
        return  # a cache has grown, and numbers are its size
    for name, (before, now) in same_form.items():
        is_in_place = now.is_tensor and now.content[0] == before.content[0]
        if is_in_place or any(
            _first_use(code, name) in READS and _stores(code, name) for code in owner.codes()
        ):
            yield name


def _attribute(name: str) -> str:
    """Return the attribute of a module that has a part."""
    return name.partition(".")[0].partition("[")[0]


def _first_use(code: CodeType, name: str) -> str:
    """Return the first instruction of code that names an attribute, "" if there is none."""
    attribute = _attribute(name)
    uses = (each.opname for each in dis.get_instructions(code) if each.argval == attribute)
    return next(uses, "")


def _stores(code: CodeType, name: str) -> bool:
    attribute = _attribute(name)
    is_part = attribute != name  # which is not stored by its name
    return is_part or any(
        each.opname == "STORE_ATTR" and each.argval == attribute
        for each in dis.get_instructions(code)
    )


def _initialized(start: _Start, lanes: int) -> LossError:
    advice = "Call the model on such samples before run.replicate"
    if lanes == 1:
        name = start.flag.rpartition(".")[2]
        advice += (
            f", or make the flag a buffer: register_buffer({name!r}, torch.tensor(False)), and"
            f" self.{name}.fill_(True)"
        )
    return LossError(
        f"the first forward pass initialized {start.name} and noted it in {start.flag}, an"
        " attribute that no snapshot has: a run that resumes would initialize it again, from other"
        f" samples, and lose what it has learned. {advice}"
    )
