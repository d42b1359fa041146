"""Placeholders for values that a lane must not read, because an earlier lane has left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from torch import Tensor
from typing_extensions import Self

from samestep.errors import LossError
from samestep.torch_internals import without_storage


class _OfAnotherLane(Tensor):
    """A placeholder for a tensor that an earlier lane left; all operations raise `LossError`."""

    place: str
    lane: int

    @classmethod
    def of(cls, tensor: Tensor, name: str, lane: int) -> _OfAnotherLane:
        """Return a placeholder that says which lane it is hidden from."""
        kind = type(cls.__name__, (cls,), {"place": name, "lane": lane})
        return without_storage(kind, tensor)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> None:
        arguments = [*args, *(kwargs or {}).values()]
        parts = [part for each in arguments for part in (each if type(each) is list else [each])]
        placeholder = next(part for part in parts if isinstance(part, cls))
        raise _was_read(placeholder.place, placeholder.lane)


class _Value:
    """What placeholders of numbers and arrays have in common."""

    place: str
    lane: int
    is_hidden: bool

    def read(self) -> None:
        """Raise `LossError` unless the lane has ended."""
        if self.is_hidden:
            raise _was_read(self.place, self.lane)

    def show(self) -> None:
        """Be a value like any other, because the lane has ended, which may have kept it."""
        self.is_hidden = False

    def plain(self) -> Any:
        """Return the value."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Be read by functions of torch, also as one of several tensors or numbers."""
        return func(*map(read, args), **{name: read(each) for name, each in (kwargs or {}).items()})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Be read by functions of NumPy."""
        return getattr(ufunc, method)(*map(read, inputs), **options)


def read(argument: Any) -> Any:
    """Return an argument of a function with plain values; hidden ones raise `LossError`."""
    if isinstance(argument, _Value):
        argument.read()
        return argument.plain()
    if type(argument) in {list, tuple}:
        return type(argument)(map(read, argument))
    return argument


class FloatOfAnotherLane(_Value, float):
    """A placeholder for a float that an earlier lane left; arithmetic raises `LossError`.

    It is a float, so that code in C, such as that of Python's `math`, reads its value.
    """

    def __new__(cls, value: float, place: str, lane: int) -> Self:
        self = super().__new__(cls, value)
        self.place, self.lane, self.is_hidden = place, lane, True
        return self

    def __reduce__(self) -> tuple[type[float], tuple[str]]:
        """Be copied and pickled as a plain float, such as in a list of results."""
        return float, (float.__repr__(self),)

    def plain(self) -> float:
        """Return the value."""
        return float(float.__repr__(self))


class IntOfAnotherLane(_Value, int):
    """A placeholder for an integer that an earlier lane left; what computes with it raises.

    A lane may count on, compare, and use it as an index, such as to print something once. So a sum
    of it and other integers is such a placeholder, too, which is hidden as long as its `origin`.
    """

    origin: IntOfAnotherLane

    def __new__(
        cls, value: int, place: str, lane: int, origin: IntOfAnotherLane | None = None
    ) -> Self:
        self = super().__new__(cls, value)
        self.place, self.lane, self.is_hidden = place, lane, True
        self.origin = self if origin is None else origin
        return self

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        """Be copied and pickled as a plain integer."""
        return int, (int.__repr__(self),)

    def read(self) -> None:
        """Raise `LossError` unless the lane has ended."""
        super(IntOfAnotherLane, self.origin).read()

    def plain(self) -> int:
        """Return the value."""
        return int(int.__repr__(self))

    def counted(self, name: str, *others: Any) -> Any:
        """Return the result of an operation with integers, of which the loss must not depend."""
        if not all(isinstance(other, int) for other in others):
            self.read()
        result = getattr(int, name)(self, *others)
        if not self.origin.is_hidden or type(result) is not int:
            return result
        return type(self)(result, self.place, self.lane, self.origin)


class ArrayOfAnotherLane(_Value):
    """A placeholder for an array of NumPy that an earlier lane left; it is no array for code in C.

    Its shape, dtype and text can be read.
    """

    def __init__(self, array: Any, place: str, lane: int) -> None:
        self.place, self.lane, self.is_hidden, self.array = place, lane, True, array
        self.shape, self.dtype, self.ndim, self.size = (
            array.shape, array.dtype, array.ndim, array.size,
        )  # fmt: skip

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that `isinstance` says what it is
        return np.ndarray

    def __getattr__(self, name: str) -> Any:
        self.read()
        return getattr(self.array, name)

    def __repr__(self) -> str:
        return repr(self.array)

    def __reduce__(self) -> Any:
        """Be copied and pickled as an array."""
        return np.array, (self.array,)

    def plain(self) -> Any:
        """Return the value."""
        return self.array

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Be read by functions of NumPy."""
        return func(*map(read, args), **{name: read(each) for name, each in kwargs.items()})


