"""Every exception that samestep raises on purpose.

    SamestepError
    ├── ConfigError       an option is unknown, of the wrong type, or does not fit another (also a ValueError)
    ├── LaunchError       workers could not be started
    │   └── WorkerError   a worker failed: its rank and traceback
    ├── WorldError        workers cannot talk, or one of them is gone
    │   └── HangError     a worker was waited for in vain: who, where it was, and the usual cause
    ├── DataError         a data set, batch or sampler cannot be used
    │   └── LoaderError   loading a lane's batch failed: step, lane and sample indices
    ├── ModelError        models cannot be replicated, or differ between workers
    ├── LossError         a loss is not a scalar, or has no gradient
    │   └── NonFiniteLossError   a loss is NaN or infinite: step, lane and rank
    ├── OutOfMemoryError  a lane does not fit the memory of its device (also a MemoryError)
    ├── DivergenceError   workers' copies of the state differ: step, first tensor and workers
    ├── OptimizerError    an optimizer cannot be sharded
    ├── EvaluationError   results of an evaluation do not fit together
    ├── SnapshotError     a snapshot cannot be written, found, checked or loaded
    ├── RecordError       a record cannot be written or read
    └── VerifyError       a script cannot be verified

Messages say what was given, what was expected, and what to do.
"""

from __future__ import annotations


class SamestepError(Exception):
    """Base of every exception that samestep raises on purpose.

    Attributes: `is_secondary` (bool): another worker failed first, and will tell more.
    `is_retryable` (bool): nothing the program did is to blame, so that it may be tried again.
    """

    is_secondary = False
    is_retryable = False


class ConfigError(SamestepError, ValueError):
    """An option is unknown, of the wrong type, or does not fit another."""


class LaunchError(SamestepError):
    """Workers could not be started."""


class WorkerError(LaunchError):
    """The first worker to fail.

    Attributes: `rank` (int), `traceback` (str, the worker's own), `status` (int, the exit status
    that tells of it).
    """

    def __init__(self, rank: int, summary: str, traceback: str, status: int = 1) -> None:
        super().__init__(f"worker {rank} failed first: {summary}\n{traceback}".rstrip())
        self.rank = rank
        self.traceback = traceback
        self.status = status


class WorldError(SamestepError):
    """Workers cannot talk, or one of them is gone."""

    is_secondary = True


class HangError(WorldError):
    """A worker was waited for in vain; where it is stopped, or gone without a word, that came from outside."""

    def __init__(self, text: str, *, is_retryable: bool = False) -> None:
        super().__init__(text)
        self.is_retryable = self.is_secondary = is_retryable


class DataError(SamestepError):
    """A data set, batch or sampler cannot be used."""


class LoaderError(DataError):
    """Loading a lane's batch failed; where a loader process was killed, that came from outside."""

    def __init__(self, text: str, *, is_retryable: bool = False) -> None:
        super().__init__(text)
        self.is_retryable = is_retryable


class ModelError(SamestepError):
    """Models cannot be replicated, or differ between workers."""


class LossError(SamestepError):
    """A loss is not a scalar tensor, or has no gradient."""


class NonFiniteLossError(LossError):
    """A loss is NaN or infinite."""


class OutOfMemoryError(SamestepError, MemoryError):
    """A lane does not fit the memory of its device."""


class DivergenceError(SamestepError):
    """Workers' copies of what all of them hold alike differ."""


class OptimizerError(SamestepError):
    """An optimizer cannot be sharded."""


class EvaluationError(SamestepError):
    """Results of an evaluation do not fit together."""


class SnapshotError(SamestepError):
    """A snapshot cannot be written, found, checked or loaded."""


class RecordError(SamestepError):
    """A record cannot be written or read."""


class VerifyError(SamestepError):
    """A script cannot be verified."""
