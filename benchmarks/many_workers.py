"""Requests, bytes and seconds of what grows with the number of workers, up to a thousand.

usage: python -m benchmarks.many_workers [--processes 64] [--simulated 1024] [--per-host 8]

Workers find each other, publish heartbeats and report a hang through a store server in a
separate process, over TCP. The first workers are processes that connect with gloo and exchange
messages as in a step. The others are 64 threads per process, which make the same calls over their
own connections, except that the requests of gloo are made as counted with the processes. The
server's seconds are processor time; the others are wall time on this machine, whose cores all
workers share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.cluster import ProcessInfo
from samestep.comm import link, rendezvous, store, watchdog
from samestep.comm.distributed import Distributed
from samestep.comm.rendezvous import Rendezvous
from samestep.comm.store_server import KeyValueStore, StoreServer
from samestep.comm.token_store import STORE, TokenStore
from samestep.comm.watchdog import Watchdog
from samestep.config import TOKEN
from samestep.errors import HangError
from samestep.record.record import PARTS, open_record

FORK = multiprocessing.get_context("fork")
SECRET = "a token of the benchmark"  # noqa: S105  no secret
TIMEOUT_SECONDS = 4000.0  # a quarter of it is the limit of forming
HEARTBEATS_SECONDS = 5.0
STEPS = 20
BARRIER_SECONDS = 300.0  # if a worker has failed
THREADS = 64  # of a process that simulates workers
GLOO_BYTES = 154  # that a worker publishes for gloo
GLOO_PAIR_BYTES = 8  # and, before, for each other worker
Figures = dict[str, float]


class Server:
    """A store server in a separate process, and what it has received and sent so far."""

    def __init__(self, workers: int) -> None:
        self._pipe, other = FORK.Pipe()
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address: tuple[str, int] = listener.getsockname()
        self._process = FORK.Process(target=_serve, args=(listener, workers, other), daemon=True)
        self._process.start()
        listener.close()

    def figures(self) -> Figures:
        """Return the totals: requests, bytes, and seconds of processor time."""
        self._pipe.send("figures")
        figures: Figures = self._pipe.recv()
        return figures

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(listener: socket.socket, workers: int, pipe: Connection) -> None:
    counts: Counter[str] = Counter()
    handle, seal, feed = KeyValueStore.handle, link.Seal.seal, link.Frames.feed

    async def counted_handle(self: KeyValueStore, request: Mapping[str, Any]) -> dict[str, Any]:
        counts["requests"] += 1
        return await handle(self, request)

    def counted_seal(self: link.Seal, message: Mapping[str, Any]) -> bytes:
        sealed = seal(self, message)
        counts["bytes"] += len(sealed)
        return sealed

    def counted_feed(self: link.Frames, data: bytes) -> None:
        counts["bytes"] += len(data)
        feed(self, data)

    def report() -> None:
        while pipe.recv():
            pipe.send({**counts, "seconds": time.process_time()})

    async def serve() -> None:
        server = StoreServer(SECRET, 0, 8 * workers, 600.0)
        async with await asyncio.start_server(server.serve_peer, sock=listener, backlog=4096):
            threading.Thread(target=report, daemon=True).start()
            await asyncio.sleep(1e6)

    KeyValueStore.handle = counted_handle  # type: ignore[method-assign]
    link.Seal.seal = counted_seal  # type: ignore[method-assign]
    link.Frames.feed = counted_feed  # type: ignore[method-assign]
    asyncio.run(serve())


def form(
    rank: int, size: int, per_host: int, address: tuple[str, int], *, real: bool
) -> Rendezvous:
    """Find the other workers."""
    hello = {"as": "worker", "attempt": 0, "rank": rank, "process": f"{rank}"}
    process = ProcessInfo(rank, size, rank % per_host, per_host, *address, "samestep")
    _own.store = partial(TokenStore, address, SECRET, hello)
    meeting = rendezvous.rendezvous(process, TIMEOUT_SECONDS, share=real)
    if not real:
        _connect_like_gloo(meeting)
    return meeting


_own = threading.local()


def _join_store(_: Mapping[str, str], timeout: timedelta) -> TokenStore:
    joined: TokenStore = _own.store(timeout)
    return joined


def _connect_like_gloo(meeting: Rendezvous) -> None:
    """Make the requests of gloo's full mesh, as counted with processes."""
    keys = [f"gloo/{rank}" for rank in range(meeting.size)]
    reads_all = hasattr(store.StoreClient, "get_many")
    size = GLOO_BYTES + (0 if reads_all else GLOO_PAIR_BYTES * meeting.size)
    meeting.store.set(keys[meeting.rank], "x" * size)
    if reads_all:
        meeting.store.multi_get(keys)
        return
    for key in keys:
        meeting.store.wait([key])
        meeting.store.get(key)


def work(
    rank: int,
    arguments: tuple[int, int, tuple[str, int]],
    barrier: Any,
    results: Any,
    *,
    real: bool,
    seconds: float,
) -> None:
    """Go through all phases as one worker, the last of which hangs."""
    meeting = form(rank, *arguments, real=real)
    world = Distributed(meeting, cuda=False) if real else None
    for _ in range(2):  # the parent reads the server's counts between them
        barrier.wait()
    if world is not None:
        measure_messages(world, results)
    for _ in range(2):
        barrier.wait()
    time.sleep(seconds)
    status = meeting.status
    barrier.wait()
    if rank == meeting.size - 1:
        barrier.wait()
    else:
        with status.waiting("exchanging losses"):
            barrier.wait()
            error = status.explain("exchanging losses", "timed out", timed_out=True)
        if isinstance(error, HangError):
            results.put(("report", str(error)))
    for _ in range(2):
        barrier.wait()
    status.finish()
    status.close()
    barrier.wait()


