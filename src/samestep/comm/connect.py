"""Form the world that fits a place."""

from __future__ import annotations

from samestep.cluster import ProcessInfo
from samestep.comm.base import Alone, World
from samestep.comm.distributed import Distributed, Staged
from samestep.comm.rendezvous import form
from samestep.comm.shared_memory import Shared
from samestep.config import Config
from samestep.errors import ConfigError
from samestep.host import reached_from


def connect(
    place: ProcessInfo, config: Config, *, cuda: bool, gpus_are_shared: bool = False
) -> World:
    """Return the world of a worker at `place`; the others must make the same call. Raises `WorldError`.

    CPU workers that all share memory need nothing else; others talk through torch.distributed. With
    `cuda` GPUs exchange by NCCL, unless several workers use one.
    """
    if config.lanes is not None and place.world_size > config.lanes:
        raise ConfigError(
            f"lanes={config.lanes} was given for {place.world_size} workers; expected at least a lane a worker: raise lanes"
        )
    if place.world_size == 1:
        return Alone()
    nccl = cuda and not gpus_are_shared
    formation = form(place, config.timeout, share=not nccl)
    on_one_host = formation.mesh is not None and len(formation.hosts) == 1
    if on_one_host:
        world: World = Shared(formation)
    else:
        with reached_from(place.address):
            world = Distributed(formation, cuda=nccl)
    return Staged(world) if gpus_are_shared else world
