"""Worlds for tests: of real processes, and of threads for laws that should hold at many sizes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # optimizers import it at their first step: once here, not in every worker
from torch.distributed import TCPStore

from samestep.cluster import find_process
from samestep.comm import rendezvous, watchdog
from samestep.comm.base import Alone, Sizes, World
from samestep.comm.distributed import Distributed
from samestep.comm.shared_memory import Shared
from samestep.errors import WorldError
from tests.workers import run_workers

FORK = get_context("fork")
TIMEOUT_SECONDS = 300.0
PATIENT_SECONDS = 60.0


def in_processes(workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `body(world, *args)` returned by rank.

    Each worker is a process that shares memory with the others; a single one is `Alone`.
    """
    if workers == 1:
        return [body(Alone(), *args)]
    return run_workers(_run_in_world, workers, shared_world, body, *args)


def on_hosts(hosts: int, workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Do the same with workers that use torch.distributed, as if on several hosts."""
    return run_workers(_run_in_world, workers, partial(distributed_world, hosts=hosts), body, *args)


def in_threads(workers: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `body(world, *args)` returned by rank, one thread per worker."""
    if workers == 1:
        return [body(Alone(), *args)]
    table = Table(workers)

    def work(rank: int) -> Any:
        try:
            return body(Threaded(rank, table), *args)
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(workers) as threads:
        futures = [threads.submit(work, rank) for rank in range(workers)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # prefer the cause over the errors of threads that only waited
        raise min(errors, key=lambda error: isinstance(error, WorldError))
    return [future.result() for future in futures]


def shared_world(timeout: float = TIMEOUT_SECONDS) -> Shared:
    """Return the world of this worker and the others of its host."""
    return Shared(rendezvous.rendezvous(find_process(os.environ), timeout, share=True))


def patient_shared_world(timeout: float) -> Shared:
    """Return a world whose workers have time to start, as under load, whatever `timeout` is."""
    with patch("samestep.comm.rendezvous._start_seconds", lambda _: TIMEOUT_SECONDS):
        return shared_world(timeout)


def be_patient(hung_rank: int | None = None, exit_seconds: float = PATIENT_SECONDS) -> None:
    """Give this worker the time that a busy machine may take, before it joins a run.

    That is the time to start, to send its stack and to exit after a failure. Only `hung_rank`,
    which does not exit by itself, is ended soon after one. A world that was formed slowly may then
    have short waits: see `limit_waits`.
    """
    is_hung = int(os.environ["RANK"]) == hung_rank
    for module, name, value in [
        (rendezvous, "_start_seconds", lambda _: PATIENT_SECONDS),
        (watchdog, "EXIT_SECONDS", 0.3 if is_hung else exit_seconds),
        (watchdog, "LINGER_SECONDS", PATIENT_SECONDS),
        (watchdog, "RESPONSE_SECONDS", PATIENT_SECONDS),
        (watchdog, "DIAGNOSIS_SECONDS", PATIENT_SECONDS),
    ]:
        setattr(module, name, value)


def limit_waits(world: World, seconds: float) -> None:
    """Let the calls of a world, which may have started slowly, time out after `seconds`."""
    for part in (world, world._mesh, world.status):
        if hasattr(part, "_timeout_seconds"):
            part._timeout_seconds = seconds


def distributed_world(timeout: float = TIMEOUT_SECONDS, hosts: int = 1) -> Distributed:
    """Return the world of this worker as if the workers ran on several hosts."""
    process = find_process(os.environ)
    workers = process.world_size // hosts
    process = replace(process, local_rank=process.rank % workers, local_world_size=workers)
    return Distributed(rendezvous.rendezvous(process, timeout, share=True), cuda=False)


@contextmanager
def launcher_store() -> Iterator[tuple[TCPStore, dict[str, str]]]:
    """Yield a store such as a launcher's, and the variables by which workers find it.

    It runs in a separate process. Its thread looks up names, and a worker that is forked meanwhile
    would wait for glibc's lock in its own lookups forever.
    """
    receiver, sender = FORK.Pipe()

    def serve() -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        sender.send(server.port)
        signal.pause()

    process = FORK.Process(target=serve)
    process.start()
    try:
        port = receiver.recv()
        store = TCPStore("127.0.0.1", port, is_master=False)
        yield store, {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    finally:
        process.kill()
        process.join()


def _run_in_world(join: Callable[[], World], body: Callable[..., Any], *args: Any) -> Any:
    world = join()
    value = body(world, *args)
    world.close()
    return value


class Table:
    """A barrier for the threads of a world, and one entry for each."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers)
        self.entries: list[Any] = [None] * workers


class Threaded(World):
    """The world of one of several workers that are threads of one process."""

    def __init__(self, rank: int, table: Table) -> None:
        self.rank, self.size = rank, len(table.entries)
        self.hosts = [range(self.size)]
        self._table = table

    def _exchange(self, entry: Any, take: Callable[[list[Any]], Any]) -> Any:
        """Publish `entry` and return what `take` makes of all entries."""
        try:
            self._table.entries[self.rank] = entry
            self._table.barrier.wait(TIMEOUT_SECONDS)
            combined = take(self._table.entries)
            self._table.barrier.wait(TIMEOUT_SECONDS)
        except threading.BrokenBarrierError as error:
            raise WorldError("another thread failed") from error
        self.barriers += 1
        return combined

    def shared(self, nbytes: int) -> list[torch.Tensor]:
        return self._exchange(torch.zeros(nbytes, dtype=torch.uint8), list)

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self._exchange(data, list)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        gathered = self._exchange(data, list)
        return gathered if self.rank == 0 else None

    def all_gather(self, out: torch.Tensor, sent: torch.Tensor, what: str) -> None:
        out.copy_(self._exchange(sent.clone(), torch.cat))

    def all_to_all(
        self, out: torch.Tensor, out_sizes: Sizes, sent: torch.Tensor, sent_sizes: Sizes, what: str
    ) -> None:
        def take(parts: list[tuple[torch.Tensor, ...]]) -> None:
            for target, slices in zip(out.split(list(out_sizes)), parts, strict=True):
                target.copy_(slices[self.rank])

        self._exchange(sent.split(list(sent_sizes)), take)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        tensor.copy_(self._exchange(tensor.clone(), lambda parts: parts[0].clone()))

    def barrier(self, what: str) -> None:
        self._exchange(None, list)

    def close(self) -> None:
        pass