def _reading(kind: type, name: str) -> Callable[..., Any]:
    def operation(self: Any, *args: Any) -> Any:
        self.read()
        return getattr(kind, name)(self, *args)

    return operation


def _counting(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.counted(name, *args)


def _of_array(name: str) -> Callable[..., Any]:
    def operation(self: ArrayOfAnotherLane, *args: Any) -> Any:
        self.read()
        return getattr(self.array, name)(*map(read, args))

    return operation


BINARY: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
BOTH: Final = (*BINARY, *(f"r{name}" for name in BINARY), "neg", "abs")
ORDER: Final = ("lt", "le", "gt", "ge")
READS: Final = {"truediv", "rtruediv", "pow", "rpow", "float"}  # of an integer
IN_PLACE: Final = tuple(f"i{name}" for name in BINARY)
OTHERS: Final = (
    "eq", "ne", "matmul", "rmatmul", "getitem", "setitem", "len", "iter", "contains", "array",
    "bool", "float", "int", "copy", "deepcopy",
)  # fmt: skip
for each in (*BOTH, *ORDER):
    setattr(FloatOfAnotherLane, f"__{each}__", _reading(float, f"__{each}__"))
for each in (*BOTH, "float"):
    method = f"__{each}__"
    setattr(IntOfAnotherLane, method, _reading(int, method) if each in READS else _counting(method))
for each in (*BOTH, *ORDER, *IN_PLACE, *OTHERS):
    setattr(ArrayOfAnotherLane, f"__{each}__", _of_array(f"__{each}__"))


def placeholder_of(value: Any, name: str, lane: int) -> Any:
    """Return a placeholder for a tensor, array or number that says which lane it is hidden from."""
    if isinstance(value, Tensor):
        return _OfAnotherLane.of(value, name, lane)
    if isinstance(value, np.ndarray):
        return ArrayOfAnotherLane(value, name, lane)
    if isinstance(value, (int, np.integer)):
        return IntOfAnotherLane(int(value), name, lane)
    return FloatOfAnotherLane(value, name, lane)


def show(placeholder: Any) -> None:
    """Show the values that a placeholder has hidden, because its lane has ended."""
    for part in placeholder if isinstance(placeholder, tuple) else (placeholder,):
        if isinstance(part, _Value):
            part.show()


def _was_read(place: str, lane: int) -> LossError:
    return LossError(
        f"lane {lane} read {place}, which an earlier lane of this"
        " worker had set, so the result would depend on the number of workers. An average over"
        " samples is a buffer with a rule of run.replicate, or is computed from the means of all"
        " lanes: return a value as a metric (in the dict of the loss function, or with"
        " batch.backward(loss, name=...)), and update it behind the lanes, from what run.backward"
        " returns or batch.means; run.track keeps it over a resume. Or start each lane from a fixed"
        " value; a state of a sequence comes with the batch of run.streams"
    )
