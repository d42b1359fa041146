"""samestep: data-parallel training where any number of devices takes the same step, bit for bit.

    with samestep.init(lanes=8) as run: ...

The names below are loaded when they are first used, so that the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.errors import (
    ConfigError,
    DataError,
    EvaluationError,
    LaunchError,
    LoaderError,
    LossError,
    ModelError,
    NonFiniteLossError,
    OptimizerError,
    RecordError,
    SamestepError,
    SnapshotError,
    VerifyError,
    WorkerError,
    WorldError,
)

if TYPE_CHECKING:
    from samestep.launch import launch
    from samestep.run import Run, init
    from samestep.step.means import Means

_HOME = {"Means": "samestep.step.means", "Run": "samestep.run", "init": "samestep.run", "launch": "samestep.launch"}

__all__ = [
    "ConfigError",
    "DataError",
    "EvaluationError",
    "LaunchError",
    "LoaderError",
    "LossError",
    "Means",
    "ModelError",
    "NonFiniteLossError",
    "OptimizerError",
    "RecordError",
    "Run",
    "SamestepError",
    "SnapshotError",
    "VerifyError",
    "WorkerError",
    "WorldError",
    "init",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
