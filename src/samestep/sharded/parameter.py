"""A sharded parameter in a module: it can be named and counted, and not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.nn import Parameter

from samestep.errors import ModelError
from samestep.torch_internals import set_class, without_torch_function

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


def guard(parameter: Parameter) -> None:
    """Let every operation that reads a sharded parameter raise `ModelError`."""
    set_class(parameter, _guarded(type(parameter)))


def _guarded(kind: type[Any]) -> Any:
    if kind in _KINDS:
        return _KINDS[kind]

    class ShardedParameter(kind):  # type: ignore[misc]
        """A DTensor of which user code reads no values."""

        __slots__ = ()
        is_sharded = True

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            name = getattr(func, "__name__", str(func))
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in HARMLESS or (name == "__get__" and attribute in VALUES):
                raise ModelError(READ.format(attribute if name == "__get__" else name))
            return without_torch_function(func, *args, **(kwargs or {}))

    _KINDS[kind] = ShardedParameter
    return ShardedParameter


_KINDS: dict[type, type] = {}
