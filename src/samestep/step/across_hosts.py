"""The ways in which several hosts sum gradients, and the choice among them.

A host first adds the gradients of its workers, then sends the sums of its subtrees to other hosts.
GPUs share no memory, so each counts as a host.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from samestep.comm.base import Arrival, Share
from samestep.step.exchange import (
    Exchange,
    ExchangeSpec,
    HostExchange,
    Route,
    add_all,
    add_up,
    wait_until_free,
)
from samestep.step.finite import size_of_many
from samestep.step.gradients import Gradients, copy_gradients
from samestep.step.layout import ALIGNMENT, Span

# Parts of sums, which are sent while the next ones are copied, and added while those arrive.
CHUNK_BYTES: Final = 1 << 20  # the first and the last ones
MOST_CHUNK_BYTES: Final = 16 << 20
SERIAL_ELEMENTS: Final = 1 << 15  # up to this many, torch uses one thread

PartialSums = tuple[Mapping[Span, Tensor], Callable[[], None]]  # complete after the call
SendParts = Callable[[Sequence[Iterable[Tensor]]], list[Arrival]]  # gets the parts of each sum


def choose_exchange(spec: ExchangeSpec) -> Exchange:
    """Return the exchange that sends the least for what is needed."""
    world = spec.world
    if len(world.hosts) == 1:
        return HostExchange(spec)
    if spec.across == "host" and spec.parameters[0].device.type == "cpu":
        sums = [len(spec.assignment.subtrees(host)) for host in world.hosts]
        sizes = {len(host) for host in world.hosts}
        # Without partners, a swap is a call of all workers for each part, but places of a host may
        # have other numbers of parts if slices differ in size.
        can_swap = world.partners is not None or spec.owners is None or sizes == {1}
        if sums == [1, 1] and len(sizes) == 1 and can_swap:  # each sends its only sum
            # several workers of a host add their gradients in flat storage, so none is sent as is
            return UncopiedSwapExchange(spec) if sizes == {1} else SwapExchange(spec)
        if world.partners is not None:  # direct connections between partners
            return ShareExchange(spec)
    # Otherwise, only the owner of a slice sums it. With several GPUs on some of the machines, a sum
    # of a machine, and not the gradients of each worker, crosses the network.
    if 1 < len(world.machines) < world.size:
        return MachineExchange(spec)
    return OwnerExchange(spec)


class OwnerExchange(Exchange):
    """Each slice of a host's sums goes to its only owner, of all parameters at once."""

    _partial_sums: PartialSums | None = None  # of an exchange that was not awaited yet

    def start(self) -> None:
        self._partial_sums = self._send()

    def sum(self) -> Tensor:
        sums, wait = self._partial_sums or self._send()
        wait()
        add_all(self._lanes, sums, self._out)
        self._partial_sums, self._read_until = None, self.world.barriers
        return self._out

    def finish_unused(self) -> None:
        if self._partial_sums is not None:
            self._partial_sums[1]()
        self._partial_sums = None

    def begin_gather(self, flat: Tensor, what: str) -> Callable[[], None]:
        own_slice = self.slice_of(flat, self.world.rank)
        if not self.world.shares_memory:  # GPUs, or one worker per host: slices are in rank order
            if self.layout.owners is None:
                return self.world.begin_all_gather(flat, own_slice, what)
            if own_slice.device.type != "cpu":  # no slice is as long as others
                out_sizes = [*map(self.size_of, range(self.world.size))]
                sizes = [len(own_slice)] * self.world.size
                sent_to_all = own_slice.repeat(self.world.size)
                return self.world.begin_all_to_all(flat, out_sizes, sent_to_all, sizes, what)
        # several hosts of CPU workers: each slice crosses the network once per other host
        sent = dict.fromkeys(self._route.partners, own_slice)
        owners = self._route.owners[self.world.rank][1:]
        received = {owner: self.slice_of(flat, owner) for owner in owners}
        return self.world.begin_transfer(sent, received, what)

    def _send(self) -> PartialSums:
        """Begin to send the sums of this host to their owners."""
        owners = self._route.owners[self.world.rank]
        # [owners, spans] of slices
        sums = {owner: self._host_sums(self._held_by(owner)) for owner in owners}
        return self._send_to_owners(self._route, sums)

    def _send_to_owners(
        self, route: Route, sums: Mapping[int, Mapping[Span, Tensor]]
    ) -> PartialSums:
        """Send sums of this host, by owner, to the owners of their slices on other hosts."""
        own_spans, rank = self._spans_of(route.host), self.world.rank
        ranks, served, size = range(self.world.size), route.owners[rank][1:], self.size_of(rank)
        spans_from = {
            partner: self._spans_of(host)
            for partner, host in zip(route.partners, route.others, strict=True)
        }
        serves_all = len(served) == len(ranks) - 1 and self._route.numbers == [*ranks]
        if serves_all and len(own_spans) == 1:  # one more slice is sent, to itself, but none copied
            sent, served, spans_from[rank] = self._own_flats[0], [*ranks], own_spans
        else:  # [served, own_spans] slices; the empty one gives a dtype if there are none
            parts = [add_up(span, sums[owner]) for owner in served for span in own_spans]
            sent = torch.cat([self._own_flats[0][:0], *parts])
        spans = [span for other in ranks for span in spans_from.get(other, ())]
        out = sent.new_empty((len(spans), size))  # slices with this owner
        wait = self.world.begin_all_to_all(
            out.view(-1),
            [size * len(spans_from.get(other, ())) for other in ranks],
            sent,
            [self.size_of(other) * len(own_spans) * (other in served) for other in ranks],
            "exchanging gradients",
        )
        return {**sums[rank], **dict(zip(spans, out, strict=True))}, wait


