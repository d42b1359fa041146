"""A sharded parameter in a module: its rows can be updated one by one, and not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor

from samestep.errors import ModelError
from samestep.sharded.parts import Part
from samestep.torch_internals import FOREACH, set_class, without_torch_function

READ: Final = (
    "a parameter of a sharded model was read by {}, but each worker has only some of its rows, and"
    " all of them only in the forward of its unit. Read it in `with run.full_parameters(model):`;"
    " a penalty belongs into the forward of the module that has the parameter"
)
# what does not depend on the values: properties, and these methods
HARMLESS: Final = frozenset(
    {"__get__", "__set__", "__hash__", "__format__", "__repr__", "data_ptr", "dim"}
    | {"is_complex", "is_contiguous", "is_floating_point", "numel", "requires_grad_", "size"}
    | {"stride", "untyped_storage"}
)
VALUES: Final = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # properties
# what gives each element the same bits wherever its row is, for averages of parameters
ELEMENTWISE: Final = frozenset(
    {"add", "addcdiv", "addcmul", "clone", "copy_", "detach", "div", "lerp", "mul", "sub", "to"}
    | {"add_", "addcdiv_", "addcmul_", "div_", "lerp_", "mul_", "sub_", "zero_"}
    | {"__rsub__"}
    | FOREACH
)


def guard(part: Part, await_readers: Callable[[], None]) -> None:
    """Let every operation that reads the sharded parameter of a part raise `ModelError`.

    Without autograd, elementwise ones compute with the rows of this worker. Before those that
    write them, `await_readers` frees what is gathered, on all workers.
    """
    set_class(part.sharded, _guarded(type(part.sharded)))
    vars(part.sharded)["ownership"] = Ownership(part, await_readers)


class Ownership:
    """What a worker owns of a parameter: elements of which a tensor in user code has values."""

    def __init__(self, part: Part, await_readers: Callable[[], None]) -> None:
        self._part = ref(part)  # weakly, because it is an attribute of what the part has
        self.extent, self.await_readers = (part.shape, part.low, part.high), await_readers

    @property
    def part(self) -> Part:
        """The part, as long as the model and its run exist."""
        part = self._part()
        if part is None:
            raise ModelError("a sharded model cannot be used after its run has ended")
        return part


class Guarded:
    """A tensor of user code that stands for the rows of a parameter that this worker has."""

    __slots__ = ()  # so that a parameter may become one
    is_sharded = True
    ownership: Ownership

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do what does not depend on values, or with those of this worker what may be."""
        name = getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ELEMENTWISE:
            return _computed(func, name, args, kwargs or {})
        if name not in HARMLESS or (name == "__get__" and attribute in VALUES):
            raise ModelError(READ.format(attribute if name == "__get__" else name))
        return without_torch_function(func, *args, **(kwargs or {}))


class Rows(Guarded, Tensor):
    """Values of the elements of a segment: the parameter's, or computed from them, [size]."""

    is_of_model = False  # has the model's memory

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has options
        return "rows of a sharded parameter"


def _rows(ownership: Ownership, values: Tensor, *, is_of_model: bool = False) -> Rows:
    result: Rows = without_torch_function(Tensor.as_subclass, values, Rows)
    vars(result).update(ownership=ownership, is_of_model=is_of_model)
    return result


def _computed(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return what an elementwise operation returns for the rows of this worker."""
    if kwargs.get("out") is not None:
        raise ModelError(READ.format(f"{name} with out="))
    is_each = name in FOREACH  # of lists
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    groups = zip(*lists, strict=False) if is_each else [args]
    owners = [_ownership_of(name, tensors) for tensors in groups]
    is_in_place = name.endswith("_") and not name.endswith("__")
    changed = _changed_by(args[0] if is_each else args[:1]) if is_in_place else []
    if changed:
        changed[0].await_readers()  # those of all models of the run
    with torch.no_grad():
        plain = [
            [*map(_plain, arg)] if isinstance(arg, (list, tuple)) else _plain(arg) for arg in args
        ]
        named = {key: _plain(value) for key, value in kwargs.items()}
        results = without_torch_function(func, *plain, **named)
    if is_in_place:
        for ownership in changed:
            ownership.part.publish()
        return args[0]
    if not is_each:
        is_alias = name in {"detach", "to"}
        is_of_model = is_alias and results.data_ptr() == owners[0].part.segment.data_ptr()
        return _rows(owners[0], results, is_of_model=is_of_model)
    pairs = zip(owners, results, strict=True)
    return [value if owner is None else _rows(owner, value) for owner, value in pairs]


def _changed_by(written: Iterable[Any]) -> list[Ownership]:
    """Return the ownerships of those tensors that have a model's memory."""
    guarded = [tensor for tensor in written if isinstance(tensor, Guarded)]
    return [t.ownership for t in guarded if not isinstance(t, Rows) or t.is_of_model]


def _ownership_of(name: str, values: Sequence[Any]) -> Any:
    """Return whose rows the tensors are, None without any; all have to have the same rows."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    owners = [value.ownership for value in tensors if isinstance(value, Guarded)]
    others = [value for value in tensors if not isinstance(value, Guarded)]
    has_graph = (
        name != "detach"
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
    )
    is_mixed = len({owner.extent for owner in owners}) > 1 or any(other.dim() for other in others)
    if owners and (has_graph or is_mixed):
        raise ModelError(READ.format(name))
    return owners[0] if owners else None


def _plain(value: Any) -> Any:
    """Return the segment of a sharded parameter; other values as they are."""
    is_parameter = isinstance(value, Guarded) and not isinstance(value, Rows)
    return value.ownership.part.segment.detach() if is_parameter else value


@cache
def _guarded(kind: type[Any]) -> Any:
    slots = {"__slots__": (), "own_rows": _own_rows}
    return type("ShardedParameter", (Guarded, kind), slots)


def _own_rows(parameter: Any) -> Tensor:
    """Return the elements of a sharded parameter that this worker alone owns, 1-D."""
    part: Part = parameter.ownership.part
    return part.segment.detach()[part.inner]
