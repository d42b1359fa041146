"""Checkpoints of torch.distributed.checkpoint (DCP): write one, and read one without running code.

A checkpoint is a directory. Its `.metadata` is a pickle that says which bytes of which file hold
which part of which tensor.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from samestep.errors import SnapshotError
from samestep.storage import open_regular, read_regular

METADATA: Final = ".metadata"
LARGEST_METADATA: Final = 2**30  # bytes
# their objects become a `_Fields`, whatever they do when they are unpickled
_DESCRIBING: Final = ("torch.distributed.checkpoint.", "pathlib")


def write_dcp(
    folder: Path, state: dict[str, dict[str, torch.Tensor]], read: Callable[[str], torch.Tensor]
) -> None:
    """Write a checkpoint of torch.distributed.checkpoint; `read` returns a tensor by its name.

    `state` holds tensors without values. Torch writes its `.metadata` as a pickle.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict_saver import save

    ((name, _),) = state.items()  # one object

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> torch.Tensor:  # one tensor at a time
            return read(index.fqn.removeprefix(f"{name}."))

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:  # without the path and a random number
            return StorageMeta()

    # one file per tensor: torch keeps all tensors of a file in memory until it is written
    writer = Writer(folder, single_file_per_rank=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
            # `no_dist`: this process writes alone, even if it is in a process group.
            save(state, storage_writer=writer, planner=Planner(), no_dist=True)
    except CheckpointException as error:  # not an `Exception`
        raise next(iter(error.failures.values()))[0] from None


def read_dcp(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tensors of a checkpoint that `torch.distributed.checkpoint.save` wrote.

    Unlike torch's own functions, it runs no code that the checkpoint may contain: the metadata is
    read without creating any object that it names, and the tensors are read with `weights_only`. It
    needs no process group; parts that several processes saved are put together.

    Args:
        directory: A local directory with the file `.metadata`.

    Returns:
        The state as nested dicts with tensors on the CPU. Values that are not tensors are left
        out, and a list becomes a dict by position.

    Raises:
        SnapshotError: There is no such checkpoint, a part of it is missing or damaged, it is
            compressed, or its metadata names something else than torch writes.

    Example:
        >>> from torch.distributed.checkpoint import save
        >>> _ = save({"model": {"weight": torch.ones(2)}}, checkpoint_id="checkpoint", no_dist=True)
        >>> ss.read_dcp("checkpoint")
        {'model': {'weight': tensor([1., 1.])}}
    """
    folder = Path(directory)
    try:
        content = read_regular(folder / METADATA, LARGEST_METADATA, follows_links=True)
        _check_lengths(content)  # before the unpickler allocates anything
        metadata = _Reader(io.BytesIO(content)).load().fields
        tensors = _read_tensors(folder, metadata)
        # torch flattens keys to names, and keeps the keys here
        paths = metadata["planner_data"] or {}
        return _nested({paths.get(name, (name,)): tensor for name, tensor in tensors.items()})
    except Exception as error:
        if not (folder / METADATA).is_file():
            raise SnapshotError(
                f"there is no checkpoint of torch.distributed.checkpoint in {folder}: expected its "
                f"file {METADATA}"
            ) from error
        raise SnapshotError(f"checkpoint {folder} cannot be read: {error}") from error


def _read_tensors(folder: Path, metadata: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    described = {name: entry.fields for name, entry in metadata["state_dict_metadata"].items()}
    shapes = {
        name: (fields["size"], fields["properties"].fields[0])
        for name, fields in described.items()
        if "size" in fields
    }
    needed = sum(prod(size) * dtype.itemsize for size, dtype in shapes.values())
    # A damaged or forged size must not allocate more than the checkpoint can fill.
    if needed > (present := sum(path.stat().st_size for path in folder.rglob("*"))):
        raise ValueError(f"its tensors have {needed} bytes, but its files only {present}")
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in shapes.items()}
    # Torch stores every element once, so counting them finds parts that are missing.
    missing = {name: tensor.numel() for name, tensor in tensors.items()}
    for index, stored in metadata["storage_data"].items():
        if (name := index.fields["fqn"]) in tensors:
            part = _read_part(folder, **stored.fields)
            _place(part, tensors[name], index.fields["offset"])
            missing[name] -= part.numel()
    if incomplete := [name for name, count in missing.items() if count]:
        raise ValueError(f"parts of {incomplete[0]!r} are missing")
    return tensors


class _Fields:
    """Stands for an object of the metadata, and holds what it was pickled with."""

    fields: Any = MappingProxyType({})

    def __init__(self, *_arguments: Any) -> None:
        pass

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


_STAND_INS: Final = {
    ("builtins", "getattr"): _Fields,  # Python 3.11.2 pickles enums by name
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Fields,
}


class _Reader(pickle.Unpickler):
    """Reads metadata: numbers, texts, containers, dtypes, and `_Fields` for everything else."""

    # The unpickler calls this for every class and function that the pickle names. It gets only
    # stand-ins, containers and dtypes, so no code of torch or of an attacker runs.
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_DESCRIBING):
            return _Fields
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"its metadata names {module}.{name}, which torch does not write there; it may be an "
            "attack"
        )


def _check_lengths(content: bytes) -> None:
    """Raise `ValueError` for a pickle that would take more memory than it is long."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name.endswith("PUT") and (argument or 0) > len(content):  # the size of a table
            raise ValueError("its metadata is damaged")


def _read_part(
    folder: Path,
    *,
    relative_path: str,
    offset: int,
    length: int,
    transform_descriptors: Sequence[str] = (),
) -> torch.Tensor:
    """Return a part of a tensor. The arguments are torch's names for where it is stored."""
    if transform_descriptors:
        raise ValueError(f"it is compressed ({', '.join(transform_descriptors)}); save it without")
    if Path(relative_path).is_absolute() or ".." in Path(relative_path).parts:
        raise ValueError(f"its metadata names a file outside of it, {relative_path}")
    with os.fdopen(open_regular(folder / relative_path, follows_links=True), "rb") as file:
        if os.fstat(file.fileno()).st_size - file.seek(offset) < length:
            raise ValueError(f"{relative_path} is truncated")
        data = file.read(length)
    # `weights_only` refuses to run code of the file.
    part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(part, torch.Tensor):
        raise TypeError(f"{relative_path} holds a {type(part).__name__}, expected a tensor")
    return part.detach()


def _place(part: torch.Tensor, tensor: torch.Tensor, offset: Sequence[int]) -> None:
    # a view; slices past the end make it smaller
    where = tensor[tuple(map(slice, offset, map(add, offset, part.shape)))]
    if where.shape != part.shape:
        raise ValueError(f"a part of shape {list(part.shape)} at {list(offset)} does not fit")
    where.copy_(part)


def _nested(tensors: Mapping[Sequence[str | int], torch.Tensor]) -> dict[str, Any]:
    """Return tensors in nested dicts, by the keys of each."""
    state: dict[str, Any] = {}
    for (*outer, last), tensor in tensors.items():
        place: Any = state
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = tensor
    return state
