"""Conversion of nested state to plain JSON and named tensors, and back, without pickle.

Types and bits are preserved. JSON values represent themselves. Any other value is an object with
one tag: `{"tuple": [1, 2]}`, `{"tensor": "model/weight"}`, `{"dict": [[key, value], ...]}` (pairs,
since keys may be numbers and have an order). A tensor is named by its path in the state. Workers
convert their parts of a state separately; `merge` combines the JSON.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import torch

from samestep.errors import SnapshotError
from samestep.step.hidden import FloatOfAnotherLane, IntOfAnotherLane
from samestep.step.layout import TensorSlice
from samestep.step.optimizer_state import LockedState
from samestep.torch_internals import STATE_METADATA

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
Tensors: TypeAlias = dict[str, torch.Tensor | TensorSlice]
States: TypeAlias = Mapping[str, Any]  # of objects, by name
Keys: TypeAlias = tuple[str, ...]

DEEPEST: Final = 100  # levels; Python's JSON raises RecursionError at about three times as many
SHORT: Final = 60  # characters of a value in an error
_DTYPE_NAMES: Final = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)  # fmt: skip
DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)
}
_NUMPY_KINDS: Final = "biufcmMUS"  # without Python objects, which only pickle can save
_INVALID: Final = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error,
)  # fmt: skip
_MAPPINGS: Final[dict[str, type]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: Final[dict[str, type]] = {"list": list, "tuple": tuple, "torch.Size": torch.Size}
_SETS: Final[dict[str, type]] = {"set": set, "frozenset": frozenset}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# Paths have other keys as JSON, so that 0 and "0" differ.
_NAME: Final = re.compile(
    r'(?!(?:true|false|null|-?\d[\d.e+\-]*)\Z)[^/"{\ud800-\udfff][^/\ud800-\udfff]*'
)


@dataclass(frozen=True)
class _Leaf:
    """The exact conversion of values of one type to text and back."""

    kind: type
    to_text: Callable[[Any], str]
    from_text: Callable[[str], Any]


def _numpy_scalar(text: str) -> Any:
    dtype, _, data = text.rpartition(":")
    return np.frombuffer(bytes.fromhex(data), _numpy_dtype(dtype))[0]


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(name)
    return dtype


_LEAVES: Final[dict[str, _Leaf]] = {
    "int": _Leaf(int, hex, lambda text: int(text, 16)),  # for integers that JSON cannot hold
    "float": _Leaf(  # for NaN and infinities, with their bits
        float,
        lambda value: struct.pack(">d", value).hex(),
        lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    ),
    "complex": _Leaf(
        complex,
        lambda value: struct.pack(">dd", value.real, value.imag).hex(),
        lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    ),
    "str": _Leaf(  # for lone surrogates, as in names of files
        str,
        lambda value: value.encode("utf-8", "surrogatepass").hex(),
        lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
    "bytes": _Leaf(bytes, bytes.hex, bytes.fromhex),
    "torch.dtype": _Leaf(
        torch.dtype,
        lambda value: str(value).removeprefix("torch."),
        lambda text: {
            str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
        }[f"torch.{text}"],
    ),
    "torch.device": _Leaf(torch.device, str, torch.device),
    "numpy": _Leaf(
        np.generic, lambda value: f"{value.dtype.str}:{value.tobytes().hex()}", _numpy_scalar
    ),
}
_TAGS: Final[dict[type, str]] = {
    **{kind: tag for tag, kind in (_MAPPINGS | _SEQUENCES | _SETS).items()},
    **{leaf.kind: tag for tag, leaf in _LEAVES.items()},
}


def canonical(plain: Plain) -> str:
    """Return the canonical text of a JSON value: sorted keys, no spaces, ASCII."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def flatten(state: object) -> tuple[Plain, Tensors]:
    """Split nested state into JSON and tensors by name; `restore` is its inverse.

    Tensors are not copied. Each tied tensor has its own name, so that names depend only on the
    structure. Raises `SnapshotError` with the path of an unsupported value.
    """
    tensors: Tensors = {}
    return _encode(state, (), tensors), tensors


def flatten_plain(state: object, what: str) -> Plain:
    """Convert nested state without tensors to JSON. Raises `SnapshotError` for tensors."""
    return _encode(state, (what,), None)


def copy_plain(state: Any, what: str) -> Any:
    """Return a deep copy of nested state without tensors. Raises `SnapshotError` for tensors."""
    return restore(flatten_plain(state, what), no_tensor)


def no_tensor(name: str) -> torch.Tensor:
    """Raise `SnapshotError`; passed to `restore` for states without tensors."""
    raise SnapshotError(f"expected plain values only, got tensor {name!r}")


def restore(plain: Plain, tensor: Callable[[str], Any]) -> Any:
    """Return the state that `flatten` split; `tensor` returns a complete tensor by name.

    Raises `SnapshotError` for JSON that `flatten` does not produce.
    """
    try:
        return _decode(plain, tensor)
    except _INVALID as error:
        raise SnapshotError(f"invalid plain state ({type(error).__name__}: {error})") from error


def merge(first: Any, second: Any, path: Keys = ()) -> Plain:
    """Merge two parts of a state: dictionaries key by key, and all other values must be equal.

    Raises `SnapshotError` with the path at which the parts differ.
    """
    tag, other = (
        next(iter(part), None) if isinstance(part, dict) else None for part in (first, second)
    )
    if tag not in _MAPPINGS or tag != other:
        if canonical(first) != canonical(second):
            raise SnapshotError(
                f"{'/'.join(path) or 'the state'} must be equal on all workers, or a dictionary in "
                f"which each worker has its own keys, got {_short(first)} and {_short(second)}"
            )
        equal: Plain = first
        return equal
    merged: dict[str, list[Plain]] = {}  # by the key's JSON, since 1 and True are equal in Python
    for key, value in [*first[tag], *second[tag]]:
        earlier = merged.get(name := canonical(key))
        combined = merge(earlier[1], value, (*path, _component(key))) if earlier else value
        merged[name] = [key, combined]
    return {tag: list(merged.values())}


