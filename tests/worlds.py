"""Worlds for tests: of real processes, or of threads for laws that hold at many sizes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo  # imported by the first step of an optimizer: once here, not in every worker

from samestep.cluster import find_process
from samestep.comm.base import Alone, World
from samestep.comm.distributed import Distributed
from samestep.comm.rendezvous import form
from samestep.comm.shared_memory import Shared
from samestep.errors import WorldError
from tests.workers import run_workers

TIMEOUT_SECONDS = 60.0


def in_processes(workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the values of `body(world, *args)` by rank; workers are processes of one host."""
    if workers == 1:
        return [body(Alone(), *args)]
    return run_workers(_joined, workers, shared_world, body, *args)


def on_hosts(hosts: int, workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the same for workers that are spread evenly over several hosts."""
    return run_workers(_joined, workers, partial(distributed_world, hosts=hosts), body, *args)


def in_threads(workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the values of `body(world, *args)` by rank; workers are threads."""
    if workers == 1:
        return [body(Alone(), *args)]
    meeting = Meeting(workers)

    def work(rank: int) -> Any:
        try:
            return body(Threaded(rank, meeting), *args)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(workers) as threads:
        futures = [threads.submit(work, rank) for rank in range(workers)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # prefer the cause to the errors of those that waited for it
        raise min(errors, key=lambda error: isinstance(error, WorldError))
    return [future.result() for future in futures]


def shared_world(timeout: float = TIMEOUT_SECONDS) -> Shared:
    """Return the world of this worker, which shares memory with all others."""
    return Shared(form(find_process(os.environ), timeout, share=True))


def distributed_world(timeout: float = TIMEOUT_SECONDS, hosts: int = 1) -> Distributed:
    """Return the world of this worker as if the workers ran on several hosts."""
    place = find_process(os.environ)
    workers = place.world_size // hosts
    place = replace(place, local_rank=place.rank % workers, local_workers=workers)
    return Distributed(form(place, timeout, share=True), cuda=False)


def _joined(join: Callable[[], World], body: Callable[..., Any], *args: Any) -> Any:
    world = join()
    value = body(world, *args)
    world.close()
    return value


class Meeting:
    """The state that the threads of a world share: a barrier, and one value per thread."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers)
        self.table: list[Any] = [None] * workers


class Threaded(World):
    """The world of a worker that is one of several threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.table)
        self.hosts = [range(self.size)]
        self._meeting = meeting

    def _meet(self, given: Any, take: Callable[[list[Any]], Any]) -> Any:
        """Return `take` of the values that all threads pass as `given`."""
        try:
            self._meeting.table[self.rank] = given
            self._meeting.barrier.wait(TIMEOUT_SECONDS)
            taken = take(self._meeting.table)
            self._meeting.barrier.wait(TIMEOUT_SECONDS)
        except threading.BrokenBarrierError as error:
            raise WorldError("another thread failed") from error
        self.meetings += 1
        return taken

    def shared(self, nbytes: int) -> list[torch.Tensor]:
        return self._meet(torch.zeros(nbytes, dtype=torch.uint8), list)

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self._meet(data, list)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        everyone = self._meet(data, list)
        return everyone if self.rank == 0 else None

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        out.copy_(self._meet(own.clone(), torch.cat))

    def all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> None:
        def take(parts: list[tuple[torch.Tensor, ...]]) -> None:
            for place, sent in zip(out.split(list(out_sizes)), parts, strict=True):
                place.copy_(sent[self.rank])

        self._meet(own.split(list(own_sizes)), take)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        tensor.copy_(self._meet(tensor.clone(), lambda parts: parts[0].clone()))

    def barrier(self, what: str) -> None:
        self._meet(None, list)

    def close(self) -> None:
        pass
