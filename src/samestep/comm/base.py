"""The interface of every world, and the world of a single worker.

Calls are collective: all workers make the same calls in the same order.
"""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from samestep.comm.status import WorkerStatus, mismatched_calls

Sizes = Sequence[int]
Value = TypeVar("Value")


class World(ABC):
    """The workers of a run and how they communicate; this worker is `rank` of `size`.

    `hosts` has one range of ranks per host, in rank order. Workers of one host share memory; a
    worker that shares none counts as a separate host. `barriers` counts the calls in which every
    worker waited for all others: barriers and all gathering calls. `what` describes the purpose of
    a call in error messages. Calls raise `WorldError` if a worker has exited or times out.
    """

    rank: int
    size: int
    hosts: Sequence[range]
    barriers: int = 0

    @cached_property
    def status(self) -> WorkerStatus:
        """This worker's status, which a watchdog may publish to the others."""
        return WorkerStatus()

    @property
    def host(self) -> range:
        """The ranks that see this worker's memory, including its own."""
        return next(host for host in self.hosts if self.rank in host)

    @property
    def shares_memory(self) -> bool:
        """Whether any workers share memory, on any host: the same value on all workers."""
        return any(len(host) > 1 for host in self.hosts)

    @abstractmethod
    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Return every worker's bytes, of any length, by rank."""

    @abstractmethod
    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        """Return every worker's bytes by rank on rank 0, None elsewhere."""

    @abstractmethod
    def all_gather(self, out: Tensor, own: Tensor, what: str) -> None:
        """Fill `out` [size * n] with every worker's `own` [n], perhaps a view of `out`, by rank."""

    @abstractmethod
    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, own: Tensor, own_sizes: Sizes, what: str
    ) -> None:
        """Send consecutive `own_sizes[r]` elements of `own` to rank r; fill `out` likewise."""

    def begin_all_to_all(
        self, out: Tensor, out_sizes: Sizes, own: Tensor, own_sizes: Sizes, what: str
    ) -> Callable[[], None]:
        """Start an `all_to_all`; return a call that completes it and frees `out` and `own`."""
        self.all_to_all(out, out_sizes, own, own_sizes, what)
        return lambda: None

    def shared(self, nbytes: int) -> list[Tensor]:
        """Return zeros, uint8 [nbytes], for each worker of this host by rank, shared among them."""
        return [torch.zeros(nbytes, dtype=torch.uint8)]

    @abstractmethod
    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Overwrite `tensor` with that of rank 0."""

    @abstractmethod
    def barrier(self, what: str) -> None:
        """Return when every worker has arrived."""

    def barrier_on_host(self, what: str) -> None:
        """Wait at least for the workers of this host; `barriers` may not count it."""
        self.barrier(what)

    @abstractmethod
    def close(self) -> None:
        """Leave the world; no call may follow."""

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        """Return every worker's JSON value by rank. Floats keep their bits, also NaN and infinity.

        Raises `WorldError` if another worker made another call.
        """
        values = []
        own = json.dumps([what, value]).encode()
        for rank, data in enumerate(self.all_gather_bytes(own, what)):
            try:
                other_what, other = json.loads(data)
            except (TypeError, ValueError):
                other_what, other = "making another call", None
            if other_what != what:
                raise mismatched_calls(self.rank, what, rank, other_what)
            values.append(other)
        return values

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Return every worker's object by rank."""
        return list(map(_unpickle, self.all_gather_bytes(pickle.dumps(value), what)))

    def gather_object(self, value: Any, what: str) -> list[Any] | None:
        """Return every worker's object by rank on rank 0, None elsewhere."""
        gathered = self.gather_bytes(pickle.dumps(value), what)
        return None if gathered is None else list(map(_unpickle, gathered))

    def broadcast_object(self, value: Any, what: str) -> Any:
        """Return rank 0's object."""
        data = pickle.dumps(value) if self.rank == 0 else b""
        return _unpickle(self.all_gather_bytes(data, what)[0])


def _unpickle(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  from a worker of the same run


class Alone(World):
    """The world of a single worker: every call returns its input."""

    rank = 0
    size = 1
    hosts = (range(1),)

    def _after_barrier(self, value: Value) -> Value:
        self.barriers += 1
        return value

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self._after_barrier([data])

    gather_bytes = all_gather_bytes

    def all_gather(self, out: Tensor, own: Tensor, what: str) -> None:
        self.all_to_all(out, [len(out)], own, [len(own)], what)

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, own: Tensor, own_sizes: Sizes, what: str
    ) -> None:
        if out.data_ptr() != own.data_ptr():
            out.copy_(own)
        self.barriers += 1

    def broadcast(self, tensor: Tensor, what: str) -> None:
        self.barriers += 1

    def barrier(self, what: str) -> None:
        self.barriers += 1

    def close(self) -> None:
        pass

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        return self._after_barrier([value])

    all_gather_object = gather_object = all_gather_json

    def broadcast_object(self, value: Any, what: str) -> Any:
        return self._after_barrier(value)