def _encode(value: Any, path: Keys, tensors: Tensors | None) -> Plain:
    """Return the JSON of a value, and add its tensors to `tensors` if tensors are allowed."""
    if len(path) > DEEPEST:
        raise SnapshotError(
            f"{'/'.join(path[:3])}/... must be nested at most {DEEPEST} levels deep, and must not "
            "contain itself"
        )
    if type(value) in {FloatOfAnotherLane, IntOfAnotherLane}:  # in a list of results
        value = value.plain()
    if _is_json(value):
        return value  # type: ignore[no-any-return]
    tag = _TAGS.get(type(value))
    if isinstance(value, np.generic):
        tag = "numpy" if value.dtype.kind in _NUMPY_KINDS and value.dtype.itemsize else None
    if tag is None:
        return _encode_tensor(value, path, tensors)
    if tag in _LEAVES:
        return {tag: _LEAVES[tag].to_text(value)}
    if tag in _MAPPINGS:
        return _encode_mapping(tag, value, path, tensors)
    if tag in _SETS:
        # Sorted, since the order of a set differs between processes.
        members = [_encode(item, (*path, "item"), None) for item in value]
        return {tag: sorted(members, key=canonical)}
    items = [_encode(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
    return items if tag == "list" else {tag: items}


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        # Python reads long numbers in decimal only up to a limit
        return bool(-(2**63) <= value < 2**64)
    if kind is float:
        return math.isfinite(value)
    if kind is str:
        return _SURROGATE.search(value) is None
    return value is None or kind is bool


def _encode_mapping(tag: str, value: Any, path: Keys, tensors: Tensors | None) -> Plain:
    pairs: list[Plain] = []
    for key, item in value.items():
        plain_key = _encode(key, (*path, "key"), None)
        pairs.append([plain_key, _encode(item, (*path, _component(plain_key)), tensors)])
    metadata = getattr(value, STATE_METADATA, None)  # versions of submodules in a module's state
    if metadata is None:
        return {tag: pairs}
    return {"module": [{tag: pairs}, _encode(metadata, (*path, STATE_METADATA), None)]}


def _encode_tensor(value: Any, path: Keys, tensors: Tensors | None) -> Plain:
    name = "/".join(path)
    if type(value) is np.ndarray and value.dtype.kind in _NUMPY_KINDS and tensors is not None:
        # uint8 [nbytes], a copy
        tensors[name] = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        return {"numpy.ndarray": [value.dtype.str, list(value.shape), name]}
    if isinstance(value, TensorSlice):
        size = value.values.numel()
        if value.values.ndim != 1 or not 0 <= value.start <= math.prod(value.shape) - size:
            raise SnapshotError(
                f"{name} must be a 1-D slice inside of shape {value.shape}, got {size} elements "
                f"of {value.values.ndim} dims from {value.start}"
            )
        tensor: torch.Tensor | TensorSlice = replace(value, values=_dense(value.values, name))
    else:
        tensor = _dense(value, name)
    if tensors is None:
        _refuse(name, "a tensor in a key, a set or plain information")
    tensors[name] = tensor
    return {"tensor": name}


def _dense(value: Any, name: str) -> torch.Tensor:
    if isinstance(value, LockedState):
        value.refuse()
    # subclasses such as DTensor hold more
    if type(value) not in {torch.Tensor, torch.nn.Parameter}:
        _refuse(name, f"a {type(value).__module__}.{type(value).__qualname__}")
    if value.layout != torch.strided or value.is_meta or value.dtype not in DTYPES.values():
        _refuse(name, f"a tensor of {value.dtype}, {value.layout}, on {value.device}")
    # lazy conjugates have other bytes in memory
    tensor: torch.Tensor = value.detach().resolve_conj().resolve_neg()
    return tensor


def _refuse(name: str, what: str) -> NoReturn:
    raise SnapshotError(
        f"{name or 'the state'} is {what}, which a snapshot cannot hold; give the object a "
        "state_dict of dense tensors and plain values"
    )


def _component(key: Plain) -> str:
    """Return a key's name in a path: unique, and without a slash."""
    if isinstance(key, str) and _NAME.fullmatch(key):
        return key
    return canonical(key).replace("/", "\\u002f")


def _decode(plain: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(plain, list):
        return [_decode(item, tensor) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, value),) = plain.items()
    result: Any
    if tag in _LEAVES:
        result = _LEAVES[tag].from_text(value)
    elif tag in _MAPPINGS:
        pairs = [(_decode(key, tensor), _decode(item, tensor)) for key, item in value]
        result = _MAPPINGS[tag](dict(pairs))
        if len(result) != len(pairs):
            raise ValueError("duplicate key")
    elif tag in _SEQUENCES or tag in _SETS:
        result = (_SEQUENCES | _SETS)[tag](_decode(item, tensor) for item in value)
    elif tag == "tensor":
        result = tensor(value)
    elif tag == "numpy.ndarray":
        dtype, shape, name = value
        result = tensor(name).numpy().view(_numpy_dtype(dtype)).reshape(shape)
    elif tag == "module":
        result, metadata = (_decode(item, tensor) for item in value)
        vars(result)[STATE_METADATA] = metadata
    else:
        raise ValueError(tag)
    return result


def _short(plain: Plain) -> str:
    text = canonical(plain)
    return text if len(text) <= SHORT else f"{text[:SHORT]}..."
