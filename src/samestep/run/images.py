"""Images as the record takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from samestep.errors import RecordError

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