def measure_messages(world: Distributed, results: Any) -> None:
    """Exchange what a step sends; the first worker reports the seconds and bytes of a step."""
    note = {
        "signal": 0,
        "snapshot_due": False,
        "copy_due": False,
        "seconds": dict.fromkeys(PARTS, 0.0123456789012345 * (world.rank + 1)),
        "data": {},
    }
    report = {"lanes": [(world.rank, 32, {"loss": 2.3025850929})], "missing": [], "buffers": []}
    started = time.perf_counter()
    for step in range(STEPS + 1):
        if step == 1:
            started = time.perf_counter()
        world.all_gather_json([report, note], "exchanging losses")
    if world.rank == 0:
        results.put(("step", (time.perf_counter() - started) / STEPS))


def measure(
    size: int, per_host: int, *, real: bool, heartbeats_seconds: float = HEARTBEATS_SECONDS
) -> dict[str, Figures]:
    """Return the figures of each phase, those of heartbeats for each second."""
    server = Server(size)
    arguments = (size, per_host, server.address)
    barrier, results = FORK.Barrier(size + 1, timeout=BARRIER_SECONDS), FORK.SimpleQueue()
    threads = 1 if real else min(size, THREADS)

    def works(first: int) -> None:
        team = [
            threading.Thread(
                target=partial(
                    work, rank, arguments, barrier, results, real=real, seconds=heartbeats_seconds
                ),
                daemon=True,
            )
            for rank in range(first, min(first + threads, size))
        ]
        for member in team:
            member.start()
        for member in team:
            member.join()
        os._exit(0)

    team = [FORK.Process(target=works, args=(first,)) for first in range(0, size, threads)]
    phases = {}
    with closing(server):
        before, started = server.figures(), time.perf_counter()
        for member in team:
            member.start()
        for phase in ("forming", "messages", "heartbeats", "hang report"):
            barrier.wait()
            after, seconds = server.figures(), time.perf_counter() - started
            figures = {name: after[name] - before.get(name, 0) for name in after}
            phases[phase] = {**figures, "wall": seconds}
            before, started = server.figures(), time.perf_counter()
            barrier.wait()
        barrier.wait()
        for member in team:
            member.join()
    received = _received(results)
    if f"waiting for worker {size - 1}:" not in received.get("report", ""):
        raise AssertionError(f"expected a report on worker {size - 1}, got {received}")
    if real:
        phases["a step's messages"] = {"wall": received["step"]}
    del phases["messages"]
    for name in phases["heartbeats"]:
        phases["heartbeats"][name] /= heartbeats_seconds
    return phases


def _received(results: Any) -> dict[str, Any]:
    received = {}
    while not results.empty():
        name, value = results.get()
        received[name] = value
    return received


def event_bytes(workers: int) -> int:
    """Return the size of a `timing` event."""
    with TemporaryDirectory() as folder, closing(open_record(Path(folder), writes=True)) as record:
        seconds = [dict.fromkeys(PARTS, 0.0123456789012345 * (n + 1)) for n in range(workers)]
        record.timing(100, seconds)
        return (Path(folder) / "events.jsonl").stat().st_size


def table(results: Mapping[str, Mapping[str, Figures]]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| workers | phase | requests | MB | server's seconds | wall seconds |"]
    lines.append("|---|---|---|---|---|---|")
    for workers, phases in results.items():
        for phase, figures in phases.items():
            cells = [
                f"{figures['requests']:,.0f}" if "requests" in figures else "",
                f"{figures['bytes'] / 1e6:.3g}" if "bytes" in figures else "",
                f"{figures['seconds']:.3g}" if "seconds" in figures else "",
                f"{figures['wall']:.3g}" if phase != "heartbeats" else "",
            ]
            name = f"{phase}, each second" if phase == "heartbeats" else phase
            lines.append(f"| {workers} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prepare() -> None:
    """Let many workers share this process and machine."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    threading.stack_size(1 << 18)
    os.environ.update({STORE: "0@unused", TOKEN: SECRET, "GLOO_SOCKET_IFNAME": "lo"})
    store.join_store = _join_store
    rendezvous._worlds_formed = itertools.repeat(0)  # type: ignore[assignment]  # noqa: SLF001
    # all workers share this machine's cores
    watchdog.RESPONSE_SECONDS = watchdog.DIAGNOSIS_SECONDS = 60.0  # type: ignore[misc]
    watchdog.EXIT_SECONDS = 60.0  # type: ignore[misc]
    Watchdog._terminate = lambda _: None  # type: ignore[method-assign]  # noqa: SLF001


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=64, help="default: 64; 0 for none")
    parser.add_argument("--simulated", type=int, default=1024, help="default: 1024; 0 for none")
    parser.add_argument("--per-host", type=int, default=8, help="workers of a host (default: 8)")
    options = parser.parse_args(arguments)
    prepare()
    results = {}
    for size, real in ((options.processes, True), (options.simulated, False)):
        if size:
            name = f"{size} {'processes' if real else 'simulated'}"
            results[name] = measure(size, options.per_host, real=real)
            print(table({name: results[name]}), flush=True)
            print(f"timing event of {size} workers: {event_bytes(size):,} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
