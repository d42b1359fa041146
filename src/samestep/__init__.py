"""Data-parallel training with the same result, bit for bit, on any number of devices.

    with samestep.init(lanes=8) as run: ...

Names that need torch are imported on first use, so that the command line starts without it.
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
    RecheckError,
    RecordError,
    SamestepError,
    SnapshotError,
    VerifyError,
    WorkerError,
    WorldError,
)

# not on first use: by then the subpackage may have replaced the function
from samestep.launch import launch

if TYPE_CHECKING:
    from samestep.data.batch import PackedList
    from samestep.data.orders import ByLength, ShardOrder, Weighted
    from samestep.data.packed import Packed
    from samestep.data.shards import ShardedDataset
    from samestep.data.token_file import TokenFile
    from samestep.metrics import Means, Metric, check_metric
    from samestep.run import Run, init
    from samestep.run.patience import Patience
    from samestep.snapshot.dcp import read_dcp
    from samestep.snapshot.read import read_snapshot

_LAZY = {
    "ByLength": "samestep.data.orders",
    "Means": "samestep.metrics",
    "Metric": "samestep.metrics",
    "Packed": "samestep.data.packed",
    "PackedList": "samestep.data.batch",
    "Patience": "samestep.run.patience",
    "Run": "samestep.run",
    "ShardOrder": "samestep.data.orders",
    "ShardedDataset": "samestep.data.shards",
    "TokenFile": "samestep.data.token_file",
    "Weighted": "samestep.data.orders",
    "check_metric": "samestep.metrics",
    "init": "samestep.run",
    "read_dcp": "samestep.snapshot.dcp",
    "read_snapshot": "samestep.snapshot.read",
}

__all__ = [
    "ByLength",
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
    "Packed",
    "PackedList",
    "Patience",
    "RecheckError",
    "RecordError",
    "Run",
    "SamestepError",
    "ShardOrder",
    "ShardedDataset",
    "SnapshotError",
    "TokenFile",
    "VerifyError",
    "Weighted",
    "WorkerError",
    "WorldError",
    "check_metric",
    "init",
    "launch",
    "read_dcp",
    "read_snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
