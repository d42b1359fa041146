"""What the trainers of all packages do in the same way."""

from __future__ import annotations

import torch

from samestep.errors import ConfigError
from samestep.run import Run
from samestep.step.shard import SHARDABLE


def check_devices(run: Run, trainer: str) -> None:
    """Raise `ConfigError` if a worker has several devices, of which a trainer uses one."""
    if len(run.devices) > 1:
        raise ConfigError(
            f"{trainer} needs one device per worker, got {len(run.devices)}; start more workers"
        )


def shard_if_possible(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """Divide an optimizer among the workers where that gives the same bits."""
    if type(optimizer) in SHARDABLE:
        run.shard(optimizer)


def steps_per_epoch(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of steps of an epoch, the last of which may be short."""
    full_steps, rest = divmod(samples, batch_size)
    return full_steps + (rest > 0 and not drop_last)
