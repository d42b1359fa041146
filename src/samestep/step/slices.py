"""A slice of a tensor: what one worker owns of something that is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorSlice:
    """Elements `[start, start + len(values))` of a tensor, counted in the tensor's storage order.

    `values` is 1-D. `shape` is the whole tensor's. `order` lists its dims from the slowest to the
    fastest in storage: `(0, 1, 2, 3)` for a contiguous tensor, `(0, 2, 3, 1)` for channels last.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    start: int
    order: tuple[int, ...]


def storage_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dims of `tensor` from the slowest to the fastest, or plain order where it is not dense."""
    if tensor.is_contiguous():
        return tuple(range(tensor.ndim))
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as 1-D in its storage order: a view where it is dense, a copy elsewhere."""
    return (
        tensor.view(-1)
        if tensor.is_contiguous()
        else tensor.permute(storage_order(tensor)).reshape(-1).contiguous()
    )
