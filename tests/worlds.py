"""Worlds for tests: of real processes, and of threads where a law is to hold over many sizes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here, and not in every worker

from samestep.errors import WorldError
from samestep.world import Alone, World
from samestep.world.distributed import Distributed
from tests.workers import run_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMEOUT_SECONDS = 30.0


def in_processes(workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `body(world, *args)` returned by rank, each worker a process; one worker is this process, alone."""
    return [body(Alone(), *args)] if workers == 1 else run_workers(_joined, workers, body, *args)


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
        raise min(errors, key=lambda error: isinstance(error, WorldError))  # those that only waited come last
    return [future.result() for future in futures]


def _joined(body: Callable[..., Any], *args: Any) -> Any:
    world = Distributed(cuda=False, timeout_seconds=TIMEOUT_SECONDS)
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
        return taken

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self._meet(data, list)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        everyone = self._meet(data, list)
        return everyone if self.rank == 0 else None

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        out.copy_(self._meet(own.clone(), torch.cat))

    def all_to_all(self, out: torch.Tensor, out_sizes: Sequence[int], own: torch.Tensor, own_sizes: Sequence[int], what: str) -> None:
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
