"""A simulation of a step's exchange, message by message.

A world without communication records what the exchange asks of it, and the simulation plays these
calls. It uses none of the model's formulas. A worker sends one message at a time; each takes the
latency, after its turn on the link of its host. Within a host, bytes cost nothing.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from samestep.comm.base import Arrival, World
from samestep.step.exchange import Exchange
from samestep.tools.scale.network import LOSS_BYTES, Network

ACTIVITY = "exchanging"


@dataclass(frozen=True)
class AllToAll:
    """A worker sends `nbytes` to each rank, and receives from some; nobody sends 0 bytes."""

    nbytes: Sequence[int]
    received: Sequence[int]


@dataclass(frozen=True)
class Doubling:
    """The first worker of a host sends all it has, `nbytes` per host, twice as far each time."""

    nbytes: int


@dataclass(frozen=True)
class HostBarrier:
    """The workers of a host send each other an empty message."""


class RecordingWorld(World):
    """A world that only records its calls."""

    def __init__(self, rank: int, size: int, per_host: int) -> None:
        self.rank, self.size = rank, size
        self.hosts = [
            range(first, min(first + per_host, size)) for first in range(0, size, per_host)
        ]
        self.adds_early = len(self.hosts) > 1 and len(set(map(len, self.hosts))) == 1
        self.calls: list[AllToAll | Doubling | HostBarrier] = []

    def all_gather_bytes(self, data, what):
        self.barrier(what)
        return [data] * self.size

    def gather_bytes(self, data, what):
        raise NotImplementedError

    def all_gather(self, out, own, what):
        raise NotImplementedError

    def all_to_all(self, out, out_sizes, own, own_sizes, what):
        itemsize = own.element_size()
        sizes = (
            # a worker copies what it sends to itself
            [size * itemsize * (rank != self.rank) for rank, size in enumerate(some)]
            for some in (own_sizes, out_sizes)
        )
        self.calls.append(AllToAll(*sizes))

    def begin_swap(self, partner, received, what):
        # its parts follow each other without a pause: one message
        out = torch.cat(received)
        sizes = [len(out) * (rank == partner) for rank in range(self.size)]

        def send(sent):
            self.all_to_all(out, sizes, torch.cat(list(sent)), sizes, what)
            return [Arrival(lambda: None) for _ in received]

        return send

    def begin_sums(self, shares, what):
        def send(sums):
            # parts follow each other without a pause, here too
            received = [share.received for share in shares]
            self.calls.append(AllToAll(self._bytes_of(sums), self._bytes_of(received)))
            totals = [{rank: [one] for rank, one in share.totals.items()} for share in shares]
            own = [
                {rank: [share.total] for rank in some}
                for some, share in zip(totals, shares, strict=True)
            ]
            self.calls.append(AllToAll(self._bytes_of(own), self._bytes_of(totals)))
            return [Arrival(lambda: None) for _ in shares]

        return send

    def _bytes_of(self, parts):
        nbytes = [0] * self.size
        for part in parts:
            for rank, tensors in part.items():
                nbytes[rank] += sum(tensor.nbytes for tensor in tensors)
        return nbytes

    def shared(self, nbytes):
        return [torch.zeros(nbytes, dtype=torch.uint8) for _ in self.host]

    def broadcast(self, tensor, what):
        raise NotImplementedError

    def barrier(self, what):
        self.barrier_on_host(what)
        if len(self.hosts) > 1:
            self.calls.append(Doubling(LOSS_BYTES * len(self.host)))
            self.barrier_on_host(what)

    def barrier_on_host(self, what):
        if len(self.host) > 1:
            self.calls.append(HostBarrier())

    def close(self):
        raise NotImplementedError


def record_calls(
    rank: int,
    workers: int,
    per_host: int,
    lanes: int,
    elements: int,
    round_to: torch.dtype | None = None,
) -> list[AllToAll | Doubling | HostBarrier]:
    """Return a worker's exchange calls in a step, ordered as in `samestep.step.lane_engine`."""
    world = RecordingWorld(rank, workers, per_host)
    parameter = torch.zeros(elements)
    exchange = Exchange([parameter], lanes, world, round_to)
    exchange.put([[parameter]] * len(exchange.own_views))
    world.all_gather_json("losses", ACTIVITY)
    exchange.sum()
    exchange.gather()
    return world.calls


@dataclass
class Simulation:
    """Plays the calls of all workers; `now` is the simulated time in seconds."""

    calls: Sequence[Sequence[AllToAll | Doubling | HostBarrier]]
    network: Network
    now: float = 0.0
    _link_free_at: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _arrived: defaultdict[tuple[int, int], deque[float]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def play(self) -> float:
        """Return the seconds until all workers are done."""
        numbers = count()
        workers = [self._work(rank) for rank in range(len(self.calls))]
        events = [(0.0, next(numbers), rank) for rank in range(len(workers))]
        waiting: set[tuple[int, int]] = set()  # pairs of a sender and the worker waiting for it
        while events:
            self.now, _, rank = heapq.heappop(events)
            request = next(workers[rank], None)
            if isinstance(request, float):
                heapq.heappush(events, (request, next(numbers), rank))
            elif request is not None:
                waiting.add((request, rank))
            for pair in [pair for pair in waiting if self._arrived[pair]]:
                waiting.remove(pair)
                arrival = max(self.now, self._arrived[pair].popleft())
                heapq.heappush(events, (arrival, next(numbers), pair[1]))
        assert not waiting
        return self.now

    def _work(self, rank: int) -> Iterator[float | int]:
        """Play a worker; yield the time to continue at, or the rank to wait for a message from."""
        for call in self.calls[rank]:
            if isinstance(call, AllToAll):
                yield from self._all_to_all(rank, call)
            elif isinstance(call, Doubling):
                yield from self._double(rank, call)
            else:
                yield from self._host_barrier(rank)

    def _all_to_all(self, rank: int, call: AllToAll) -> Iterator[float | int]:
        size = len(self.calls)
        others = [(rank + distance) % size for distance in range(1, size)]
        for other in others:
            if call.nbytes[other]:
                yield self._send(rank, other, call.nbytes[other])
        yield from (other for other in reversed(others) if call.received[other])

    def _double(self, rank: int, call: Doubling) -> Iterator[float | int]:
        size, on_host = len(self.calls), self.network.workers_per_host
        hosts, have = size // on_host, 1
        while rank % on_host == 0 and have < hosts:
            new = min(have, hosts - have)
            yield self._send(rank, (rank - have * on_host) % size, new * call.nbytes)
            yield (rank + have * on_host) % size
            have += new

    def _host_barrier(self, rank: int) -> Iterator[float | int]:
        on_host = self.network.workers_per_host
        first = rank // on_host * on_host
        others = [other for other in range(first, first + on_host) if other != rank]
        for other in others:
            yield self._send(rank, other, 0, self.network.memory.latency)
        yield from others

    def _send(self, sender: int, receiver: int, nbytes: int, latency: float | None = None) -> float:
        """Send a message and return the time of its arrival."""
        latency = self.network.between.latency if latency is None else latency
        host, other = (rank // self.network.workers_per_host for rank in (sender, receiver))
        left_at = self.now
        if host != other:
            sending = nbytes / self.network.between.bandwidth
            left_at = max(self.now, self._link_free_at[host]) + sending
            self._link_free_at[host] = left_at
        self._arrived[sender, receiver].append(left_at + latency)
        return left_at + latency