class MachineExchange(OwnerExchange):
    """GPUs of several machines: workers of one machine send each other their gradients.

    As soon as the next exchange starts, they send the machine's sums to owners on other machines.
    """

    def __init__(self, spec: ExchangeSpec) -> None:
        super().__init__(spec)
        self._machine = Route(self.world.machines, self.world.rank)
        # sends on what was exchanged within the machine
        self._nearby: Callable[[], PartialSums] | None = None

    def start(self) -> None:
        self._nearby = self._send_nearby()

    def send_on(self) -> None:
        if self._nearby is not None:
            self._partial_sums = self._send()

    def _send(self) -> PartialSums:
        nearby, self._nearby = self._nearby or self._send_nearby(), None
        return nearby()

    def _send_nearby(self) -> Callable[[], PartialSums]:
        """Begin to send the workers of this machine what they add up.

        Returns a call that begins to send the machine's sums to the owners on other machines.
        """
        ranks, owners = range(self.world.size), self._machine.owners
        sums = self._own_flats[: len(self.own_spans)]
        # [near_workers, own_spans, owned] slices, in the order of the ranks that get them
        parts = [
            self.slice_of(flat, owner)
            for served in owners.values()
            for flat in sums
            for owner in served
        ]
        spans_from = {rank: self._spans_of(range(rank, rank + 1)) for rank in owners}
        spans = [span for rank_spans in spans_from.values() for span in rank_spans]
        owned = owners[self.world.rank]
        sizes = [*map(self.size_of, owned)]
        out = parts[0].new_empty((len(spans), sum(sizes)))  # rows of owned slices
        wait = self.world.begin_all_to_all(
            out.view(-1),
            [sum(sizes) * len(spans_from.get(rank, ())) for rank in ranks],
            torch.cat(parts),
            [sum(map(self.size_of, owners.get(rank, ()))) * len(sums) for rank in ranks],
            "exchanging gradients",
            polled=False,
        )
        by_owner = zip(owned, out.split(sizes, dim=1), strict=True)  # [spans, size] per owner
        sums_of = {owner: dict(zip(spans, part, strict=True)) for owner, part in by_owner}

        def send_on() -> PartialSums:
            with _side_stream(out.device) as stream:  # backward need not wait for the network
                wait()
                partial_sums = self._send_to_owners(self._machine, sums_of)
            if stream is not None:  # memory is not reused until both streams are done with it
                out.record_stream(stream)
                for row in partial_sums[0].values():
                    row.record_stream(torch.cuda.current_stream(out.device))
            return partial_sums

        return send_on


