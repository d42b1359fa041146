"""Workers that share a GPU: NCCL refuses two of them on one, so what they exchange passes through host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samestep.world.base import World

if TYPE_CHECKING:
    from collections.abc import Sequence


class Staged(World):
    """A world of CPU workers that also takes tensors of GPUs, and copies them to the host and back. No memory is shared."""

    def __init__(self, world: World) -> None:
        self.rank, self.size, self.whereabouts = world.rank, world.size, world.whereabouts
        self.hosts = [range(rank, rank + 1) for rank in range(world.size)]
        self._world = world

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        self.meetings += 1
        return self._world.all_gather_bytes(data, what)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        self.meetings += 1
        return self._world.gather_bytes(data, what)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        received = torch.empty(out.shape, dtype=out.dtype)
        self._world.all_gather(received, own.cpu(), what)
        out.copy_(received)
        self.meetings += 1

    def all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> None:
        received = torch.empty(out.shape, dtype=out.dtype)
        self._world.all_to_all(received, out_sizes, own.cpu(), own_sizes, what)
        out.copy_(received)
        self.meetings += 1

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        received = tensor.cpu()
        self._world.broadcast(received, what)
        tensor.copy_(received)
        self.meetings += 1

    def barrier(self, what: str) -> None:
        self._world.barrier(what)
        self.meetings += 1

    def close(self) -> None:
        self._world.close()
