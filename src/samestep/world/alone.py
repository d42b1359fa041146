"""One worker alone: every call is the identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from samestep.world.base import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

Value = TypeVar("Value")


class Alone(World):
    """The world of one worker, which has met all workers whenever it calls."""

    rank = 0
    size = 1
    hosts = (range(1),)

    def _met(self, value: Value) -> Value:
        self.meetings += 1
        return value

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self._met([data])

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        return self._met([data])

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        self.all_to_all(out, [len(out)], own, [len(own)], what)

    def all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> None:
        if out.data_ptr() != own.data_ptr():
            out.copy_(own)
        self._met(None)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        self._met(None)

    def barrier(self, what: str) -> None:
        self._met(None)

    def close(self) -> None:
        pass

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        return self._met([value])

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        return self._met([value])

    def gather_object(self, value: Any, what: str) -> list[Any] | None:
        return self._met([value])

    def broadcast_object(self, value: Any, what: str) -> Any:
        return self._met(value)
