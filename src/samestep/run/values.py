"""Images as the record takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.errors import RecordError
from samestep.step.means import Means

CHANNELS = (1, 3)


def pixels(image: Any) -> NDArray[Any]:
    """Return an image as uint8 [H, W] or [H, W, 3]. Raises `RecordError` for other shapes and dtypes."""
    if not isinstance(image, torch.Tensor):
        image = torch.from_numpy(np.array(image))  # a copy: torch warns of arrays it may not write
    tensor: torch.Tensor = image.detach().cpu()
    # [C, H, W]
    if tensor.ndim == 3 and tensor.shape[0] in CHANNELS and tensor.shape[-1] not in CHANNELS:
        tensor = tensor.permute(1, 2, 0)
    if tensor.ndim == 3 and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    if tensor.ndim not in (2, 3) or (tensor.ndim == 3 and tensor.shape[-1] != CHANNELS[-1]):
        raise RecordError(
            f"an image of shape {tuple(tensor.shape)} was given; expected [H, W], [1, H, W], [3, H, W] or [H, W, 3]"
        )
    if tensor.is_floating_point():
        tensor = (tensor.clamp(0, 1) * 255).round().to(torch.uint8)
    if tensor.dtype != torch.uint8:
        raise RecordError(
            f"an image of {tensor.dtype} was given; expected uint8, or floating point in [0, 1]"
        )
    return tensor.contiguous().numpy()


Scalars: TypeAlias = dict[str, float]


def scalars_of(
    means: Mapping[str, Any], others: Mapping[str, Any]
) -> tuple[Scalars, Scalars, Scalars]:
    """Return values by name and, of those that are means over items, the lowest and the highest worker's.

    A mapping among `others` gives a value for each of its names, which get its own name and a slash
    in front.
    """
    values: Scalars = {}
    by_worker: dict[str, list[float]] = {}
    for name, value in [("", means), *others.items()]:
        if not isinstance(value, Mapping):
            values[name] = float(value)
            continue
        for inner, one in value.items():
            full = f"{name}/{inner}" if name else inner
            values[full] = float(one)
            if isinstance(value, Means):
                by_worker[full] = value.by_worker(inner)
    return (
        values,
        {name: min(some) for name, some in by_worker.items()},
        {name: max(some) for name, some in by_worker.items()},
    )
