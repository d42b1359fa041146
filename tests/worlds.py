"""Worlds for tests: of real processes, and of threads where a law is to hold over many sizes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here, and not in every worker

from samestep.cluster import find_process
from samestep.comm.base import Alone, World
from samestep.comm.distributed import Distributed
from samestep.comm.rendezvous import form
from samestep.comm.shared_memory import Shared
from samestep.errors import WorldError
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMEOUT_SECONDS = 30.0


def in_processes(workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `body(world, *args)` returned by rank, each worker a process that shares memory with the others; one is alone."""
    return (
        [body(Alone(), *args)]
        if workers == 1
        else run_workers(_joined, workers, shared_world, body, *args)
    )


def on_hosts(hosts: int, workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the same of workers that talk through torch.distributed, as many on each of several hosts."""
    return run_workers(_joined, workers, partial(distributed_world, hosts=hosts), body, *args)


def in_threads(workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `body(world, *args)` returned by rank, each worker a thread; one worker is alone."""
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
        # those that only waited come last
        raise min(errors, key=lambda error: isinstance(error, WorldError))
    return [future.result() for future in futures]


def shared_world(timeout: float = TIMEOUT_SECONDS) -> Shared:
    """Return the world of this worker and the others of its host."""
    return Shared(form(find_process(os.environ), timeout, share=True))


def distributed_world(timeout: float = TIMEOUT_SECONDS, hosts: int = 1) -> Distributed:
    """Return the world of this worker on one of several hosts: it is placed as if its host ended where it does not."""
    place = find_process(os.environ)
    workers = place.world_size // hosts
    place = replace(place, local_rank=place.rank % workers, local_world_size=workers)
    return Distributed(form(place, timeout, share=True), cuda=False)


def _joined(join: Callable[[], World], body: Callable[..., Any], *args: Any) -> Any:
    world = join()
    value = body(world, *args)
    world.close()
    return value


class Meeting:
    """Where the threads of a world meet: a place on the table for each."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers)
        self.table: list[Any] = [None] * workers


class Threaded(World):
    """The world of one of several workers that are threads of one process."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.table)
        self.hosts = [range(self.size)]
        self._meeting = meeting

    def _meet(self, given: Any, take: Callable[[list[Any]], Any]) -> Any:
        """Put `given` on the table and return what `take` makes of all that lies there; then the table is free again."""
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
