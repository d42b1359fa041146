"""Read files of parameters, and load them into a model.

No code from a file is run: .safetensors contains none, .pth is read with `weights_only`, and
.pdparams and .pkl, which are pickles, by a reader that only creates arrays.
"""

from __future__ import annotations

import argparse
import difflib
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from recipes.settings import SettingsError

WRAPPERS = ("state_dict", "model", "blobs")  # keys of a state dict in a training script's file
AVERAGE_PREFIX = "module."  # of torch's AveragedModel and DistributedDataParallel
AVERAGE_COUNT = "n_averaged"
PADDLE_NAME_TABLE = "StructuredToParameterName@@"


class PretrainedError(SettingsError):
    """A file cannot be read, contains more than tensors, or does not fit the model."""


def read_parameters(path: Path) -> dict[str, Tensor]:
    """Read the parameters in a file, with the file's names. Raises `PretrainedError`."""
    content = read_file(path)
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping):
        raise PretrainedError(f"{path}: expected parameters by name, got {type(content).__name__}")
    named = {
        str(name).removeprefix(AVERAGE_PREFIX): _tensor(value)
        for name, value in content.items()
        if name not in (AVERAGE_COUNT, PADDLE_NAME_TABLE)
    }
    strange = [name for name, value in named.items() if not isinstance(value, Tensor)]
    if strange:
        listed = ", ".join(strange[:8])
        raise PretrainedError(f"{path}: expected tensors by name; these are not tensors: {listed}")
    return named


def read_file(path: Path) -> Any:
    """Read the content of a file, in which pickled arrays are `Array`. Raises `PretrainedError`."""
    readers = {
        ".safetensors": load_file,
        **dict.fromkeys((".pdparams", ".pkl"), _read_arrays),
        **dict.fromkeys((".pth", ".pt", ".bin", ".tar"), _read_torch),
    }
    if path.suffix not in readers:
        raise PretrainedError(f"expected a file that ends in {', '.join(readers)}, got {path}")
    try:
        return readers[path.suffix](path)
    except Exception as error:  # a damaged file can fail in any way
        raise PretrainedError(f"{path} cannot be read as {path.suffix}: {error}") from error


def renamed(name: str, patterns: Iterable[tuple[str, Any]]) -> str:
    """Return a name after replacing each pattern by its replacement, as `re.sub` does."""
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def load(
    model: nn.Module,
    saved: Mapping[str, Tensor],
    path: Path,
    *,
    head: str,
    outputs: str,
    evaluates: bool,
) -> list[str]:
    """Load parameters by name into a model; return what was not loaded, for people.

    If the layer `head` is missing or has another number of `outputs` (such as classes), the model
    keeps its own, unless it `evaluates`. Raises `PretrainedError` for that, and with a list of
    every other parameter that is missing, unexpected or of another shape.
    """
    saved, state, notes = dict(saved), model.state_dict(), []
    layer = {name for name in state if name.startswith(f"{head}.")}
    if any(name not in saved or len(saved[name]) != len(state[name]) for name in layer):
        weight = f"{head}.weight"
        got = f"{len(saved[weight])} {outputs}" if weight in saved else "none"
        size = f"{len(state[weight])} {outputs}"
        if evaluates:
            raise PretrainedError(
                f"{path} does not fit the model: {head} has {size}, the file has {got}; scores of "
                "a head that is not trained mean nothing"
            )
        notes.append(f"{head} not loaded: it has {size}, the file has {got}")
        saved |= {name: state[name] for name in layer}
    check_fit(path, saved, state)
    model.load_state_dict(saved)
    return notes


def check_fit(path: Path, saved: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise `PretrainedError` that lists all differences between the names and shapes of both."""
    if differences := _differences(saved, state):
        raise PretrainedError(f"{path} does not fit the model:\n  " + "\n  ".join(differences))


def _differences(saved: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    left_over = sorted(saved.keys() - state.keys())
    lines = []
    for name in state:
        if name not in saved:
            near = difflib.get_close_matches(name, left_over, n=1)
            hint = f"; the nearest name in the file is {near[0]}" if near else ""
            lines.append(f"{name} is missing{hint}")
        elif saved[name].shape != state[name].shape:
            expected, got = tuple(state[name].shape), tuple(saved[name].shape)
            lines.append(f"{name} must have shape {expected}, got {got}")
    for name in left_over:
        near = difflib.get_close_matches(name, state, n=1)
        hint = f"; the nearest name there is {near[0]}" if near else ""
        lines.append(f"{name} is not in the model{hint}")
    return lines


# Files that may be pickles


def _read_torch(path: Path) -> Any:
    try:
        # timm's training files have the arguments of the script: attributes, and no code
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Torch's own message explains how to run code from the file.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        what = refused[1] if refused else "more than tensors"
        raise PretrainedError(f"expected tensors and plain values, got {what}") from None


def _read_arrays(path: Path) -> Any:
    with path.open("rb") as file:
        largest = path.stat().st_size
        # genops raises ValueError for anything longer than the file
        for code, argument, _ in pickletools.genops(file):
            # pickle allocates memory for all smaller numbers
            if "PUT" in code.name and not 0 <= int(argument) <= largest:
                raise PretrainedError(f"object number {argument} exceeds the {largest} bytes")
        file.seek(0)
        return ArrayReader(file, encoding="latin1").load()  # bytes of Python 2 are text to it


class ArrayReader(pickle.Unpickler):
    """Reads a pickle of NumPy arrays in plain containers, as PaddlePaddle and Caffe2 write it.

    Raises `UnpicklingError` on anything else.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLED:
            raise pickle.UnpicklingError(
                f"expected NumPy arrays in plain containers, got {module}.{name}"
            )
        return PICKLED[module, name]


class Number:
    """A substitute for `numpy.dtype`, which a damaged pickle could use to read out of bounds."""

    def __init__(self, code: str, *_: bool) -> None:
        if not re.fullmatch(r"[biuf]\d", code):
            raise pickle.UnpicklingError(f"expected numbers, got elements of type {code!r}")
        self._code = code
        self._order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = state[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of elements."""
        return np.dtype(self._code).newbyteorder(self._order)


class Array:
    """A substitute for `numpy.ndarray`; `tensor` has its values."""

    tensor: Tensor | None = None

    def __setstate__(self, state: tuple[int, tuple[int, ...], Number, bool, bytes | str]) -> None:
        _, shape, number, by_column, data = state
        data = data.encode("latin1") if isinstance(data, str) else data
        values = np.frombuffer(data, number.dtype).reshape(shape, order="F" if by_column else "C")
        self.tensor = torch.from_numpy(values.astype(number.dtype.newbyteorder("="), order="C"))


def _new_array(*_: object) -> Array:
    return Array()


def _latin1(text: str, encoding: str) -> bytes:
    """Replace `_codecs.encode`, which protocol 2 uses to write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"expected encoding latin1, got {encoding}")
    return text.encode(encoding)


PICKLED = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): None,  # only given to _reconstruct
    ("numpy", "dtype"): Number,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _latin1,
    # A tensor in nested containers is written as tuple((name, array)).
    ("builtins", "tuple"): tuple,
    ("__builtin__", "tuple"): tuple,
}


def _tensor(value: Any) -> Any:
    """Return the tensor of a pickled array; Paddle writes some as a tuple of name and array."""
    array = value[-1] if isinstance(value, tuple) and value else value
    return array.tensor if isinstance(array, Array) and array.tensor is not None else value
