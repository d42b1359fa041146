"""Connect a process to the other workers, in the kind of world that fits their devices."""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.cluster import ProcessInfo, gloo_interface
from samestep.comm.base import Alone, Sizes, World
from samestep.comm.distributed import Distributed
from samestep.comm.rendezvous import rendezvous
from samestep.comm.shared_memory import Shared
from samestep.config import Config
from samestep.errors import ConfigError


def connect(
    process: ProcessInfo, config: Config, *, cuda: bool, gpus_are_shared: bool = False
) -> World:
    """Return the world of the worker `process`; all workers must make the same call.

    CPU workers that all share memory need nothing else. Others communicate through
    torch.distributed. With `cuda`, GPUs exchange through NCCL unless several workers share one.
    Raises `ConfigError` if there are fewer lanes than workers, `WorldError` if workers are missing.
    """
    if config.lanes is not None and process.world_size > config.lanes:
        raise ConfigError(
            f"lanes must be at least the number of workers ({process.world_size}), "
            f"got {config.lanes}; increase lanes"
        )
    if process.world_size == 1:
        return Alone()
    nccl = cuda and not gpus_are_shared
    found = rendezvous(process, config.timeout, share=not nccl)
    if found.mesh is not None and len(found.hosts) == 1:
        world: World = Shared(found)
    else:
        with gloo_interface(process.address):
            world = Distributed(found, cuda=nccl)
    return Staged(world) if gpus_are_shared else world


class Staged(World):
    """A world that copies GPU tensors to host memory and back; no memory is shared."""

    def __init__(self, world: World) -> None:
        self.rank, self.size, self.status = world.rank, world.size, world.status
        self.hosts = [range(rank, rank + 1) for rank in range(world.size)]
        self._world = world

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        self.barriers += 1
        return self._world.all_gather_bytes(data, what)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        self.barriers += 1
        return self._world.gather_bytes(data, what)

    def all_gather(self, out: Tensor, own: Tensor, what: str) -> None:
        received = torch.empty(out.shape, dtype=out.dtype)
        self._world.all_gather(received, own.cpu(), what)
        out.copy_(received)
        self.barriers += 1

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, own: Tensor, own_sizes: Sizes, what: str
    ) -> None:
        received = torch.empty(out.shape, dtype=out.dtype)
        self._world.all_to_all(received, out_sizes, own.cpu(), own_sizes, what)
        out.copy_(received)
        self.barriers += 1

    def broadcast(self, tensor: Tensor, what: str) -> None:
        received = tensor.cpu()
        self._world.broadcast(received, what)
        tensor.copy_(received)
        self.barriers += 1

    def barrier(self, what: str) -> None:
        self._world.barrier(what)
        self.barriers += 1

    def close(self) -> None:
        self._world.close()
