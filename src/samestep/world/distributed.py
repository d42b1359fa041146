"""Workers that talk through torch.distributed: gloo for host memory, NCCL for GPUs."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from samestep.errors import WorldError
from samestep.world.base import World
from samestep.world.shared import map_shared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEADER_BYTES = 8
_worlds_formed = count()  # a store prefix of its own for each world that this process forms
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Distributed(World):
    """A world over torch.distributed's default process group, formed from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def __init__(self, *, cuda: bool, timeout_seconds: float) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        with self._answering("forming the world"):
            store = PrefixStore(f"samestep/{next(_worlds_formed)}", _store(timeout))
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self._capacity = 1024

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        """Turn a backend's error into one that says where this worker stood."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise WorldError(
                f"worker {self.rank} got no answer from the others while {what}; usually another worker failed: "
                f"look for the first error of the run ({reason})",
            ) from error

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """One collective while messages fit the capacity, which grows alike on all workers when they do not."""
        while True:
            padded = self._padded(data)
            out = torch.empty(self.size * self._capacity, dtype=torch.uint8)
            with self._answering(what):
                _all_gather_flat(out, padded)
            rows = out.view(self.size, self._capacity).numpy()
            lengths = [int.from_bytes(row[:HEADER_BYTES].tobytes(), "little") for row in rows]
            if max(lengths) + HEADER_BYTES <= self._capacity:
                return [row[HEADER_BYTES : HEADER_BYTES + n].tobytes() for row, n in zip(rows, lengths, strict=True)]
            self._capacity = 2 * (max(lengths) + HEADER_BYTES)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        """Two collectives: lengths to all, then the bytes to rank 0."""
        lengths = [int.from_bytes(length, "little") for length in self.all_gather_bytes(len(data).to_bytes(HEADER_BYTES, "little"), what)]
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in lengths] if self.rank == 0 else None
        with self._answering(what):
            dist.gather(own, rows, dst=0)
        return None if rows is None else [row[:n].numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def _padded(self, data: bytes) -> torch.Tensor:
        message = bytearray(self._capacity)
        message[:HEADER_BYTES] = len(data).to_bytes(HEADER_BYTES, "little")
        fits = data[: self._capacity - HEADER_BYTES]
        message[HEADER_BYTES : HEADER_BYTES + len(fits)] = fits
        return torch.frombuffer(message, dtype=torch.uint8)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        with self._answering(what):
            _all_gather_flat(out, own)

    def all_to_all(self, out: torch.Tensor, out_sizes: Sequence[int], own: torch.Tensor, own_sizes: Sequence[int], what: str) -> None:
        with self._answering(what):
            dist.all_to_all_single(out, own, list(out_sizes), list(own_sizes))

    def shared(self, nbytes: int) -> list[torch.Tensor] | None:
        return map_shared(self, nbytes)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        with self._answering(what):
            dist.broadcast(tensor, src=0)

    def barrier(self, what: str) -> None:
        self.all_gather_bytes(b"", what)

    def close(self) -> None:
        dist.destroy_process_group()


@cache
def _store(timeout: timedelta) -> Store:
    """Return where this process's worlds form; it stays open, because the next world's workers may come before it had closed."""
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    return store
