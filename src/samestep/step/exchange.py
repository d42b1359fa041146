"""The sum of gradients over all workers, in flat storage, along the tree over lanes.

Every worker owns a slice of the flat gradient and sums it for all workers. Workers on one host read
each other's gradients in shared memory: `HostExchange`. `across_hosts` has the ways of several
hosts, and chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.comm.base import World
from samestep.step.finite import size_of_flats
from samestep.step.gradients import Gradients, Parameters, copy_gradients, sum_dtype
from samestep.step.layout import (
    ALIGNMENT,
    GPU_ALIGNMENT_BYTES,
    Assignment,
    Layout,
    Span,
    halves,
    tree_sum,
    view_like,
)

Across = Literal["host", "world"]

# Gradients that are exchanged together: a few buckets keep the network busy during backward.
BUCKETS: Final = 8
LEAST_BUCKET_BYTES: Final = 1 << 20
BUCKET_BYTES: Final = 8 << 20
# A bucket that holds less than the limit over this takes one more parameter of any size.
LEAST_FILL: Final = 4
UNHELD: Final = next(map(getrefcount, [object()]))  # references to what only a list holds


def bucket_limit(nbytes: int) -> int:
    """Return the bytes that a bucket may have if `nbytes` are exchanged; the first has half."""
    return min(max(nbytes // BUCKETS, LEAST_BUCKET_BYTES), BUCKET_BYTES)


def buckets(
    parameters: Parameters,
    world: World,
    round_to: torch.dtype | None = None,
    places: Mapping[int, int] | None = None,
) -> list[list[Parameter]]:
    """Group parameters by dtype, in buckets of limited size unless a parameter is larger.

    The limit is an eighth of what is exchanged, in `round_to`, from 1 to 8 MiB of it, and half of
    that for the bucket that autograd completes first, so that the network starts early. Buckets
    take parameters in the order of `places`, by id, from the last one, because autograd completes
    neighbors together, and keep the given order inside. On a single host there is one bucket per
    dtype: early exchanges gain nothing while all cores compute.
    """
    if places is not None and len(world.hosts) > 1:
        number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        ordered = sorted(parameters, key=lambda parameter: places.get(id(parameter), len(places)))
        by_place = buckets(ordered, world, round_to)
        return [sorted(group, key=lambda parameter: number_of[id(parameter)]) for group in by_place]
    sizes = [  # in bytes of what is sent
        parameter.numel() * sum_dtype(parameter.dtype, round_to).itemsize
        for parameter in parameters
    ]
    largest = bucket_limit(sum(sizes))
    pairs = [*zip(parameters, sizes, strict=True)]
    groups: list[list[Parameter]] = []  # [buckets, parameters], from the last to the first
    for dtype in reversed(dict.fromkeys(parameter.dtype for parameter in parameters)):
        group: list[Parameter] = []
        total = 0
        for parameter, size in reversed(pairs):
            if parameter.dtype != dtype:
                continue
            limit = largest if len(groups) > 1 else largest // 2
            is_full = total + size > limit and total >= limit // LEAST_FILL
            if not group or (is_full and len(world.hosts) > 1):  # one host: never full
                group, total = [], 0
                groups.append(group)
            group.append(parameter)
            total += size
    return [group[::-1] for group in reversed(groups)]


class Route:
    """The communication partners of a worker: one per other host, which handles its slice there.

    Pure: ranks only. `partners` is in rank order. `owners` lists, for each worker of this host, the
    ranks whose slices it handles here: itself, and the remote ones whose partner it is. `numbers`
    has the place of each rank's slice: on hosts of one size, the slices of a worker and its
    partners are adjacent.
    """

    def __init__(self, hosts: Sequence[range], rank: int) -> None:
        self.host = next(host for host in hosts if rank in host)
        self.local_rank = rank - self.host.start
        self.others = [host for host in hosts if host != self.host]
        self.partners = [host[self.local_rank % len(host)] for host in self.others]
        self.owners = {worker: [worker] for worker in self.host}  # in rank order, itself first
        for host in self.others:
            for number, owner in enumerate(host):
                self.owners[self.host[number % len(self.host)]].append(owner)
        by_number = sorted((rank - host.start, rank) for host in hosts for rank in host)
        ranks = [rank for _, rank in by_number]
        # two hosts of two: slices lie in the order of ranks 0, 2, 1, 3
        self.numbers = [ranks.index(rank) for rank in range(len(ranks))]


@dataclass(frozen=True)
class ExchangeSpec:
    """Which sums of gradients are needed, of parameters of one dtype.

    With `round_to`, gradients are rounded to that dtype, and so is each sum of two of them. Sums on
    any worker then have that dtype exactly, in memory and in messages. `across` "host", every host
    needs all sums if it can have them early, otherwise each worker its own slice. An optimizer that
    `is_sharded` across hosts awaits them at any time, in the dtype of its parameters. `owners` are
    those of a `Layout` that cuts no parameter.
    """

    parameters: Sequence[Tensor]
    assignment: Assignment
    world: World
    round_to: torch.dtype | None = None
    across: Across = "host"
    is_sharded: bool = False
    owners: tuple[int, ...] | None = None


class Exchange(ABC):
    """Sums gradients of parameters of one dtype over all workers; subclasses say how.

    A worker holds the sums of its own slice, or `across` "host" those of its partners' as well, so
    that the workers of each host hold all slices. `held` numbers them in flat storage.

    Call `put`, wait for all workers, then call `sum`, and `gather` for the complete gradients. The
    next `put` reuses the memory of the tensors that `sum` and `gather` return; `spare_held` before
    it keeps those of `gather` that are still in use.
    """

    across: Across = "world"
    parts = 1  # in which sums arrive

    def __init__(self, spec: ExchangeSpec) -> None:
        self.parameters, self.world = list(spec.parameters), spec.world
        self._lanes = spec.assignment.lanes
        self._assignment = spec.assignment
        self.dtype = sum_dtype(self.parameters[0].dtype, spec.round_to)
        alignment = ALIGNMENT
        if self.parameters[0].device.type != "cpu":  # gradients and parameters may differ in dtype
            itemsize = min(self.dtype.itemsize, self.parameters[0].dtype.itemsize)
            alignment = max(ALIGNMENT, GPU_ALIGNMENT_BYTES // itemsize)
        sizes = tuple(parameter.numel() for parameter in self.parameters)
        self.layout = Layout(sizes, self.world.size, alignment, spec.owners)
        self._route = route = Route(self.world.hosts, self.world.rank)
        self.local_rank = route.local_rank
        self.held = self._held_by(self.world.rank)
        bounds, own = self.layout.bounds, route.numbers[self.world.rank]
        start = bounds[own] - bounds[self.held.start]
        # of this worker's own slice, counted in what it holds
        self.own_elements = range(start, start + bounds[own + 1] - bounds[own])
        # [local_workers, subtrees], as the flat storages beside it: 1-D, [flat_size] each
        self._spans = [self._spans_of(range(rank, rank + 1)) for rank in route.host]
        self.own_spans = self._spans[self.local_rank]
        self._sums = self.shared_storage(max(map(len, self._spans)), self.dtype)
        self._own_flats = self._sums[self.local_rank]
        # The gradients of this worker's subtrees by parameter; `put` skips those already in place.
        self.own_views = list(map(self.views, self._own_flats[: len(self.own_spans)]))
        # 1-D, all held slices: the sums over all lanes take the place of gradients
        self._out = self.slices(self._own_flats[0], self.held)
        self._converted: tuple[Tensor, list[Tensor]] | None = None
        self._read_until = -1.0  # the world's number of barriers then, or infinity

    def shared_storage(self, rows: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return `rows` flat storages of zeros per worker of this host, shared among them."""
        like, size = self.parameters[0], self.layout.flat_size
        if like.device.type != "cpu":  # GPUs share no memory: each worker is a separate host
            return [[like.new_zeros(size, dtype=dtype) for _ in range(rows)]]
        shared = self.world.shared(rows * size * dtype.itemsize)  # uint8 [nbytes] per worker
        # [rows, flat_size] of `dtype`, as a list of rows
        return [list(memory.view(dtype).view(rows, size).unbind()) for memory in shared]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view of flat storage per parameter, with its shape and storage order."""
        return [
            view_like(flat, offset, like)
            for offset, like in zip(self.layout.offsets, self.parameters, strict=False)
        ]

    def slices(self, flat: Tensor, numbers: range) -> Tensor:
        """Return adjacent slices of flat storage, 1-D."""
        bounds = self.layout.bounds
        return flat[bounds[numbers.start] : bounds[numbers.stop]]

    def slice_of(self, flat: Tensor, rank: int) -> Tensor:
        """Return a worker's own slice of flat storage, 1-D."""
        number = self._route.numbers[rank]
        return self.slices(flat, range(number, number + 1))

    def size_of(self, rank: int) -> int:
        """Return the elements of a worker's own slice."""
        number = self._route.numbers[rank]
        return self.layout.bounds[number + 1] - self.layout.bounds[number]

    def joined(self, by_rank: Tensor, unit: int = 1) -> Tensor:
        """Join what workers have for each `unit` elements of their own slices: [workers, most].

        The result is 1-D, in the order of flat storage.
        """
        ranks = sorted(range(self.world.size), key=self._route.numbers.__getitem__)
        if self.layout.owners is None and ranks == [*range(self.world.size)]:
            return by_rank.view(-1)  # of equal slices
        # an index of tensors would make a GPU wait
        return torch.cat([by_rank[rank, : self.size_of(rank) // unit] for rank in ranks])

    def _held_by(self, rank: int) -> range:
        """Return the numbers of the slices whose sums a worker holds."""
        return range(self._route.numbers[rank], self._route.numbers[rank] + 1)

    def _spans_of(self, ranks: range) -> list[Span]:
        return self._assignment.subtrees(ranks)

    def _host_sums(self, numbers: range) -> dict[Span, Tensor]:
        """Return slices of every sum on this host; adding them may reuse their memory."""
        return {
            span: self.slices(flat, numbers)
            for spans, flats in zip(self._spans, self._sums, strict=True)
            for span, flat in zip(spans, flats, strict=False)  # some workers have spare flats
        }

    @property
    def is_read(self) -> bool:
        """Whether workers may still read the previous gradients: no barrier has happened since.

        All workers of a host get the same answer.
        """
        return self.world.shares_memory and self.world.barriers <= self._read_until

    def free(self) -> None:
        """Note a barrier of this host: all of its workers have finished their sums."""
        self._read_until = -1

    def put(self, own_gradients: Sequence[Gradients]) -> None:
        """Take the gradients of this worker's subtrees; `sum` needs a barrier after this.

        They must stay as they are until `sum` has returned: large ones may be sent as they are.
        """
        wait_until_free([self])
        for views, gradients in zip(self.own_views, own_gradients, strict=True):  # per subtree
            copy_gradients(views, gradients)

    def size(self, own_gradients: Sequence[Gradients]) -> Tensor:
        """Return the size of what `put` took, as `size_of_flats` does, before a barrier."""
        return size_of_flats(self._own_flats[: len(own_gradients)])

    def spare_held(self) -> None:
        """Move gathered gradients that user code still holds out of the memory of the next ones."""
        views = self.own_views[0] if self._converted is None else self._converted[1]
        for number, references in enumerate(list(map(getrefcount, views))):
            if references > UNHELD:
                held = views[number]
                views[number] = held.detach()  # a new object with the old memory
                held.data = held.clone()  # the old object with new memory

    def receive(self) -> None:  # noqa: B027  most begin to receive when they begin to send
        """Begin to receive what other hosts send.

        What arrives earlier stays in the kernel's buffer, and the sender waits once that is full.
        """

    def start(self) -> None:  # noqa: B027  one host sends nothing
        """Begin to send sums to other hosts; all workers of this one must have called `put`.

        `sum` calls this if nothing was started.
        """

    def send_on(self) -> None:  # noqa: B027  most send everything in `start`
        """Begin to send on what other workers have sent since `start`.

        Call it before the next exchange starts, so that both are on their way at once.
        """

    @abstractmethod
    def sum(self) -> Tensor:
        """Return the slices that this worker holds, 1-D, of the sum over all lanes."""

    def sum_parts(self) -> Iterator[Tensor]:
        """Yield what `sum` returns in those of its `parts` that have arrived, in order."""
        yield self.sum()

    def finish_unused(self) -> None:  # noqa: B027  one host sends nothing
        """Wait for an exchange that was started by a call that failed: its memory is in use."""

    def storages(self) -> list[Tensor]:
        """Return the flat gradients of this host's workers, which `gather` completes."""
        return [flats[0] for flats in self._sums]  # [local_workers, flat_size]

    def converted(self) -> list[Tensor]:
        """Return the gathered gradients in the parameters' dtype."""
        dtype = self.parameters[0].dtype
        if self.dtype == dtype:
            return self.own_views[0]
        if self._converted is None:
            flat = torch.empty_like(self._own_flats[0], dtype=dtype)
            self._converted = flat, self.views(flat)
        flat, views = self._converted
        flat.copy_(self._own_flats[0])  # one large copy is faster than one per parameter
        return views

    def begin_gather(self, flat: Tensor, what: str) -> Callable[[], None]:
        """Begin to receive the slices of other hosts that this worker passes on to its own."""
        return lambda: None  # this host has all slices already

    def copy_from_host(self, flats: Sequence[Tensor]) -> None:
        """Copy the slices that the other workers of this host have, between two barriers."""
        rank, own_flat = self.world.rank, flats[self.local_rank]
        for worker, flat in zip(self._route.host, flats, strict=True):
            for numbers in () if worker == rank else self._completed_by(worker):
                self.slices(own_flat, numbers).copy_(self.slices(flat, numbers))

    def _completed_by(self, worker: int) -> list[range]:
        """Return the numbers of the slices that a worker has for the others of its host."""
        return list(map(self._held_by, self._route.owners[worker]))


class HostExchange(Exchange):
    """All workers are on one host, so everything is in its memory once they have put it there."""

    def sum(self) -> Tensor:
        host_sums = self._host_sums(self.held)
        if (0, self._lanes) not in host_sums:  # a single worker has put it there
            add_all(self._lanes, host_sums, self._out)
        self._read_until = self.world.barriers
        return self._out


def wait_until_free(exchanges: Sequence[Exchange]) -> None:
    """Wait until no worker reads the previous gradients, unless a barrier since ensured it."""
    for exchange in exchanges:
        exchange.finish_unused()
    if any(exchange.is_read for exchange in exchanges):
        exchanges[0].world.barrier_on_host("waiting for the previous gradient sum")
        for exchange in exchanges:
            exchange.free()


def all_gather(flats_of: Sequence[tuple[Exchange, Sequence[Tensor]]], what: str) -> None:
    """Complete the storages of this host's workers, each of which has what its worker holds."""
    for exchange, _ in flats_of:
        exchange.finish_unused()
    waits = [
        exchange.begin_gather(flats[exchange.local_rank], what) for exchange, flats in flats_of
    ]
    for wait in waits:
        wait()
    if flats_of and flats_of[0][0].world.shares_memory:
        world = flats_of[0][0].world
        world.barrier_on_host(what)  # what other hosts sent has arrived in this host's memory
        for exchange, flats in flats_of:
            exchange.copy_from_host(flats)
        world.barrier_on_host(what)  # no worker reads this storage after this
        for exchange, _ in flats_of:
            exchange.free()


def gather(exchanges: Sequence[Exchange]) -> list[list[Tensor]]:
    """Return the complete gradient of every parameter, after all workers have called `sum`.

    They are in the parameters' dtype, even if they were rounded. All take one round of messages.
    """
    all_gather([(exchange, exchange.storages()) for exchange in exchanges], "gathering gradients")
    return [exchange.converted() for exchange in exchanges]


def add_all(lanes: int, sums: Mapping[Span, Tensor], out: Tensor) -> None:
    """Add sums along the tree, up to all lanes; this may reuse their memory."""
    left, right = (add_up(half, sums) for half in halves((0, lanes)))
    torch.add(left, right, out=out)


def add_up(span: Span, sums: Mapping[Span, Tensor]) -> Tensor:
    """Add sums along the tree, in the memory of the first, which no other worker reads."""
    return tree_sum(span, sums.get, Tensor.add_)
