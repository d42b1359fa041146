"""Export one object of a snapshot to a plain safetensors file that other tools read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from samestep.errors import SnapshotError
from samestep.snapshot.files import appearing
from samestep.snapshot.read import load


def export(snapshot: Path, destination: Path, name: str = "model") -> list[str]:
    """Write the tensors of object `name` under their usual names, in their logical shapes; tied ones under each name.

    Nested names are joined by dots. A file that is there is replaced at once. Returns the names of
    what is no tensor and was left out. Raises `SnapshotError` if the snapshot is not whole, holds
    no such tensors, or the file cannot be written.
    """
    loaded = load(snapshot, [name])
    leaves = list(_leaves(loaded.state[name], ""))
    tensors = {key: value.contiguous() for key, value in leaves if isinstance(value, torch.Tensor)}
    if not tensors:
        raise SnapshotError(
            f"{name!r} of snapshot {snapshot} holds no tensors to export; choose another object"
        )
    if len({key for key, _ in leaves}) < len(leaves):
        raise SnapshotError(
            f"{name!r} of snapshot {snapshot} has two tensors of one name once nested names are joined by dots"
        )
    metadata = {"format": "pt", "samestep.step": str(loaded.step), "samestep.object": name}
    try:
        with appearing(destination) as temporary:
            save_file(tensors, temporary, metadata)
    except (KeyError, OSError, SafetensorError, ValueError) as error:
        raise SnapshotError(
            f"{name!r} of snapshot {snapshot} could not be exported to {destination}: {error}"
        ) from error
    return [key for key, _ in leaves if key not in tensors]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
