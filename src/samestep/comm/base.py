"""What every world can do. Each call is collective: all workers make it, in the same order."""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

from samestep.comm.status import ENDINGS, FEWER, OTHER_CALL, WorkerStatus
from samestep.errors import WorldError

FORMING = "forming the world"


class World(ABC):
    """The workers of a run and the ways they talk; `rank` of `size`.

    `hosts` are the ranks that see each other's memory, a range a host, in the order of ranks. Where
    nothing is shared each worker is a host of its own. `meetings` counts the calls in which every
    worker waited for all others: a barrier, and whatever gathers. `what` names the reason of a
    call: it stands in the error when another worker does not answer. Raises `WorldError` when a
    worker is gone or late.
    """

    rank: int
    size: int
    hosts: Sequence[range]
    meetings: int = 0

    @cached_property
    def status(self) -> WorkerStatus:
        """Where this worker is, which the others may be told."""
        return WorkerStatus()

    @property
    def host(self) -> range:
        """The ranks that see this worker's memory, its own among them."""
        return next(host for host in self.hosts if self.rank in host)

    @property
    def shares_memory(self) -> bool:
        """Whether some workers see each other's memory, be it on another host: all workers then make the same calls."""
        return any(len(host) > 1 for host in self.hosts)

    @abstractmethod
    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Return every worker's bytes, of any length, by rank."""

    @abstractmethod
    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        """Return every worker's bytes by rank on rank 0, None elsewhere."""

    @abstractmethod
    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        """Fill `out` [size * n] with every worker's `own` [n] by rank; `own` may be this worker's part of `out`."""

    @abstractmethod
    def all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> None:
        """Send consecutive parts of `own` (1-D, `own_sizes[r]` elements to rank r) and receive in the same way into `out`."""

    def begin_all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> Callable[[], None]:
        """Begin an `all_to_all` and return the call that ends it; until then `out` and `own` are in use. Worlds may do it all at once."""
        self.all_to_all(out, out_sizes, own, own_sizes, what)
        return lambda: None

    def shared(self, nbytes: int) -> list[torch.Tensor]:
        """Return a buffer of every worker of this host, in the order of ranks: uint8 [nbytes], zeros, in memory that all of them see."""
        return [torch.zeros(nbytes, dtype=torch.uint8)]  # of a worker that is a host of its own

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Overwrite `tensor` with rank 0's."""

    @abstractmethod
    def barrier(self, what: str) -> None:
        """Return when every worker has arrived."""

    def barrier_on_host(self, what: str) -> None:
        """Return when every worker of this host has arrived, or of all hosts; `meetings` may not count it."""
        self.barrier(what)

    @abstractmethod
    def close(self) -> None:
        """Leave the world; no call may follow."""

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        """Return every worker's JSON value by rank. Floats keep their bits, NaN and infinities too.

        Raises `WorldError` where another worker made another call.
        """
        values = []
        for rank, data in enumerate(
            self.all_gather_bytes(json.dumps([what, value]).encode(), what)
        ):
            told, other = _read(data)
            if told != what:
                raise another_call(self.rank, what, rank, told)
            values.append(other)
        return values

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Return every worker's object by rank. Pickle here travels between the workers of one run only."""
        return [pickle.loads(data) for data in self.all_gather_bytes(pickle.dumps(value), what)]  # noqa: S301

    def gather_object(self, value: Any, what: str) -> list[Any] | None:
        """Return every worker's object by rank on rank 0, None elsewhere."""
        gathered = self.gather_bytes(pickle.dumps(value), what)
        return None if gathered is None else [pickle.loads(data) for data in gathered]  # noqa: S301

    def broadcast_object(self, value: Any, what: str) -> Any:
        """Return rank 0's object."""
        data = pickle.dumps(value) if self.rank == 0 else b""
        return pickle.loads(self.all_gather_bytes(data, what)[0])  # noqa: S301


def another_call(rank: int, what: str, other: int, told: str) -> WorldError:
    """Return the error of worker `rank` that was doing `what` while worker `other` said to be doing something else."""
    cause = FEWER if {what, told}.intersection(ENDINGS) else OTHER_CALL
    return WorldError(
        f"worker {rank} was {what} while worker {other} was {told}; expected the same calls of all; usual cause: {cause}"
    )


def _read(data: bytes) -> tuple[str, Any]:
    try:
        what, value = json.loads(data)
    except (TypeError, ValueError):
        return "doing something else", None
    return what, value


Value = TypeVar("Value")


class Alone(World):
    """The world of one worker, which has met all workers whenever it calls."""

    rank = 0
    size = 1
    hosts = (range(1),)

    def _met(self, value: Value) -> Value:
        self.meetings += 1
        return value

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self._met([data])

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        return self._met([data])

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        self.all_to_all(out, [len(out)], own, [len(own)], what)

    def all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> None:
        if out.data_ptr() != own.data_ptr():
            out.copy_(own)
        self._met(None)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        self._met(None)

    def barrier(self, what: str) -> None:
        self._met(None)

    def close(self) -> None:
        pass

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        return self._met([value])

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        return self._met([value])

    def gather_object(self, value: Any, what: str) -> list[Any] | None:
        return self._met([value])

    def broadcast_object(self, value: Any, what: str) -> Any:
        return self._met(value)
