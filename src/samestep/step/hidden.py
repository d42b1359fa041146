"""Placeholders for values that a lane must not read, because an earlier lane has left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

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


class FloatOfAnotherLane(float):
    """A placeholder for a float that an earlier lane left; arithmetic raises `LossError`.

    It is a float, so that code in C, such as that of torch, reads its value.
    """

    place: str
    lane: int
    is_hidden: bool

    def __new__(cls, value: float, place: str, lane: int) -> Self:
        self = super().__new__(cls, value)
        self.place, self.lane, self.is_hidden = place, lane, True
        return self

    def __reduce__(self) -> tuple[type[float], tuple[str]]:
        """Be copied and pickled as a plain float, such as in a list of results."""
        return float, (float.__repr__(self),)

    def show(self) -> None:
        """Be a float like any other, because the lane has ended, which may have kept it."""
        self.is_hidden = False


def _refusing(name: str) -> Callable[..., Any]:
    def operation(self: FloatOfAnotherLane, *args: Any) -> Any:
        if self.is_hidden:
            raise _was_read(self.place, self.lane)
        return getattr(float, name)(self, *args)

    return operation


BINARY: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for each in (*BINARY, *(f"r{name}" for name in BINARY), "neg", "abs", "lt", "le", "gt", "ge"):
    setattr(FloatOfAnotherLane, f"__{each}__", _refusing(f"__{each}__"))


def placeholder_of(value: Any, name: str, lane: int) -> Any:
    """Return a placeholder for a tensor or float, which says which lane it is hidden from."""
    if isinstance(value, Tensor):
        return _OfAnotherLane.of(value, name, lane)
    return FloatOfAnotherLane(value, name, lane)


def _was_read(place: str, lane: int) -> LossError:
    return LossError(
        f"lane {lane} read {place}, which an earlier lane of this"
        " worker had set, so the result would depend on the number of workers. Start each lane"
        " from a fixed value; a state of a sequence comes with the batch of run.streams, an"
        " average over samples is a buffer with a rule of run.replicate, and a metric is"
        " returned in the dict of the loss function. Or set it in the body of the loop"
    )
