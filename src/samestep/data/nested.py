"""Values in nested containers: batches, and the states of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def parts_of(value: Any) -> dict[Any, Any]:
    """Return the parts of a mapping, list, tuple or dataclass by name, none of other values."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if not is_dataclass(value) or hasattr(value, "__len__"):
        return {}
    # fields in slots are not in `__dict__`, and attributes that are no fields are only there
    by_name = {field.name: getattr(value, field.name, None) for field in fields(value)}
    return {**by_name, **getattr(value, "__dict__", {})}


def values_in(value: Any, separator: str = ".", path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested containers and what they hold, with paths such as "0" or "inputs.ids"."""
    yield path, value
    for name, part in () if isinstance(value, Tensor) else parts_of(value).items():
        yield from values_in(part, separator, f"{path}{separator}{name}" if path else str(name))


def tensors_in(value: Any, separator: str = ".", path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers with their paths."""
    for name, part in values_in(value, separator, path):
        if isinstance(part, Tensor):
            yield name, part


def mapped(batch: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a batch with `fn` of every tensor, and of other objects with a method `to`."""
    if hasattr(batch, "to"):
        return fn(batch)
    if isinstance(batch, dict):
        return type(batch)((name, mapped(value, fn)) for name, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, fn) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(value, fn) for value in batch)
    return batch
