"""The exceptions of samestep.

    SamestepError
    ├── ConfigError, also a ValueError
    ├── LaunchError
    │   └── WorkerError
    ├── WorldError
    │   └── HangError
    ├── DataError
    │   └── LoaderError
    ├── LossError
    │   └── NonFiniteLossError
    ├── OutOfMemoryError, also a MemoryError
    ├── DivergenceError
    │   └── RecheckError
    └── ModelError, OptimizerError, EvaluationError, SnapshotError, RecordError, VerifyError

A message says what is wrong with which value, what was expected, and what to do.
"""

from __future__ import annotations

import types
from typing import Final

# in the error of a worker after another one has reported an error of its own
FAILED_FIRST: Final = "failed first"


class SamestepError(Exception):
    """Base class of the exceptions of samestep.

    Attributes: `is_secondary` (bool): caused by the failure of another worker, which has the
    details. `is_retryable` (bool): not caused by the program, so a restart may succeed. `status`
    (int): the exit status of a command that ends with it.
    """

    is_secondary = False
    is_retryable = False
    status = 1


class ConfigError(SamestepError, ValueError):
    """An option is unknown, has an invalid value, or conflicts with another option."""

    status = 2  # like argparse


class LaunchError(SamestepError):
    """Workers cannot be started, or their host lost the other hosts of the run."""


class WorkerError(LaunchError):
    """A worker failed; raised by the launcher for the first one.

    Its `__cause__` is the worker's exception, if that can be pickled and comes from this host.
    Attributes: `rank` (int), `traceback` (str, of the worker), `status` (int, an exit status).
    """

    def __init__(self, rank: int, summary: str, traceback: str, status: int = 1) -> None:
        # a hang is reported by a worker that waited, and names the one that did not respond
        who = "" if summary.startswith(HangError.__name__) else f"worker {rank} failed first: "
        super().__init__(f"{who}{summary}\n{traceback}".rstrip())
        self.rank = rank
        self.traceback = traceback
        self.status = status

    def with_type_of_cause(self) -> WorkerError:
        """Return an error that is also of the type of its cause, with the cause's attributes.

        As in Ray, callers can catch either type. Returns this error if there is no cause, or if
        Python cannot combine the types.
        """
        cause = self.__cause__
        if cause is None or isinstance(cause, WorkerError):
            return self
        names = {"__str__": Exception.__str__, "__module__": __name__}
        try:
            both: type[WorkerError] = type("WorkerError", (WorkerError, type(cause)), names)
            typed = both.__new__(both)
        except TypeError:
            return self
        for kind in type(cause).__mro__:  # attributes of built-in ones, such as `errno`
            for name, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType):
                    setattr(typed, name, getattr(cause, name))
        typed.__setstate__({**vars(cause), **vars(self), "args": self.args})
        return typed


class WorldError(SamestepError):
    """Workers cannot communicate, or one of them is gone."""

    is_secondary = True


class HangError(WorldError):
    """A worker did not respond in time; the message names it, its location and the usual cause.

    It is retryable if that worker was stopped from outside or disappeared.
    """

    def __init__(self, text: str, *, is_retryable: bool = False) -> None:
        super().__init__(text)
        self.is_retryable = self.is_secondary = is_retryable


class DataError(SamestepError):
    """A data set, batch or sampler cannot be used."""


class LoaderError(DataError):
    """A lane's batch cannot be loaded; names the step, the lane and the sample indices.

    It is retryable if a loader process was killed from outside.
    """

    def __init__(self, text: str, *, is_retryable: bool = False) -> None:
        super().__init__(text)
        self.is_retryable = is_retryable


class ModelError(SamestepError):
    """A model cannot be replicated, or differs between workers."""


class LossError(SamestepError):
    """A loss is not a scalar tensor, or has no gradient."""


class NonFiniteLossError(LossError):
    """A loss or its gradient is NaN or infinite; names the step, the lane and the rank."""

    def __init__(
        self, text: str, results: tuple[object, ...] = (), gradient: object = None
    ) -> None:
        super().__init__(text)
        self.results = results  # of all lanes
        self.gradient = gradient  # which one, if it is not the loss


class OutOfMemoryError(SamestepError, MemoryError):
    """A lane does not fit into the memory of its device."""


class DivergenceError(SamestepError):
    """Replicated state differs between workers; names the step, the tensor and the workers.

    Attributes: `ranks`, `hosts` and `devices` (tuples) of the workers that differ from the
    majority, or of all that may be wrong if there is none; `step` and `tensor`, where the first
    difference is, or the path of a number; `lane` (None if it is in no lane); `is_certain` (bool):
    with `recheck_every`, only tensors differ, and most of at least three workers have the same
    ones. A launcher of several hosts then goes on without those of the others.
    """

    def __init__(
        self,
        text: str,
        *,
        ranks: tuple[int, ...] = (),
        hosts: tuple[str, ...] = (),
        devices: tuple[str, ...] = (),
        step: int = 0,
        lane: int | None = None,
        tensor: str = "",
        is_certain: bool = False,
        is_secondary: bool = False,
    ) -> None:
        super().__init__(text)
        self.ranks, self.hosts, self.devices = ranks, hosts, devices
        self.step, self.lane, self.tensor = step, lane, tensor
        self.is_certain = self.is_retryable = is_certain
        self.is_secondary = is_secondary


class RecheckError(DivergenceError):
    """A lane or an update that was computed again has other bits, as on faulty hardware."""


class OptimizerError(SamestepError):
    """An optimizer cannot be sharded, or has gradients that `run.backward` did not make."""


class EvaluationError(SamestepError):
    """The results of an evaluation are inconsistent."""


class SnapshotError(SamestepError):
    """A snapshot cannot be written, found, verified or loaded."""


class RecordError(SamestepError):
    """A record cannot be written or read."""


class VerifyError(SamestepError):
    """A script cannot be verified or replayed."""
