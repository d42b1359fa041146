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


class Run(NamedTuple):
    """Neighbors in flat storage, which is sent in `parts`.

    They are several small parameters, or a large one without the `rest`, its last elements beyond a
    multiple of 64, which belong to the next run.
    """

    parameters: slice
    parts: Sequence[Tensor]
    rest: Tensor | None = None


class PartialSums(NamedTuple):
    """A part of an exchange: once it is there, `sums` has them by span; they add up to `out`."""

    sums: Mapping[Span, Tensor]  # 1-D, of the size of `out`
    out: Tensor
    arrival: Arrival


SendParts = Callable[[Sequence[Iterable[Tensor]]], list[PartialSums]]  # gets the parts of each sum


class Exchange:
    """Sums gradients of parameters of one dtype over all workers.

    With `round_to`, gradients are rounded to that dtype, and so is each sum of two of them. Sums on
    any worker then have that dtype exactly, in memory and in messages.

    A worker holds the sums of its own slice, and across "host" those of its partners' as well, so
    that the workers of each host hold all slices. That needs CPUs, the same number of workers on
    every host, and a world that has `partners` unless two hosts swap; otherwise workers hold their
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
        if not is_cpu:  # gradients and parameters may differ in dtype
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
        # Two hosts can swap their only sums in any world; otherwise, shares need direct connections
        # between partners. Without these, and on GPUs, only the owner of a slice sums it.
        is_pair = route.is_uniform and sums == [1, 1]
        is_early = is_cpu and (is_pair or world.partners is not None)
        self.across: Across = across if is_early else "world"
        self.swaps = is_pair and self.across == "host"
        self.held = self._held_by(world.rank)
        # [local_workers, subtrees], as the flat storages beside it: 1-D, [flat_size] each
        self._spans = [self._spans_of(range(rank, rank + 1)) for rank in route.host]
        self.own_spans = self._spans[self.local_rank]
        self._sums = self.shared_storage(max(map(len, self._spans)), self.dtype)
        self._own_flats = self._sums[self.local_rank]
        # The gradients of this worker's subtrees by parameter; `put` skips those already in place.
        self.own_views = list(map(self.views, self._own_flats[: len(self.own_spans)]))
        self.converts = False  # the held sums to the parameters' dtype, as they arrive
        self._total: Tensor | None = None
        self._converted: tuple[Tensor, list[Tensor]] | None = None
        self._summed_at = -1  # the world's number of barriers when gradients were last read
        self._is_sending = False  # workers may send the last ones until their optimizers' steps
        # GPUs of several machines, with several on some: so a sum of a machine, and not the
        # gradients of each worker, crosses the network
        near = world.machines if self.across == "world" else ()
        self._machine = Route(near, world.rank) if 1 < len(near) < world.size else None
        # sends on what was exchanged within a machine
        self._nearby: Callable[[], PartialSums] | None = None
        self._send: SendParts | None = None  # if what other hosts send is expected
        # of an exchange whose parts were not awaited yet
        self._started: list[PartialSums] | None = None
        if self.across == "host":  # CPUs, and every host needs all slices
            flat = self.slices(self._own_flats[0], self.held)  # 1-D, len(held) * slice_size
            if self.swaps:  # two hosts: what arrives is a sum of the same elements
                (self._other_span,) = self._spans_of(route.others[0])
                self._runs = [*self._cut(flat)]
                self._sizes = [part.numel() for run in self._runs for part in run.parts]
                self._received = torch.empty_like(flat)  # the sum of the other host
                self._arriving = self._received.split(self._sizes)
            else:  # any number of hosts: each partner adds a share of each part
                self._sizes = chunks(len(flat), self.dtype.itemsize, len(world.hosts))
                self._share_sizes = {size: self._divided(size) for size in set(self._sizes)}
                # by part: the sums of this worker's share of it, by span
                self._share_sums: list[dict[Span, Tensor]] = []
                self._shares = list(map(self._share_of, flat.split(self._sizes)))

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
        size = self.layout.slice_size
        return flat[numbers.start * size : numbers.stop * size]

    def slice_of(self, flat: Tensor, rank: int) -> Tensor:
        """Return a worker's own slice of flat storage, 1-D."""
        number = self._route.numbers[rank]
        return self.slices(flat, range(number, number + 1))

    def by_number(self, by_rank: Tensor) -> Tensor:
        """Sort rows of all workers' own slices, by rank, into the order of flat storage."""
        # [workers, columns]: row r is that of worker r, and goes to the place of its slice
        ranks = sorted(range(self.world.size), key=self._route.numbers.__getitem__)
        # an index would make a GPU wait
        return by_rank if ranks == [*range(self.world.size)] else by_rank[ranks]

    def _held_by(self, rank: int) -> range:
        number, hosts = self._route.numbers[rank], len(self.world.hosts)
        if self.across == "world":
            return range(number, number + 1)
        # partners are adjacent, so what a worker and its partners own is one range
        return range(number // hosts * hosts, (number // hosts + 1) * hosts)

    @property
    def is_read(self) -> bool:
        """Whether workers may still read the previous gradients: no barrier has happened since.

        All workers of a host get the same answer.
        """
        is_summing = self.world.barriers == self._summed_at
        return self.world.shares_memory and (self._is_sending or is_summing)

    def put(self, own_gradients: Sequence[Gradients]) -> None:
        """Copy in the gradients of this worker's subtrees; `sum` needs a barrier after this."""
        wait_until_free([self])
        for views, gradients in zip(self.own_views, own_gradients, strict=True):  # per subtree
            copy_gradients(views, gradients)

    def spare_held(self) -> None:
        """Move gathered gradients that user code still holds out of the memory of the next ones."""
        views = self.own_views[0] if self._converted is None else self._converted[1]
        for number, references in enumerate(list(map(getrefcount, views))):
            if references > UNHELD:
                held = views[number]
                views[number] = held.detach()  # a new object with the old memory
                held.data = held.clone()  # the old object with new memory

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

    def put_and_start(self, own_gradients: Sequence[Gradients]) -> None:
        """Do what `put` and `start` do, if it `sends_parts`; gradients must stay as they are."""
        wait_until_free([self])
        self._started = self._send_parts(self._put_in_parts(own_gradients[0]))

    def finish_unused(self) -> None:
        """Wait for an exchange that was started by a call that failed: its memory is in use."""
        for part in self._started or ():
            part.arrival.wait()
        self._started = None

    def start(self) -> None:
        """Begin to exchange sums with other hosts; all workers of this one must have called `put`.

        `sum` calls this if nothing was started.
        """
        if self._machine is not None:  # GPUs of several machines: first among those of this one
            self._nearby = self._send_nearby(self._machine)
        elif self.across == "host":  # CPU hosts that all need every slice: in parts
            self._started = self._send_parts()
        elif self._route.others:  # several hosts, or GPUs: each slice goes to its only owner
            owners, numbers = self._route.owners[self.world.rank], self._route.numbers
            # [owners, spans] of slices
            sums = {r: self._host_sums(range(numbers[r], numbers[r] + 1)) for r in owners}
            self._started = [self._send_to_owners(self._route, sums)]
        else:  # one host: everything is in its memory already
            host_sums = self._host_sums(self.held)
            self._started = [PartialSums(host_sums, self._out, Arrival(lambda: None))]

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
        return self._received if is_own else self.slices(self._own_flats[0], self.held)

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
            if (0, self._lanes) not in part.sums:  # of shares, another thread has added them
                _add_all(self._lanes, part.sums, part.out)
            end += part.out.numel()
            # parts that are there already are yielded together
            if number == len(started) or not started[number].arrival.is_there():
                ready = slice(start, end)
                yield out[ready] if self._total is None else self._total[ready].copy_(out[ready])
                start = end
        self._started = None
        if not (self.across == "host" and self.converts):  # those may call this at any time
            self._is_sending, self._summed_at = False, self.world.barriers

    def _host_sums(self, numbers: range) -> dict[Span, Tensor]:
        """Return slices of every sum on this host; adding them may reuse their memory."""
        return {
            span: self.slices(flat, numbers)
            for spans, flats in zip(self._spans, self._sums, strict=True)
            for span, flat in zip(spans, flats, strict=False)  # some workers have spare flats
        }

    def _cut(self, flat: Tensor) -> Iterator[Run]:
        """Cut a sum to be swapped into runs: one, unless gradients are sent without a copy."""
        itemsize, first, start = self.dtype.itemsize, 0, 0
        # several workers of a host add their gradients in flat storage, so none is sent as it is
        if len(self._route.host) == 1:
            pairs = zip(self.layout.sizes, self.layout.offsets, strict=False)
            for number, (size, offset) in enumerate(pairs):
                aligned_size = size // ALIGNMENT * ALIGNMENT
                if aligned_size * itemsize >= CHUNK_BYTES:
                    yield Run(slice(first, number), _in_chunks(flat[start:offset]))
                    parts = _in_chunks(flat[offset : offset + aligned_size])
                    rest = flat[offset + aligned_size : offset + size]
                    yield Run(slice(number, number + 1), parts, rest)
                    first, start = number + 1, offset + aligned_size
        yield Run(slice(first, None), _in_chunks(flat[start:]))

    def _send_parts(self, parts: Iterable[Tensor] | None = None) -> list[PartialSums]:
        """Send the sums of this host, in parts.

        `parts` replace its only sum, which is in flat storage, as each becomes available.
        """
        send, self._send = self._send or self._begin(), None
        host_sums = self._host_sums(self.held)
        # this worker adds the held slices for its whole host, each 1-D, len(held) * slice_size
        sums = [_add_up(span, host_sums) for span in self._host_spans]
        self._is_sending = True  # from the memory of the host's first worker
        if self._total is None and self.converts and self.dtype != self.parameters[0].dtype:
            self._total = torch.empty_like(sums[0], dtype=self.parameters[0].dtype)
        return send([total.split(self._sizes) for total in sums] if parts is None else [parts])

    def _begin(self) -> SendParts:
        """Begin to receive what other hosts send; return a call that sends the sums of this one."""
        return self._begin_swap() if self.swaps else self._begin_sums()

    def _begin_swap(self) -> SendParts:
        (partner,), (span,), other_span = self._route.partners, self._host_spans, self._other_span
        send = self.world.begin_swap(partner, self._arriving, "exchanging gradients")

        def start(sums: Sequence[Iterable[Tensor]]) -> list[PartialSums]:
            sent = list[Tensor]()  # to be added to what arrives

            def kept() -> Iterator[Tensor]:
                for part in sums[0]:
                    sent.append(part)
                    yield part

            arrivals = send(kept())
            out = self._arriving if self._out is self._received else self._out.split(self._sizes)
            # per part: [sent, arrived, out, arrival]
            rows = zip(sent, self._arriving, out, arrivals, strict=True)
            return [PartialSums({span: a, other_span: b}, *rest) for a, b, *rest in rows]

        return start

    def _begin_sums(self) -> SendParts:
        rank, root = self.world.rank, (0, self._lanes)
        partners = self.world.partners
        assert partners is not None  # noqa: S101  shares need them
        send = partners.begin_sums(self._shares, "exchanging gradients")

        def divided(sums: Sequence[Iterable[Tensor]]) -> Iterator[dict[int, list[Tensor]]]:
            # `sums` has views [host_spans, parts]; this goes from part to part
            for share_sums, parts in zip(self._share_sums, zip(*sums, strict=True), strict=True):
                shares = list(map(self._shares_of, parts))  # [host_spans, workers]
                share_sums.update(
                    zip(self._host_spans, [by_rank[rank] for by_rank in shares], strict=True)
                )
                yield {
                    other: [by_rank[other] for by_rank in shares] for other in self._route.partners
                }

        def start(sums: Sequence[Iterable[Tensor]]) -> list[PartialSums]:
            arrivals = send(divided(sums))
            pairs = zip(self._out.split(self._sizes), arrivals, strict=True)
            return [PartialSums({root: part}, part, arrival) for part, arrival in pairs]

        return start

    def _share_of(self, part: Tensor) -> Share:
        """Return this worker's share of a part; the sums of it go into `_share_sums`."""
        totals = self._shares_of(part)  # views of flat storage, so totals arrive in their place
        total = totals.pop(self.world.rank)
        share_sums, received = dict[Span, Tensor](), dict[int, Sequence[Tensor]]()
        for partner, host in zip(self._route.partners, self._route.others, strict=True):
            sums = {span: torch.empty_like(total) for span in self._spans_of(host)}
            share_sums.update(sums)
            received[partner] = list(sums.values())
        self._share_sums.append(share_sums)  # `divided` adds the sums of this host
        return Share(
            received, partial(_add_serially, self._lanes, share_sums, total), total, totals
        )

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

    def _put_in_parts(self, gradients: Gradients) -> Iterator[Tensor]:
        """Yield parts to send: large gradients as they are, others once they are copied in."""
        for run in self._runs:
            views, run_gradients = self.own_views[0][run.parameters], gradients[run.parameters]
            gradient = None if run.rest is None else run_gradients[0]
            if run.rest is None or gradient is None or not _has_layout_of(views[0], gradient):
                copy_gradients(views, run_gradients)
                yield from run.parts
                continue
            values = gradient.as_strided((gradient.numel(),), (1,))  # 1-D, in storage order
            *of_gradient, rest = values.split([part.numel() for part in (*run.parts, run.rest)])
            run.rest.copy_(rest)
            for part, source in zip(run.parts, of_gradient, strict=True):
                yield source if source.dtype == part.dtype else part.copy_(source)

    def _send_nearby(self, machine: Route) -> Callable[[], PartialSums]:
        """Begin to send the workers of this machine what they add up.

        Returns a call that begins to send the machine's sums to the owners on other machines.
        """
        size, owners, ranks = self.layout.slice_size, machine.owners, range(self.world.size)
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
        out = parts[0].new_empty((len(spans), len(owned), size))  # [spans, owned, slice_size]
        wait = self.world.begin_all_to_all(
            out.view(-1),
            [size * len(owned) * len(spans_from.get(rank, ())) for rank in ranks],
            torch.cat(parts),
            [size * len(owners.get(rank, ())) * len(sums) for rank in ranks],
            "exchanging gradients",
            polled=False,
        )
        by_owner = zip(owned, out.unbind(1), strict=True)  # [spans, slice_size] per owner
        sums_of = {owner: dict(zip(spans, part, strict=True)) for owner, part in by_owner}

        def send_on() -> PartialSums:
            with _side_stream(out.device) as stream:  # backward need not wait for the network
                wait()
                part = self._send_to_owners(machine, sums_of)
            if stream is not None:  # memory is not reused until both streams are done with it
                out.record_stream(stream)
                for row in part.sums.values():
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
            sent, served, spans_from[rank] = self._own_flats[0], [*ranks], own_spans
        else:  # [served, own_spans] slices; the empty one gives a dtype if there are none
            parts = [_add_up(span, sums[owner]) for owner in served for span in own_spans]
            sent = torch.cat([self._own_flats[0][:0], *parts])
        spans = [span for other in ranks for span in spans_from.get(other, ())]
        out = sent.new_empty((len(spans), size))  # [spans, slice_size], of slices with this owner
        wait = self.world.begin_all_to_all(
            out.view(-1),
            [size * len(spans_from.get(other, ())) for other in ranks],
            sent,
            [size * len(own_spans) * (other in served) for other in ranks],
            "exchanging gradients",
        )
        slices = range(self.own_number, self.own_number + 1)
        all_sums = {**sums[rank], **dict(zip(spans, out, strict=True))}
        return PartialSums(all_sums, self.slices(self._own_flats[0], slices), Arrival(wait))

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
        if self.across == "host":  # this host has all slices already
            return lambda: None
        if not self.world.shares_memory:  # GPUs, or one worker per host: slices are in rank order
            return self.world.begin_all_gather(flat, self.slice_of(flat, self.world.rank), what)
        if not self._route.others:  # one host: `copy_from_host` does it all
            return lambda: None
        # several hosts of CPU workers: each slice crosses the network once per other host
        sent = dict.fromkeys(self._route.partners, self.slice_of(flat, self.world.rank))
        owners = self._route.owners[self.world.rank][1:]
        received = {owner: self.slice_of(flat, owner) for owner in owners}
        return self.world.begin_transfer(sent, received, what)

    def copy_from_host(self, flats: Sequence[Tensor]) -> None:
        """Copy the slices that the other workers of this host have, between two barriers."""
        rank, own_flat = self.world.rank, flats[self.local_rank]
        for worker, flat in zip(self._route.host, flats, strict=True):
            if worker != rank and self.across == "host":
                held = self._held_by(worker)
                self.slices(own_flat, held).copy_(self.slices(flat, held))
            elif worker != rank:
                for owner in self._route.owners[worker]:
                    self.slice_of(own_flat, owner).copy_(self.slice_of(flat, owner))

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
    """Return what `Exchange.gather` does for each, in one round of messages."""
    all_gather([(exchange, exchange.storages()) for exchange in exchanges], "gathering gradients")
    return [exchange.converted() for exchange in exchanges]


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
        self.is_uniform = len(set(map(len, hosts))) == 1
        by_number = sorted((rank - host.start, rank) for host in hosts for rank in host)
        ranks = [rank for _, rank in by_number]
        # two hosts of two: slices lie in the order of ranks 0, 2, 1, 3
        self.numbers = [ranks.index(rank) for rank in range(len(ranks))]


def _has_layout_of(view: Tensor, gradient: Tensor) -> bool:
    """Return whether a gradient's memory has the values of `view` in the same places."""
    is_lazy = gradient.is_conj() or gradient.is_neg()  # memory lacks an operation
    return not is_lazy and gradient.stride() == view.stride()


def _add_all(lanes: int, sums: Mapping[Span, Tensor], out: Tensor) -> None:
    """Add sums along the tree, up to all lanes; this may reuse their memory."""
    left, right = (_add_up(half, sums) for half in halves((0, lanes)))
    torch.add(left, right, out=out)


def _add_serially(lanes: int, sums: Mapping[Span, Tensor], out: Tensor) -> None:
    """Do what `_add_all` does, in pieces so small that torch uses the calling thread alone."""
    pieces = zip(*(tensor.split(SERIAL_ELEMENTS) for tensor in (out, *sums.values())), strict=True)
    for piece, *parts in pieces:  # the same elements of `out` and of each sum
        _add_all(lanes, dict(zip(sums, parts, strict=True)), piece)


def _add_up(span: Span, sums: Mapping[Span, Tensor]) -> Tensor:
    """Add sums along the tree, in the memory of the first, which no other worker reads."""
    return tree_sum(span, sums.get, Tensor.add_)


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
