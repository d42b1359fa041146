"""Form the world that a place asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestep.errors import ConfigError
from samestep.world.alone import Alone
from samestep.world.distributed import Distributed

if TYPE_CHECKING:
    from samestep.config import Config
    from samestep.world.base import World


def connect(workers: int, config: Config, *, cuda: bool) -> World:
    """Return the world of `workers` workers; the others must make the same call. Raises `WorldError`."""
    if config.lanes is not None and workers > config.lanes:
        raise ConfigError(f"lanes={config.lanes} was given for {workers} workers; expected at least a lane a worker: raise lanes")
    return Alone() if workers == 1 else Distributed(cuda=cuda, timeout_seconds=config.timeout_seconds)
