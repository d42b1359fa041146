"""Helpers for the loop of a `plain.py`: the device, batches on it, and checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from recipes.settings import SettingsError

CHECKPOINT_FILE = "checkpoint.pt"


@cache
def device() -> torch.device:
    """Return the GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def to_device(batch: Any) -> Any:
    """Return a batch with all its tensors on the device; tuples and lists keep their types."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(to_device, batch))
    return type(batch)(map(to_device, batch)) if isinstance(batch, (list, tuple)) else batch


def autocast(precision: str) -> torch.autocast:
    """Return the context for losses and scores. Raises `SettingsError` for float16."""
    if precision == "float16":
        raise SettingsError("plain.py does not scale its loss, as precision=float16 needs")
    return torch.autocast(device().type, torch.bfloat16, enabled=precision == "bfloat16")


def save_checkpoint(directory: Path | None, done: int, **objects: Any) -> None:
    """Save the state of objects after `done` epochs or steps; replaces the last one atomically."""
    if directory is not None:
        part = directory / f"{CHECKPOINT_FILE}.part"
        states = {name: stateful.state_dict() for name, stateful in objects.items()}
        torch.save({"done": done, **states}, part)
        part.replace(directory / CHECKPOINT_FILE)


def load_checkpoint(directory: Path | None, **objects: Any) -> int:
    """Restore objects; return the completed epochs or steps, 0 if there is no checkpoint."""
    if directory is None or not (directory / CHECKPOINT_FILE).exists():
        return 0
    state = torch.load(directory / CHECKPOINT_FILE, map_location=device(), weights_only=True)
    for name, stateful in objects.items():
        stateful.load_state_dict(state[name])
    return state["done"]
