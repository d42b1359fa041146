"""What every `plain.py` needs around its loop: the device, batches on it, and a checkpoint to go on from."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from recipes.settings import SETTINGS_FILE, to_yaml

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT_FILE = "checkpoint.pt"


@cache
def device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def to_device(batch: Any) -> Any:
    """Return a batch with every tensor in it on the device; tuples and lists keep their types."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(to_device, batch))
    return type(batch)(map(to_device, batch)) if isinstance(batch, (list, tuple)) else batch


def autocast(precision: str) -> torch.autocast:
    """Return the context in which losses and scores are computed."""
    return torch.autocast(device().type, torch.bfloat16, enabled=precision == "bfloat16")


def write_settings(directory: Path | None, settings: Any) -> None:
    """Write settings as a file that makes the same run again."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / SETTINGS_FILE).write_text(to_yaml(settings), encoding="utf-8")


def save_checkpoint(directory: Path | None, done: int, **objects: Any) -> None:
    """Write the state of objects after `done` epochs or steps; what was there is replaced at once."""
    if directory is not None:
        part = directory / f"{CHECKPOINT_FILE}.part"
        torch.save(
            {"done": done, **{name: one.state_dict() for name, one in objects.items()}}, part
        )
        part.replace(directory / CHECKPOINT_FILE)


def load_checkpoint(directory: Path | None, **objects: Any) -> int:
    """Put objects back as they were saved; returns the epochs or steps that were done, 0 where there is no checkpoint."""
    if directory is None or not (directory / CHECKPOINT_FILE).exists():
        return 0
    state = torch.load(directory / CHECKPOINT_FILE, map_location=device(), weights_only=True)
    for name, one in objects.items():
        one.load_state_dict(state[name])
    return state["done"]
