"""The messages of a step's exchange, event by event: what the exchange asks of its world is written down, and then played through.

Nothing here knows the model's formulas. A worker sends one message at a time; each takes the
latency, and before that its turn on the link of its host. Within a host, bytes cost nothing.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch

from samestep.comm.base import World
from samestep.step.exchange import Exchange
from samestep.tools.scale.traffic import MEETING_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samestep.tools.scale.model import Network

WHAT = "exchanging"


@dataclass(frozen=True)
class AllToAll:
    """A worker sends so many bytes to each rank."""

    nbytes: Sequence[int]


@dataclass(frozen=True)
class Ring:
    """A worker hands on what it received from its left, with its own of so many bytes to begin with, until all have everything."""

    nbytes: int


@dataclass(frozen=True)
class Doubling:
    """The first worker of a host hands all that it has, so many bytes of each host, to one twice as far away each time."""

    nbytes: int


@dataclass(frozen=True)
class Meeting:
    """The workers of a host send each other an empty message."""


class WrittenDown(World):
    """A world that does nothing and writes down what it is asked to do."""

    def __init__(self, rank: int, size: int, per_host: int) -> None:
        self.rank, self.size = rank, size
        self.hosts = [
            range(first, min(first + per_host, size)) for first in range(0, size, per_host)
        ]
        self.calls: list[AllToAll | Ring | Doubling | Meeting] = []

    def all_gather_bytes(self, data, what):
        self.barrier(what)
        return [data] * self.size

    def gather_bytes(self, data, what):
        raise NotImplementedError

    def all_gather(self, out, own, what):
        self.calls.append(Ring(own.nbytes))

    def all_to_all(self, out, out_sizes, own, own_sizes, what):
        self.calls.append(AllToAll([size * own.element_size() for size in own_sizes]))

    def shared(self, nbytes):
        return [torch.zeros(nbytes, dtype=torch.uint8) for _ in self.host]

    def broadcast(self, tensor, what):
        raise NotImplementedError

    def barrier(self, what):
        self.barrier_on_host(what)
        if len(self.hosts) > 1:
            self.calls.append(Doubling(MEETING_BYTES * len(self.host)))
            self.barrier_on_host(what)

    def barrier_on_host(self, what):
        if len(self.host) > 1:
            self.calls.append(Meeting())

    def close(self):
        raise NotImplementedError


def calls_of(
    rank: int, workers: int, per_host: int, lanes: int, elements: int
) -> list[AllToAll | Ring | Doubling | Meeting]:
    """Return what one worker's exchange of a step asks of the world, in order, as `samestep.step.lane_engine` leads it."""
    world = WrittenDown(rank, workers, per_host)
    parameter = torch.zeros(elements)
    exchange = Exchange([parameter], lanes, world)
    exchange.put([[parameter]] * len(exchange.own_views))
    world.all_gather_json("losses", WHAT)
    exchange.sum()
    exchange.gather()
    return world.calls


@dataclass
class Simulation:
    """Plays the calls of all workers; `now` is when the last one is done, in seconds."""

    calls: Sequence[Sequence[AllToAll | Ring | Doubling | Meeting]]
    network: Network
    now: float = 0.0
    _link_free_at: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _arrived: defaultdict[tuple[int, int], deque[float]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def play(self) -> float:
        """Return how many seconds pass until all workers are done."""
        numbers = count()
        workers = [self._work(rank) for rank in range(len(self.calls))]
        events = [(0.0, next(numbers), rank) for rank in range(len(workers))]
        waiting: set[tuple[int, int]] = set()  # whom a worker waits for, and itself
        while events:
            self.now, _, rank = heapq.heappop(events)
            asked = next(workers[rank], None)
            if isinstance(asked, float):
                heapq.heappush(events, (asked, next(numbers), rank))
            elif asked is not None:
                waiting.add((asked, rank))
            for pair in [pair for pair in waiting if self._arrived[pair]]:
                waiting.remove(pair)
                heapq.heappush(
                    events, (max(self.now, self._arrived[pair].popleft()), next(numbers), pair[1])
                )
        assert not waiting
        return self.now

    def _work(self, rank: int) -> Iterator[float | int]:
        """Do what a worker does; yields a time to be woken at, or the rank of whom to wait for a message from."""
        for call in self.calls[rank]:
            if isinstance(call, AllToAll):
                yield from self._all_to_all(rank, call)
            elif isinstance(call, Ring):
                for _ in range(len(self.calls) - 1):
                    yield self._send(rank, (rank + 1) % len(self.calls), call.nbytes)
                    yield (rank - 1) % len(self.calls)
            elif isinstance(call, Doubling):
                yield from self._double(rank, call)
            else:
                yield from self._meet(rank)

    def _all_to_all(self, rank: int, call: AllToAll) -> Iterator[float | int]:
        size = len(self.calls)
        for distance in range(1, size):
            yield self._send(rank, (rank + distance) % size, call.nbytes[(rank + distance) % size])
        for distance in range(1, size):
            yield (rank - distance) % size

    def _double(self, rank: int, call: Doubling) -> Iterator[float | int]:
        size, on_host = len(self.calls), self.network.workers_per_host
        hosts, have = size // on_host, 1
        while rank % on_host == 0 and have < hosts:
            new = min(have, hosts - have)
            yield self._send(rank, (rank - have * on_host) % size, new * call.nbytes)
            yield (rank + have * on_host) % size
            have += new

    def _meet(self, rank: int) -> Iterator[float | int]:
        on_host = self.network.workers_per_host
        others = [
            other
            for other in range(len(self.calls))
            if other // on_host == rank // on_host and other != rank
        ]
        for other in others:
            yield self._send(rank, other, 0, self.network.memory.latency)
        yield from others

    def _send(self, sender: int, receiver: int, nbytes: int, latency: float | None = None) -> float:
        """Send a message and return when it has arrived."""
        latency = self.network.between.latency if latency is None else latency
        host, other = (rank // self.network.workers_per_host for rank in (sender, receiver))
        left_at = self.now
        if host != other:
            left_at = (
                max(self.now, self._link_free_at[host]) + nbytes / self.network.between.bandwidth
            )
            self._link_free_at[host] = left_at
        self._arrived[sender, receiver].append(left_at + latency)
        return left_at + latency