class PartnerExchange(Exchange):
    """Every host needs all sums: workers in one place on all hosts, partners, hold the same ones.

    That needs CPUs, and the same number of workers on every host. Sums arrive in parts.
    """

    across = "host"
    _sizes: list[int]  # of the parts, in elements

    def __init__(self, spec: ExchangeSpec) -> None:
        super().__init__(spec)
        self._host_spans = self._spans_of(self._route.host)
        dtype = self.parameters[0].dtype
        is_converted = spec.is_sharded and dtype != self.dtype
        self._total = torch.empty_like(self._out, dtype=dtype) if is_converted else None
        self._send: SendParts | None = None  # if what other hosts send is expected
        # of an exchange whose parts were not awaited yet
        self._started: list[Arrival] | None = None

    def _held_by(self, rank: int) -> range:
        number, hosts = self._route.numbers[rank], len(self.world.hosts)
        # partners are adjacent, so what a worker and its partners own is one range
        return range(number // hosts * hosts, (number // hosts + 1) * hosts)

    @abstractmethod
    def _begin(self) -> SendParts:
        """Begin to receive what other hosts send; return a call that sends the sums of this one."""

    def receive(self) -> None:
        self._send = self._send or self._begin()

    def start(self) -> None:
        host_sums = self._host_sums(self.held)
        # this worker adds the held slices for its whole host, each 1-D
        sums = [add_up(span, host_sums) for span in self._host_spans]
        # Messages are in the memory of the host's first worker. Sums are awaited at any time, so
        # only a barrier of the host shows that no worker needs them.
        self._read_until = math.inf
        self._start([total.split(self._sizes) for total in sums])

    def _start(self, sums: Sequence[Iterable[Tensor]]) -> None:
        send, self._send = self._send or self._begin(), None
        self._started = send(sums)

    def sum(self) -> Tensor:
        for _ in self.sum_parts():
            pass
        return self._out if self._total is None else self._total

    def sum_parts(self) -> Iterator[Tensor]:
        if self._started is None:
            self.start()
        started, out, total = self._started or [], self._out, self._total
        start = end = 0
        for number, (arrival, size) in enumerate(zip(started, self._sizes, strict=True), start=1):
            arrival.wait()
            end += size
            # parts that are there already are yielded together
            if number == len(started) or not started[number].is_there():
                ready = slice(start, end)
                yield out[ready] if total is None else total[ready].copy_(out[ready])
                start = end
        self._started = None

    def finish_unused(self) -> None:
        for arrival in self._started or ():
            arrival.wait()
        self._started = None

    def _completed_by(self, worker: int) -> list[range]:
        return [self._held_by(worker)]


class SwapExchange(PartnerExchange):
    """Two hosts with one sum each swap them: as many bytes as of shares, in half as many steps."""

    def __init__(self, spec: ExchangeSpec) -> None:
        super().__init__(spec)
        (self._partner,), (self._own_span,) = self._route.partners, self._host_spans
        (self._other_span,) = self._spans_of(self._route.others[0])
        self._regions = [*self._cut(self._out)]
        self._sizes = [part.numel() for region in self._regions for part in region.parts]
        self.parts = len(self._sizes)
        received = torch.empty_like(self._out)  # the sum of the other host
        self._arriving = received.split(self._sizes)
        if spec.is_sharded:  # only this worker needs the total, so it replaces what arrives
            self._out = received
        self._out_parts = self._out.split(self._sizes)

    def _cut(self, flat: Tensor) -> Iterator[Region]:
        """Cut the sum into regions: one, unless gradients are sent without a copy."""
        yield Region(slice(None), _in_chunks(flat))

    def _begin(self) -> SendParts:
        send = self.world.begin_swap(self._partner, self._arriving, "exchanging gradients")

        def start(sums: Sequence[Iterable[Tensor]]) -> list[Arrival]:
            sent = list[Tensor]()  # to be added to what arrives

            def kept() -> Iterator[Tensor]:
                for part in sums[0]:
                    sent.append(part)
                    yield part

            arrivals = send(kept())
            rows = zip(sent, self._arriving, self._out_parts, arrivals, strict=True)
            return [Arrival(partial(self._add, *row), row[-1].is_there) for row in rows]

        return start

    def _add(self, sent: Tensor, arriving: Tensor, out: Tensor, arrival: Arrival) -> None:
        """Add a part of both sums once it has arrived."""
        arrival.wait()
        add_all(self._lanes, {self._own_span: sent, self._other_span: arriving}, out)


class Region(NamedTuple):
    """Neighbors in flat storage, which is sent in `parts`.

    They are several small parameters, or a large one without the `rest`, its last elements beyond a
    multiple of 64, which belong to the next region.
    """

    parameters: slice
    parts: Sequence[Tensor]
    rest: Tensor | None = None


class UncopiedSwapExchange(SwapExchange):
    """Two hosts with one worker each swap large gradients as they are, others once copied in."""

    _own_gradients: Gradients  # until they are sent

    def put(self, own_gradients: Sequence[Gradients]) -> None:
        wait_until_free([self])
        (self._own_gradients,) = own_gradients

    def size(self, own_gradients: Sequence[Gradients]) -> Tensor:
        return size_of_many(own_gradients[0])

    def start(self) -> None:
        gradients, self._own_gradients = self._own_gradients, []
        self._start([self._put_in_parts(gradients)])

    def _cut(self, flat: Tensor) -> Iterator[Region]:
        first = start = 0
        pairs = zip(self.layout.sizes, self.layout.offsets, strict=False)
        for number, (size, offset) in enumerate(pairs):
            aligned_size = size // ALIGNMENT * ALIGNMENT
            if aligned_size * self.dtype.itemsize >= CHUNK_BYTES:
                yield Region(slice(first, number), _in_chunks(flat[start:offset]))
                parts = _in_chunks(flat[offset : offset + aligned_size])
                rest = flat[offset + aligned_size : offset + size]
                yield Region(slice(number, number + 1), parts, rest)
                first, start = number + 1, offset + aligned_size
        yield Region(slice(first, None), _in_chunks(flat[start:]))

    def _put_in_parts(self, gradients: Gradients) -> Iterator[Tensor]:
        """Yield parts to send: large gradients as they are, others once they are copied in."""
        for region in self._regions:
            views = self.own_views[0][region.parameters]
            region_gradients = gradients[region.parameters]
            gradient = None if region.rest is None else region_gradients[0]
            if region.rest is None or gradient is None or not _has_layout_of(views[0], gradient):
                copy_gradients(views, region_gradients)
                yield from region.parts
                continue
            values = gradient.as_strided((gradient.numel(),), (1,))  # 1-D, in storage order
            sizes = [part.numel() for part in (*region.parts, region.rest)]
            *of_gradient, rest = values.split(sizes)
            region.rest.copy_(rest)
            for part, source in zip(region.parts, of_gradient, strict=True):
                yield source if source.dtype == part.dtype else part.copy_(source)


class ShareExchange(PartnerExchange):
    """Each partner adds a share of each part, and sends the others the total.

    Another thread does so as soon as their sums have arrived.
    """

    def __init__(self, spec: ExchangeSpec) -> None:
        super().__init__(spec)
        self._sizes = chunks(len(self._out), self.dtype.itemsize, len(self.world.hosts))
        self.parts = len(self._sizes)
        self._share_sizes = {size: self._divided(size) for size in set(self._sizes)}
        # by part: the sums of this worker's share of it, by span
        self._share_sums: list[dict[Span, Tensor]] = []
        self._shares = list(map(self._share_of, self._out.split(self._sizes)))

    def _begin(self) -> SendParts:
        partners = self.world.partners
        assert partners is not None  # noqa: S101  shares need them
        send = partners.begin_sums(self._shares, "exchanging gradients")
        return lambda sums: send(self._divide_sums(sums))

    def _divide_sums(self, sums: Sequence[Iterable[Tensor]]) -> Iterator[dict[int, list[Tensor]]]:
        """Yield the shares of partners in `sums`, views [host_spans, parts], from part to part."""
        rank = self.world.rank
        for share_sums, parts in zip(self._share_sums, zip(*sums, strict=True), strict=True):
            shares = list(map(self._shares_of, parts))  # [host_spans, workers]
            own_shares = [by_rank[rank] for by_rank in shares]
            share_sums.update(zip(self._host_spans, own_shares, strict=True))
            yield {other: [by_rank[other] for by_rank in shares] for other in self._route.partners}

    def _share_of(self, part: Tensor) -> Share:
        """Return this worker's share of a part; the sums of it go into `_share_sums`."""
        totals = self._shares_of(part)  # views of flat storage, so totals arrive in their place
        total = totals.pop(self.world.rank)
        share_sums, received = dict[Span, Tensor](), dict[int, Sequence[Tensor]]()
        for partner, host in zip(self._route.partners, self._route.others, strict=True):
            sums = {span: torch.empty_like(total) for span in self._spans_of(host)}
            share_sums.update(sums)
            received[partner] = list(sums.values())
        self._share_sums.append(share_sums)  # `_divide_sums` adds those of this host
        add = partial(_add_serially, self._lanes, share_sums, total)
        return Share(received, add, total, totals)

    def _divided(self, size: int) -> dict[int, int]:
        """Divide the elements of a part among this worker and its partners, by rank."""
        ranks = sorted([self.world.rank, *self._route.partners])
        ends = [size * n // len(ranks) // ALIGNMENT * ALIGNMENT for n in range(len(ranks))]
        sizes = [end - start for start, end in pairwise([*ends, size])]  # the last has the rest
        return dict(zip(ranks, sizes, strict=True))

    def _shares_of(self, part: Tensor) -> dict[int, Tensor]:
        """Return the shares of a part, by rank."""
        sizes = self._share_sizes[len(part)]
        return dict(zip(sizes, part.split(list(sizes.values())), strict=True))


def chunks(elements: int, itemsize: int, hosts: int = 2) -> list[int]:
    """Return the sizes, in elements, of the parts of flat storage that are sent one by one.

    The first one is small, so that the network starts early, and the last ones are, so that little
    is left to do once they have arrived. Those in between are larger, since each takes time, too.
    Parts grow with the number of hosts, since partners send shares of them.
    """
    sizes = []
    size = least = CHUNK_BYTES * hosts // 2 // itemsize
    largest = MOST_CHUNK_BYTES * hosts // 2 // itemsize
    while elements:
        half = elements // 2 // ALIGNMENT * ALIGNMENT  # sizes halve towards the end
        size = min(max(min(size, half), least), elements)
        if elements - size < least // 2:
            size = elements  # instead of a tiny last part
        sizes.append(size)
        elements -= size
        size = min(2 * size, largest)
    return sizes


def _in_chunks(flat: Tensor) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = flat.split(chunks(len(flat), flat.element_size()))
    return parts


def _has_layout_of(view: Tensor, gradient: Tensor) -> bool:
    """Return whether a gradient's memory has the values of `view` in the same places."""
    is_lazy = gradient.is_conj() or gradient.is_neg()  # memory lacks an operation
    return not is_lazy and gradient.stride() == view.stride()


def _add_serially(lanes: int, sums: Mapping[Span, Tensor], out: Tensor) -> None:
    """Do what `add_all` does, in pieces so small that torch uses the calling thread alone."""
    pieces = zip(*(tensor.split(SERIAL_ELEMENTS) for tensor in (out, *sums.values())), strict=True)
    for piece, *parts in pieces:  # the same elements of `out` and of each sum
        add_all(lanes, dict(zip(sums, parts, strict=True)), piece)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Enter a separate stream on a GPU, which waits for what the current one has to do so far."""
    if device.type != "cuda":
        yield None
        return
    stream = _second_stream(device)
    stream.wait_event(torch.cuda.current_stream(device).record_event())
    with torch.cuda.stream(stream):
        yield stream


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
