"""The sum of gradients over all workers, in flat storage, along the tree over lanes.

Every worker owns a slice of the flat gradient and sums it for all workers. Workers on one host read
each other's gradients in shared memory. A host first adds the gradients of its workers, then sends
the sums of its subtrees to the slices' owners on other hosts.

Gradients of unsharded optimizers, and of those sharded within a host, are needed on every host. So
the workers in one place on all hosts add them up in parts: each adds its share of a part as soon as
it has the others' sums, in the background, and sends them the total. Two hosts with one sum each
swap their sums instead, which are as many bytes in half as many steps.

GPUs share no memory. Workers of one machine send each other their gradients instead, and then, as
soon as the next exchange starts, the machine's sums to the owners on other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from sys import getrefcount
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.comm.base import Arrival, Share, World
from samestep.step.gradients import Gradients, Parameters, copy_gradients, sum_dtype
from samestep.step.layout import (
    ALIGNMENT,
    GPU_ALIGNMENT_BYTES,
    Layout,
    Span,
    halves,
    lanes_of,
    subtrees,
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
# Parts of sums, which are sent while the next ones are copied, and added while those arrive.
CHUNK_BYTES: Final = 1 << 20  # the first and the last ones
MOST_CHUNK_BYTES: Final = 16 << 20
SERIAL_ELEMENTS: Final = 1 << 15  # up to this many, torch uses one thread
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
        given = {id(parameter): number for number, parameter in enumerate(parameters)}
        ordered = sorted(parameters, key=lambda one: places.get(id(one), len(places)))
        by_place = buckets(ordered, world, round_to)
        return [sorted(some, key=lambda one: given[id(one)]) for some in by_place]
    sizes = [one.numel() * sum_dtype(one.dtype, round_to).itemsize for one in parameters]
    most = bucket_limit(sum(sizes))
    pairs = [*zip(parameters, sizes, strict=True)]
    groups: list[list[Parameter]] = []
    for dtype in reversed(dict.fromkeys(parameter.dtype for parameter in parameters)):
        group: list[Parameter] = []
        total = 0
        for parameter, size in reversed(pairs):
            if parameter.dtype != dtype:
                continue
            limit = most if len(groups) > 1 else most // 2
            is_full = total + size > limit and total >= limit // LEAST_FILL
            if not group or (is_full and len(world.hosts) > 1):
                group, total = [], 0
                groups.append(group)
            group.append(parameter)
            total += size
    return [group[::-1] for group in reversed(groups)]


def chunks(elements: int, itemsize: int, hosts: int = 2) -> list[int]:
    """Return the sizes, in elements, of the parts of flat storage that are sent one by one.

    The first one is small, so that the network starts early, and the last ones are, so that little
    is left to do once they have arrived. Those in between are larger, since each takes time, too.
    Parts grow with the number of hosts, since partners send shares of them.
    """
    sizes = []
    size = least = CHUNK_BYTES * hosts // 2 // itemsize
    most = MOST_CHUNK_BYTES * hosts // 2 // itemsize
    while elements:
        half = elements // 2 // ALIGNMENT * ALIGNMENT
        size = min(max(min(size, half), least), elements)
        if elements - size < least // 2:
            size = elements  # instead of a tiny last part
        sizes.append(size)
        elements -= size
        size = min(2 * size, most)
    return sizes


def _in_chunks(flat: Tensor) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = flat.split(chunks(len(flat), flat.element_size()))
    return parts


class Run(NamedTuple):
    """Neighbors in flat storage, which is sent in `parts`.

    They are several small parameters, or a large one without the `rest`, its last elements beyond a
    multiple of 64, which belong to the next run.
    """

    parameters: slice
    parts: Sequence[Tensor]
    rest: Tensor | None = None


class PartialSums(NamedTuple):
    """A part of an exchange: once it is there, `known` has sums by span, which add up to `out`."""

    known: Mapping[Span, Tensor]
    out: Tensor
    arrival: Arrival


SendParts = Callable[[Sequence[Iterable[Tensor]]], list[PartialSums]]  # gets the parts of each sum


class Exchange:
    """Sums gradients of parameters of one dtype over all workers.

    With `round_to`, gradients are rounded to that dtype, and so is each sum of two of them. Sums on
    any worker then have that dtype exactly, in memory and in messages.

    A worker holds the sums of its own slice, and across "host" those of its partners' as well, so
    that the workers of each host hold all slices. That needs CPUs, the same number of workers on
    every host, and a world that `adds_early` unless two hosts swap; otherwise workers hold their
    own slices. `held` numbers them in flat storage.

    Call `put`, wait for all workers, then call `sum`, and `gather` for the complete gradients. The
    next `put` reuses the memory of the tensors that `sum` and `gather` return; `spare_held` before
    it keeps those of `gather` that are still in use.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lanes: int,
        world: World,
        round_to: torch.dtype | None = None,
        across: Across = "host",
    ) -> None:
        self.parameters = list(parameters)
        self.dtype = sum_dtype(self.parameters[0].dtype, round_to)
        is_cpu, alignment = self.parameters[0].device.type == "cpu", ALIGNMENT
        if not is_cpu:
            itemsize = min(self.dtype.itemsize, self.parameters[0].dtype.itemsize)
            alignment = max(ALIGNMENT, GPU_ALIGNMENT_BYTES // itemsize)
        sizes = tuple(parameter.numel() for parameter in parameters)
        self.layout = Layout(sizes, world.size, alignment)
        self.world, self._lanes = world, lanes
        self._route = route = Route(world.hosts, world.rank)
        self.local_rank = route.local_rank
        self.own_number = route.numbers[world.rank]
        self._host_spans = self._spans_of(route.host)
        sums = [len(self._spans_of(host)) for host in world.hosts]
        is_pair = route.is_uniform and sums == [1, 1]
        is_early = is_cpu and (is_pair or world.adds_early)
        self.across: Across = across if is_early else "world"
        self.swaps = is_pair and self.across == "host"
        self.held = self._held_by(world.rank)
        self._spans = [self._spans_of(range(rank, rank + 1)) for rank in route.host]
        self.own_spans = self._spans[self.local_rank]
        self._sums = self.shared_storage(max(map(len, self._spans)), self.dtype)
        self._own = self._sums[self.local_rank]
        # The gradients of this worker's subtrees by parameter; `put` skips those already in place.
        self.own_views = list(map(self.views, self._own[: len(self.own_spans)]))
        self.converts = False  # the held sums to the parameters' dtype, as they arrive
        self._total: Tensor | None = None
        self._converted: tuple[Tensor, list[Tensor]] | None = None
        self._summed_at = -1  # the world's number of barriers when gradients were last read
        self._is_sending = False  # workers may send the last ones until their optimizers' steps
        near = world.machines if self.across == "world" else ()
        self._machine = Route(near, world.rank) if 1 < len(near) < world.size else None
        # sends on what was exchanged within a machine
        self._nearby: Callable[[], PartialSums] | None = None
        self._send: SendParts | None = None  # if what other hosts send is expected
        # of an exchange whose parts were not awaited yet
        self._started: list[PartialSums] | None = None
        if self.across == "host":
            flat = self.slices(self._own[0], self.held)
            if self.swaps:
                (self._other_span,) = self._spans_of(route.others[0])
                self._runs = [*self._cut(flat)]
                self._sizes = [part.numel() for run in self._runs for part in run.parts]
                self._received = torch.empty_like(flat)
                self._arriving = self._received.split(self._sizes)
            else:
                self._sizes = chunks(len(flat), self.dtype.itemsize, len(world.hosts))
                self._share_sizes = {size: self._divided(size) for size in set(self._sizes)}
                self._known: list[dict[Span, Tensor]] = []  # sums by span, of a share of each part
                self._shares = list(map(self._share_of, flat.split(self._sizes)))

    def shared_storage(self, rows: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return `rows` flat storages of zeros per worker of this host, shared among them."""
        like, size = self.parameters[0], self.layout.flat_size
        if like.device.type != "cpu":  # GPUs share no memory: each worker is a separate host
            return [[like.new_zeros(size, dtype=dtype) for _ in range(rows)]]
        shared = self.world.shared(rows * size * dtype.itemsize)
        return [list(one.view(dtype).view(rows, size).unbind()) for one in shared]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view of flat storage per parameter, with its shape and storage order."""
        return [
            view_like(flat, offset, like)
            for offset, like in zip(self.layout.offsets, self.parameters, strict=False)
        ]

    def slices(self, flat: Tensor, numbers: range) -> Tensor:
        """Return adjacent slices of flat storage, 1-D."""
        size = self.layout.slice_size
        return flat[numbers.start * size : numbers.stop * size]

    def slice_of(self, flat: Tensor, rank: int) -> Tensor:
        """Return a worker's own slice of flat storage, 1-D."""
        number = self._route.numbers[rank]
        return self.slices(flat, range(number, number + 1))

    def by_number(self, by_rank: Tensor) -> Tensor:
        """Sort rows of all workers' own slices, by rank, into the order of flat storage."""
        ranks = sorted(range(self.world.size), key=self._route.numbers.__getitem__)
        # an index would make a GPU wait
        return by_rank if ranks == [*range(self.world.size)] else by_rank[ranks]

    def _held_by(self, rank: int) -> range:
        number, hosts = self._route.numbers[rank], len(self.world.hosts)
        if self.across == "world":
            return range(number, number + 1)
        return range(number // hosts * hosts, (number // hosts + 1) * hosts)

    @property
    def is_read(self) -> bool:
        """Whether workers may still read the previous gradients: no barrier has happened since.

        All workers of a host get the same answer.
        """
        is_summing = self.world.barriers == self._summed_at
        return self.world.shares_memory and (self._is_sending or is_summing)

    def put(self, own: Sequence[Gradients]) -> None:
        """Copy in the gradients of this worker's subtrees; `sum` needs a barrier after this."""
        wait_until_free([self])
        for views, gradients in zip(self.own_views, own, strict=True):
            copy_gradients(views, gradients)

    def spare_held(self) -> None:
        """Move gathered gradients that user code still holds out of the memory of the next ones."""
        views = self.own_views[0] if self._converted is None else self._converted[1]
        for number, references in enumerate(list(map(getrefcount, views))):
            if references > UNHELD:
                held = views[number]
                views[number] = held.detach()
                held.data = held.clone()

    def receive(self) -> None:
        """Begin to receive what other hosts send, if this worker holds what its partners do.

        What arrives before this call stays in the kernel's buffer, and the sender waits once that
        is full.
        """
        if self.across == "host":
            self._send = self._send or self._begin()

    @property
    def has_parts(self) -> bool:
        """Whether sums arrive in several parts, which `sum_parts` yields."""
        return self.across == "host" and len(self._sizes) > 1

    @property
    def sends_parts(self) -> bool:
        """Whether `put_and_start` sends gradients without a copy, or before it has copied all."""
        return self.swaps and self.has_parts and len(self._route.host) == 1

    def put_and_start(self, own: Sequence[Gradients]) -> None:
        """Do what `put` and `start` do, if it `sends_parts`; gradients must stay as they are."""
        wait_until_free([self])
        self._started = self._send_parts(self._put_in_parts(own[0]))

    def finish_unused(self) -> None:
        """Wait for an exchange that was started by a call that failed: its memory is in use."""
        for part in self._started or ():
            part.arrival.wait()
        self._started = None

    def start(self) -> None:
        """Begin to exchange sums with other hosts; all workers of this one must have called `put`.

        `sum` calls this if nothing was started.
        """
        if self._machine is not None:
            self._nearby = self._send_nearby(self._machine)
        elif self.across == "host":
            self._started = self._send_parts()
        elif self._route.others:
            owners, numbers = self._route.owners[self.world.rank], self._route.numbers
            sums = {r: self._host_sums(range(numbers[r], numbers[r] + 1)) for r in owners}
            self._started = [self._send_to_owners(self._route, sums)]
        else:
            known = self._host_sums(self.held)
            self._started = [PartialSums(known, self._out, Arrival(lambda: None))]

    def start_between_machines(self) -> None:
        """Send on what was exchanged within this machine, if only that was started."""
        if self._nearby is not None:
            self._started, self._nearby = [self._nearby()], None

    @property
    def _out(self) -> Tensor:
        """The slices that this worker holds of the sum over all lanes.

        They take the place of what has arrived if this worker alone needs them.
        """
        is_own = self.swaps and self.converts
        return self._received if is_own else self.slices(self._own[0], self.held)

    def sum(self) -> Tensor:
        """Return the slices that this worker holds, 1-D, of the sum over all lanes.

        They may be in the parameters' dtype already if it `converts`.
        """
        for _ in self.sum_parts():
            pass
        return self._out if self._total is None else self._total

    def sum_parts(self) -> Iterator[Tensor]:
        """Yield what `sum` returns, if it `has_parts` in those that have arrived, in order."""
        if self._started is None and self._nearby is None:
            self.start()
        self.start_between_machines()
        started, out = self._started or [], self._out
        start = end = 0
        for number, part in enumerate(started, start=1):
            part.arrival.wait()
            if (0, self._lanes) not in part.known:
                _add_all(self._lanes, part.known, part.out)
            end += part.out.numel()
            if number == len(started) or not started[number].arrival.is_there():
                own = slice(start, end)
                yield out[own] if self._total is None else self._total[own].copy_(out[own])
                start = end
        self._started = None
        if not (self.across == "host" and self.converts):  # those may call this at any time
            self._is_sending, self._summed_at = False, self.world.barriers

    def _host_sums(self, numbers: range) -> dict[Span, Tensor]:
        """Return slices of every sum on this host; adding them may reuse their memory."""
        return {
            span: self.slices(flat, numbers)
            for spans, flats in zip(self._spans, self._sums, strict=True)
            for span, flat in zip(spans, flats, strict=False)
        }

    def _cut(self, own: Tensor) -> Iterator[Run]:
        """Cut a sum to be swapped into runs: one, unless gradients are sent without a copy."""
        itemsize, first, start = self.dtype.itemsize, 0, 0
        if len(self._route.host) == 1:
            pairs = zip(self.layout.sizes, self.layout.offsets, strict=False)
            for number, (size, offset) in enumerate(pairs):
                whole = size // ALIGNMENT * ALIGNMENT
                if whole * itemsize >= CHUNK_BYTES:
                    yield Run(slice(first, number), _in_chunks(own[start:offset]))
                    parts = _in_chunks(own[offset : offset + whole])
                    rest = own[offset + whole : offset + size]
                    yield Run(slice(number, number + 1), parts, rest)
                    first, start = number + 1, offset + whole
        yield Run(slice(first, None), _in_chunks(own[start:]))

    def _send_parts(self, parts: Iterable[Tensor] | None = None) -> list[PartialSums]:
        """Send the sums of this host, in parts.

        `parts` replace its only sum, which is in flat storage, as each becomes available.
        """
        send, self._send = self._send or self._begin(), None
        known = self._host_sums(self.held)
        sums = [_add_up(span, known) for span in self._host_spans]
        self._is_sending = True  # from the memory of the host's first worker
        if self._total is None and self.converts and self.dtype != self.parameters[0].dtype:
            self._total = torch.empty_like(sums[0], dtype=self.parameters[0].dtype)
        return send([one.split(self._sizes) for one in sums] if parts is None else [parts])

    def _begin(self) -> SendParts:
        """Begin to receive what other hosts send; return a call that sends the sums of this one."""
        return self._begin_swap() if self.swaps else self._begin_sums()

    def _begin_swap(self) -> SendParts:
        (partner,), (span,), other_span = self._route.partners, self._host_spans, self._other_span
        send = self.world.begin_swap(partner, self._arriving, "exchanging gradients")

        def start(sums: Sequence[Iterable[Tensor]]) -> list[PartialSums]:
            sent = list[Tensor]()

            def kept() -> Iterator[Tensor]:
                for part in sums[0]:
                    sent.append(part)
                    yield part

            arrivals = send(kept())
            out = self._arriving if self._out is self._received else self._out.split(self._sizes)
            rows = zip(sent, self._arriving, out, arrivals, strict=True)
            return [PartialSums({span: a, other_span: b}, *rest) for a, b, *rest in rows]

        return start

    def _begin_sums(self) -> SendParts:
        rank, whole = self.world.rank, (0, self._lanes)
        send = self.world.begin_sums(self._shares, "exchanging gradients")

        def divided(sums: Sequence[Iterable[Tensor]]) -> Iterator[dict[int, list[Tensor]]]:
            for known, parts in zip(self._known, zip(*sums, strict=True), strict=True):
                shares = list(map(self._shares_of, parts))
                known.update(zip(self._host_spans, [one[rank] for one in shares], strict=True))
                yield {other: [one[other] for one in shares] for other in self._route.partners}

        def start(sums: Sequence[Iterable[Tensor]]) -> list[PartialSums]:
            arrivals = send(divided(sums))
            pairs = zip(self._out.split(self._sizes), arrivals, strict=True)
            return [PartialSums({whole: part}, part, arrival) for part, arrival in pairs]

        return start

    def _share_of(self, part: Tensor) -> Share:
        """Return this worker's share of a part; the sums of it that are added go into `_known`."""
        totals = self._shares_of(part)
        total = totals.pop(self.world.rank)
        known, received = dict[Span, Tensor](), dict[int, Sequence[Tensor]]()
        for partner, host in zip(self._route.partners, self._route.others, strict=True):
            sums = {span: torch.empty_like(total) for span in self._spans_of(host)}
            known.update(sums)
            received[partner] = list(sums.values())
        self._known.append(known)
        return Share(received, partial(_add_serially, self._lanes, known, total), total, totals)

    def _divided(self, size: int) -> dict[int, int]:
        """Divide the elements of a part among this worker and its partners, by rank."""
        ranks = sorted([self.world.rank, *self._route.partners])
        ends = [size * n // len(ranks) // ALIGNMENT * ALIGNMENT for n in range(len(ranks))]
        sizes = [end - start for start, end in pairwise([*ends, size])]
        return dict(zip(ranks, sizes, strict=True))

    def _shares_of(self, part: Tensor) -> dict[int, Tensor]:
        """Return the shares of a part, by rank."""
        sizes = self._share_sizes[len(part)]
        return dict(zip(sizes, part.split(list(sizes.values())), strict=True))

    def _put_in_parts(self, gradients: Gradients) -> Iterator[Tensor]:
        """Yield parts to send: large gradients as they are, others once they are copied in."""
        for run in self._runs:
            views, some = self.own_views[0][run.parameters], gradients[run.parameters]
            gradient = None if run.rest is None else some[0]
            if run.rest is None or gradient is None or not _has_layout_of(views[0], gradient):
                copy_gradients(views, some)
                yield from run.parts
                continue
            values = gradient.as_strided((gradient.numel(),), (1,))
            *of_gradient, rest = values.split([one.numel() for one in (*run.parts, run.rest)])
            run.rest.copy_(rest)
            for part, own in zip(run.parts, of_gradient, strict=True):
                yield own if own.dtype == part.dtype else part.copy_(own)

    def _send_nearby(self, machine: Route) -> Callable[[], PartialSums]:
        """Begin to send the workers of this machine what they add up.

        Returns a call that begins to send the machine's sums to the owners on other machines.
        """
        size, owners, ranks = self.layout.slice_size, machine.owners, range(self.world.size)
        sums = self._own[: len(self.own_spans)]
        parts = [self.slice_of(flat, o) for some in owners.values() for flat in sums for o in some]
        spans_from = {rank: self._spans_of(range(rank, rank + 1)) for rank in owners}
        spans = [span for some in spans_from.values() for span in some]
        owned = owners[self.world.rank]
        out = parts[0].new_empty((len(spans), len(owned), size))
        wait = self.world.begin_all_to_all(
            out.view(-1),
            [size * len(owned) * len(spans_from.get(rank, ())) for rank in ranks],
            torch.cat(parts),
            [size * len(owners.get(rank, ())) * len(sums) for rank in ranks],
            "exchanging gradients",
            polled=False,
        )
        by_owner = zip(owned, out.unbind(1), strict=True)
        known = {owner: dict(zip(spans, part, strict=True)) for owner, part in by_owner}

        def send_on() -> PartialSums:
            with _side_stream(out.device) as stream:  # backward need not wait for the network
                wait()
                part = self._send_to_owners(machine, known)
            if stream is not None:  # memory is not reused until both streams are done with it
                out.record_stream(stream)
                for row in part.known.values():
                    row.record_stream(torch.cuda.current_stream(out.device))
            return part

        return send_on

    def _send_to_owners(
        self, route: Route, sums: Mapping[int, Mapping[Span, Tensor]]
    ) -> PartialSums:
        """Send sums of this host, by owner, to the owners of their slices on other hosts."""
        size, own_spans, rank = self.layout.slice_size, self._spans_of(route.host), self.world.rank
        ranks, served = range(self.world.size), route.owners[rank][1:]
        spans_from = {
            partner: self._spans_of(host)
            for partner, host in zip(route.partners, route.others, strict=True)
        }
        serves_all = len(served) == len(ranks) - 1 and self._route.numbers == [*ranks]
        if serves_all and len(own_spans) == 1:  # one more slice is sent, to itself, but none copied
            own, served, spans_from[rank] = self._own[0], [*ranks], own_spans
        else:
            parts = [_add_up(span, sums[owner]) for owner in served for span in own_spans]
            own = torch.cat([self._own[0][:0], *parts])
        spans = [span for other in ranks for span in spans_from.get(other, ())]
        out = own.new_empty((len(spans), size))
        wait = self.world.begin_all_to_all(
            out.view(-1),
            [size * len(spans_from.get(other, ())) for other in ranks],
            own,
            [size * len(own_spans) * (other in served) for other in ranks],
            "exchanging gradients",
        )
        slices = range(self.own_number, self.own_number + 1)
        known = {**sums[rank], **dict(zip(spans, out, strict=True))}
        return PartialSums(known, self.slices(self._own[0], slices), Arrival(wait))

    def _spans_of(self, host: range) -> list[Span]:
        lanes = [lanes_of(rank, self.world.size, self._lanes) for rank in (host[0], host[-1])]
        return subtrees(range(lanes[0].start, lanes[1].stop), self._lanes)

    def gather(self) -> list[Tensor]:
        """Return the complete gradient of every parameter, after all workers have called `sum`.

        Rounded gradients are returned in the parameters' dtype.
        """
        return gather([self])[0]

    def storages(self) -> list[Tensor]:
        """Return the flat gradients of this host's workers, which `gather` completes."""
        return [flats[0] for flats in self._sums]

    def converted(self) -> list[Tensor]:
        """Return the gathered gradients in the parameters' dtype."""
        dtype = self.parameters[0].dtype
        if self.dtype == dtype:
            return self.own_views[0]
        if self._converted is None:
            flat = torch.empty_like(self._own[0], dtype=dtype)
            self._converted = flat, self.views(flat)
        flat, views = self._converted
        flat.copy_(self._own[0])  # one large copy is faster than one per parameter
        return views

    def begin_gather(self, own: Tensor, what: str) -> Callable[[], None]:
        """Begin to receive the slices of other hosts that this worker passes on to its own."""
        if self.across == "host":
            return lambda: None
        if not self.world.shares_memory:
            return self.world.begin_all_gather(own, self.slice_of(own, self.world.rank), what)
        if not self._route.others:
            return lambda: None
        sent = dict.fromkeys(self._route.partners, self.slice_of(own, self.world.rank))
        owners = self._route.owners[self.world.rank][1:]
        received = {owner: self.slice_of(own, owner) for owner in owners}
        return self.world.begin_transfer(sent, received, what)

    def copy_from_host(self, flats: Sequence[Tensor]) -> None:
        """Copy the slices that the other workers of this host have, between two barriers."""
        rank, own = self.world.rank, flats[self.local_rank]
        for worker, flat in zip(self._route.host, flats, strict=True):
            if worker != rank and self.across == "host":
                held = self._held_by(worker)
                self.slices(own, held).copy_(self.slices(flat, held))
            elif worker != rank:
                for owner in self._route.owners[worker]:
                    self.slice_of(own, owner).copy_(self.slice_of(flat, owner))

    def free(self) -> None:
        """Note a barrier of this host: all of its workers have finished their sums."""
        self._is_sending, self._summed_at = False, -1


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
    waits = [one.begin_gather(flats[one.local_rank], what) for one, flats in flats_of]
    for wait in waits:
        wait()
    if flats_of and flats_of[0][0].world.shares_memory:
        world = flats_of[0][0].world
        world.barrier_on_host(what)
        for exchange, flats in flats_of:
            exchange.copy_from_host(flats)
        world.barrier_on_host(what)  # no worker reads this storage after this
        for exchange, _ in flats_of:
            exchange.free()


def gather(exchanges: Sequence[Exchange]) -> list[list[Tensor]]:
    """Return what `Exchange.gather` does for each, in one round of messages."""
    all_gather([(one, one.storages()) for one in exchanges], "gathering gradients")
    return [one.converted() for one in exchanges]


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
        self.owners = {worker: [worker] for worker in self.host}
        for host in self.others:
            for number, owner in enumerate(host):
                self.owners[self.host[number % len(self.host)]].append(owner)
        self.is_uniform = len(set(map(len, hosts))) == 1
        by_number = sorted((rank - host.start, rank) for host in hosts for rank in host)
        ranks = [rank for _, rank in by_number]
        self.numbers = [ranks.index(rank) for rank in range(len(ranks))]


def _has_layout_of(view: Tensor, gradient: Tensor) -> bool:
    """Return whether a gradient's memory has the values of `view` in the same places."""
    is_lazy = gradient.is_conj() or gradient.is_neg()  # memory lacks an operation
    return not is_lazy and gradient.stride() == view.stride()


def _add_all(lanes: int, known: Mapping[Span, Tensor], out: Tensor) -> None:
    """Add known sums along the tree, up to all lanes; this may reuse their memory."""
    left, right = (_add_up(half, known) for half in halves((0, lanes)))
    torch.add(left, right, out=out)


def _add_serially(lanes: int, known: Mapping[Span, Tensor], out: Tensor) -> None:
    """Do what `_add_all` does, in pieces so small that torch uses the calling thread alone."""
    pieces = zip(*(one.split(SERIAL_ELEMENTS) for one in (out, *known.values())), strict=True)
    for piece, *sums in pieces:
        _add_all(lanes, dict(zip(known, sums, strict=True)), piece)


def _add_up(span: Span, known: Mapping[Span, Tensor]) -> Tensor:
    """Add known sums along the tree, in the memory of the first, which no other worker reads."""
    return tree_sum(span, known.get, Tensor.add_)


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
