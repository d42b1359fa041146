"""One worker alone: every call is the identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samestep.world.base import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Alone(World):
    """The world of one worker."""

    rank = 0
    size = 1

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return [data]

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        return [data]

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        if out.data_ptr() != own.data_ptr():
            out.copy_(own)

    def all_to_all(self, out: torch.Tensor, out_sizes: Sequence[int], own: torch.Tensor, own_sizes: Sequence[int], what: str) -> None:
        out.copy_(own)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        pass

    def barrier(self, what: str) -> None:
        pass

    def close(self) -> None:
        pass

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        return [value]

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        return [value]

    def gather_object(self, value: Any, what: str) -> list[Any] | None:
        return [value]

    def broadcast_object(self, value: Any, what: str) -> Any:
        return value
