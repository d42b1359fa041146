"""Values of a model in safetensors files, of which each worker reads its rows.

So a model may be larger than the memory of any worker. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module

from samestep.comm.base import World
from samestep.errors import ModelError
from samestep.sharded.parts import Part
from samestep.storage import read_regular
from samestep.torch_internals import buffers_in

INDEX: Final = "model.safetensors.index.json"
MOST_INDEX_BYTES: Final = 64 << 20
SHOWN: Final = 5  # names in an error
EXPORT: Final = "samestep snapshots export DIR model.safetensors"


class Weights:
    """The tensors of safetensors files that fit a model, by name."""

    def __init__(self, path: Path, model: Module, device: torch.device) -> None:
        """Raise `ModelError`, `OSError` or `SafetensorError` if there are none that fit."""
        self.files = files_of(path)
        self._device = device
        self._opened: dict[str, Any] = {}  # files by the names of their tensors
        for file in self.files:
            opened: Any = safe_open(file, "pt")
            self._opened.update(dict.fromkeys(opened.keys(), opened))
        self._stored_shapes: dict[str, list[int]] = {
            name: file.get_slice(name).get_shape() for name, file in self._opened.items()
        }
        every = model.state_dict(keep_vars=True).items()
        state = {name: tensor for name, tensor in every if isinstance(tensor, Tensor)}
        self._shapes = {name: [*tensor.shape] for name, tensor in state.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in state.items()}
        names = defaultdict[int, list[str]](list)  # of each tensor, tied ones have several
        for name, tensor in state.items():
            names[id(tensor)].append(name)
        self._stored: dict[str, str] = {}  # names in files, by the names of the model
        for of_one in names.values():
            stored = next((name for name in of_one if name in self._opened), "")
            self._stored.update(dict.fromkeys(of_one, stored))
        self._check(path, model)

    def _check(self, path: Path, model: Module) -> None:
        """Raise `ModelError` if tensors do not fit a model."""
        missing = [name for name, stored in self._stored.items() if not stored]
        extra = [name for name in self._opened if name not in self._stored]
        shapes = [
            f"{name!r} has shape {self._stored_shapes[stored]} there, and {self._shapes[name]} in"
            " the model"
            for name, stored in self._stored.items()
            if stored and self._stored_shapes[stored] != self._shapes[name]
        ]
        names = _listed("it has no", missing), _listed("the model has no", extra)
        problems = [*names, *shapes[:SHOWN]]
        if any(problems):
            raise ModelError(
                f"weights={str(path)!r} does not fit {type(model).__name__}:"
                f" {'; '.join(filter(None, problems))}. Names and shapes have to be those of"
                " model.state_dict()"
            )
        for name, buffer in model.named_buffers():
            if buffer.is_meta and name not in self._stored:
                raise ModelError(
                    f"buffer {name!r} is on the meta device and not in state_dict(), so it has no"
                    " values: compute it on a device, or in forward"
                )

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor, 1-D, on the device, in the model's dtype."""
        stored, shape = self._stored[name], self._shapes[name]
        if not shape:
            rows = self._opened[stored].get_tensor(stored).reshape(1)
        else:
            width = max(1, math.prod(shape[1:]))
            first, last = start // width, max(-(-stop // width), start // width + 1)
            values = self._opened[stored].get_slice(stored)[first:last].reshape(-1)
            rows = values[start - first * width : stop - first * width]
        return rows.to(self._device, self._dtypes[name])  # type: ignore[no-any-return]

    def of(self, part: Part) -> Tensor:
        """Return the values of the segment of a part."""
        return self.rows(part.name, part.low, part.high)

    def fill_buffers(self, model: Module) -> None:
        """Give the buffers of a model their values."""
        for prefix, module in model.named_modules():
            registry = buffers_in(module)
            for name, buffer in registry.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full in self._stored:
                    shape = self._shapes[full]
                    registry[name] = self.rows(full, 0, math.prod(shape)).view(shape)

    def identity(self) -> list[Any]:
        """Return JSON that is the same on workers that see the same files, most probably."""
        shapes = sorted([name, shape] for name, shape in self._stored_shapes.items())
        return [shapes, [file.stat().st_size for file in self.files]]


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files at a path: one, or a directory of them with their index."""
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        names = {*_weight_map(index).values()}
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index} names files in other directories, which are not read")
        return [path / name for name in sorted(names)]
    if (single := path / "model.safetensors").is_file():
        return [single]
    raise ModelError(
        f"weights={str(path)!r} must be a safetensors file, or a directory with"
        f" model.safetensors or {INDEX}; a snapshot becomes one with `{EXPORT}`"
    )


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        names = json.loads(read_regular(index, MOST_INDEX_BYTES, follows_links=True))["weight_map"]
        if all(isinstance(name, str) for name in names.values()):
            return names  # type: ignore[no-any-return]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    raise ModelError(f"{index} must have JSON with the file of each tensor in `weight_map`")


def open_together(path: str | Path, model: Module, device: torch.device, world: World) -> Weights:
    """Return the values of a model, and fill its buffers. Collective.

    Raises the same `ModelError` on all workers, even if only one of them cannot read a file.
    """
    weights, fault, identity = None, "", None
    try:
        weights = Weights(Path(path), model, device)
        identity = weights.identity()
    except (ModelError, OSError, SafetensorError) as error:
        fault = str(error) if isinstance(error, ModelError) else f"weights={str(path)!r}: {error}"
    answers = world.all_gather_json([fault, identity], "opening the weights of a model")
    for rank, (other_fault, other) in enumerate(answers):
        if other_fault:
            raise ModelError(f"worker {rank}: {other_fault}")
        if other != answers[0][1]:
            raise ModelError(f"weights={str(path)!r} differ between worker 0 and worker {rank}")
    if weights is None:
        raise ModelError(fault)
    weights.fill_buffers(model)
    return weights


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    return f"{what} {', '.join(map(repr, names[:SHOWN]))}{more}" if names else ""
