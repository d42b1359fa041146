"""Initialize a ViT with the parameters of another run, of timm, PyTorch or PaddleViT.

No code from a file is run: .safetensors contains none, .pth is read with `weights_only`, and
.pdparams, a pickle, by a reader that only creates arrays.
"""

from __future__ import annotations

import difflib
import math
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from recipes.settings import SettingsError

HEAD = ("head.weight", "head.bias")
POSITIONS = "pos_embed"
WRAPPERS = ("state_dict", "model")  # keys of a state dict in a training script's file
AVERAGE_PREFIX = "module."  # of torch's AveragedModel and DistributedDataParallel
AVERAGE_COUNT = "n_averaged"
PADDLE_NAME_TABLE = "StructuredToParameterName@@"
PADDLE_NAMES = (  # in both generations of PaddleViT's ViT
    (r"patch_embedding\.patch_embedding\.", "patch_embed.proj."),
    (r"(patch_embedding\.)?position_embeddings?$", POSITIONS),
    (r"(patch_embedding\.)?cls_token$", "cls_token"),
    (r"encoder\.layers\.", "blocks."),
    (r"encoder\.encoder_norm\.", "norm."),
    (r"(blocks\.\d+)\.attn_norm\.", r"\1.norm1."),
    (r"(blocks\.\d+)\.mlp_norm\.", r"\1.norm2."),
    (r"(blocks\.\d+\.attn)\.out\.", r"\1.proj."),
    (r"classifier\.", "head."),
)


class PretrainedError(SettingsError):
    """A file cannot be read, contains more than tensors, or does not fit the model."""


def load_pretrained(model: nn.Module, path: Path) -> str:
    """Load the parameters in a file into a ViT; return a one-line description.

    The position embedding is resized to the model's image size. If the head is missing or has
    another number of classes, the model keeps its own. Raises `PretrainedError` that lists every
    other parameter that is missing, unexpected or of another shape.
    """
    saved, state = read_parameters(path), model.state_dict()
    done = [f"loaded {path}"]
    if POSITIONS in saved and saved[POSITIONS].shape[1] != state[POSITIONS].shape[1]:
        old, new = saved[POSITIONS].shape[1], state[POSITIONS].shape[1]
        done.append(f"position embedding resized from {old} to {new} tokens")
        saved[POSITIONS] = resized_positions(saved[POSITIONS], new)
    if any(name not in saved or len(saved[name]) != len(state[name]) for name in HEAD):
        classes = f"{len(saved[HEAD[0]])} classes" if HEAD[0] in saved else "none"
        size = len(state[HEAD[0]])
        done.append(f"head not loaded: it has {size} classes, the file has {classes}")
        saved |= {name: state[name] for name in HEAD}
    differences = _differences(saved, state)
    if differences:
        raise PretrainedError(f"{path} does not fit the model:\n  " + "\n  ".join(differences))
    model.load_state_dict(saved)
    return "; ".join(done)


def read_parameters(path: Path) -> dict[str, Tensor]:
    """Read the parameters in a file, with timm's names. Raises `PretrainedError`."""
    readers = {
        ".safetensors": load_file,
        ".pdparams": _read_paddle,
        **dict.fromkeys((".pth", ".pt", ".bin", ".tar"), _read_torch),
    }
    if path.suffix not in readers:
        raise PretrainedError(f"expected a file that ends in {', '.join(readers)}, got {path}")
    try:
        content = readers[path.suffix](path)
    except Exception as error:  # a damaged file can fail in any way
        raise PretrainedError(f"{path} cannot be read as {path.suffix}: {error}") from error
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping):
        raise PretrainedError(f"{path}: expected parameters by name, got {type(content).__name__}")
    if path.suffix == ".pdparams":
        content = _from_paddle(content)
    named = {
        str(name).removeprefix(AVERAGE_PREFIX): value
        for name, value in content.items()
        if name != AVERAGE_COUNT
    }
    strange = [name for name, value in named.items() if not isinstance(value, Tensor)]
    if strange:
        listed = ", ".join(strange[:8])
        raise PretrainedError(f"{path}: expected tensors by name; these are not tensors: {listed}")
    return named


def resized_positions(positions: Tensor, tokens: int) -> Tensor:
    """Resize a position embedding [1, 1 + height * width, features] to `tokens` tokens.

    The first token, the class token, is not changed. Bicubic over the grid of patches, as in
    Dosovitskiy et al. 2021. Raises `PretrainedError` if a grid is not square.
    """
    old, new = (math.isqrt(count - 1) for count in (positions.shape[1], tokens))
    if old**2 + 1 != positions.shape[1] or new**2 + 1 != tokens:
        got = f"{positions.shape[1]} and {tokens} tokens"
        raise PretrainedError(f"positions must be a class token and a square grid, got {got}")
    # [1, features, old, old]
    grid = positions[:, 1:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([positions[:, :1].float(), grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


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
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Torch's own message explains how to run code from the file.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        what = refused[1] if refused else "more than tensors"
        raise PretrainedError(f"expected tensors and plain values, got {what}") from None


def _read_paddle(path: Path) -> Any:
    with path.open("rb") as file:
        largest = path.stat().st_size
        # genops raises ValueError for anything longer than the file
        for code, argument, _ in pickletools.genops(file):
            # pickle allocates memory for all smaller numbers
            if "PUT" in code.name and not 0 <= int(argument) <= largest:
                raise PretrainedError(f"object number {argument} exceeds the {largest} bytes")
        file.seek(0)
        return ArrayReader(file).load()


class ArrayReader(pickle.Unpickler):
    """Reads a pickle of NumPy arrays in plain containers, as `paddle.save` writes it.

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

    def __setstate__(self, state: tuple[int, tuple[int, ...], Number, bool, bytes]) -> None:
        _, shape, number, by_column, data = state
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


def _from_paddle(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return Paddle's arrays as tensors with timm's names and linear weights transposed."""
    named = {}
    for name, value in content.items():
        if name == PADDLE_NAME_TABLE:
            continue
        array = value[-1] if isinstance(value, tuple) and value else value
        new_name = str(name)
        for pattern, replacement in PADDLE_NAMES:
            new_name = re.sub(f"^{pattern}", replacement, new_name)
        tensor = array.tensor if isinstance(array, Array) else None
        named[new_name] = (
            value if tensor is None else tensor.T.contiguous() if tensor.ndim == 2 else tensor
        )
    return named
