"""samestep: data-parallel training where any number of devices takes the same step, bit for bit.

    with samestep.init(lanes=8) as run: ...

What needs torch is loaded when it is first used, so that the command line starts without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    EvaluationError,
    HangError,
    LaunchError,
    LoaderError,
    LossError,
    ModelError,
    NonFiniteLossError,
    OptimizerError,
    OutOfMemoryError,
    RecordError,
    SamestepError,
    SnapshotError,
    VerifyError,
    WorkerError,
    WorldError,
)

# at once: the sub-package of the same name would take its place later
from samestep.launch import launch

if TYPE_CHECKING:
    from samestep.data.packed_list import PackedList
    from samestep.laws import check_metric
    from samestep.metrics import Metric
    from samestep.run import Run, init
    from samestep.step.means import Means

_HOME = {
    "Means": "samestep.step.means",
    "Metric": "samestep.metrics",
    "PackedList": "samestep.data.packed_list",
    "Run": "samestep.run",
    "check_metric": "samestep.laws",
    "init": "samestep.run",
}

__all__ = [
    "ConfigError",
    "DataError",
    "DivergenceError",
    "EvaluationError",
    "HangError",
    "LaunchError",
    "LoaderError",
    "LossError",
    "Means",
    "Metric",
    "ModelError",
    "NonFiniteLossError",
    "OptimizerError",
    "OutOfMemoryError",
    "PackedList",
    "RecordError",
    "Run",
    "SamestepError",
    "SnapshotError",
    "VerifyError",
    "WorkerError",
    "WorldError",
    "check_metric",
    "init",
    "launch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
