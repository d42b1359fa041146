"""Form the world that fits a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestep.errors import ConfigError
from samestep.world.alone import Alone
from samestep.world.distributed import Distributed
from samestep.world.formation import form
from samestep.world.shared import Shared

if TYPE_CHECKING:
    from samestep.config import Config
    from samestep.launch.place import Place
    from samestep.world.base import World


def connect(place: Place, config: Config, *, cuda: bool) -> World:
    """Return the world of a worker at `place`; the others must make the same call. Raises `WorldError`.

    Workers that all share memory need nothing else; others talk through torch.distributed.
    """
    if config.lanes is not None and place.workers > config.lanes:
        raise ConfigError(f"lanes={config.lanes} was given for {place.workers} workers; expected at least a lane a worker: raise lanes")
    if place.workers == 1:
        return Alone()
    formation = form(place, config.timeout_seconds, share=not cuda)
    if formation.mesh is not None and len(formation.hosts) == 1:
        return Shared(formation.mesh)
    return Distributed(formation, cuda=cuda)
