"""Form the world that fits a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestep.errors import ConfigError
from samestep.launch.place.interface import reached_from
from samestep.world.alone import Alone
from samestep.world.distributed import Distributed
from samestep.world.formation import form
from samestep.world.shared import Shared
from samestep.world.staged import Staged

if TYPE_CHECKING:
    from samestep.config import Config
    from samestep.launch.place import Place
    from samestep.world.base import World


def connect(place: Place, config: Config, *, cuda: bool, gpus_are_shared: bool = False) -> World:
    """Return the world of a worker at `place`; the others must make the same call. Raises `WorldError`.

    CPU workers that all share memory need nothing else; others talk through torch.distributed. With
    `cuda` GPUs exchange by NCCL, unless several workers use one.
    """
    if config.lanes is not None and place.workers > config.lanes:
        raise ConfigError(
            f"lanes={config.lanes} was given for {place.workers} workers; expected at least a lane a worker: raise lanes"
        )
    if place.workers == 1:
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
