"""Compare tensors bit by bit: 0.0 differs from -0.0, and a NaN equals itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in row-major order."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the bits, shapes and dtypes of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + bits(tensor))
    return sha.hexdigest()
